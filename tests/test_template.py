"""template.py over several small chat templates; the last test fuzzes the whole loop over turns."""
# ruff: noqa: E501 - lines of templates

import asyncio
import itertools
import json

import pytest
from conftest import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout import Run

import chat
import tools
from template import ChatTemplate

END, START = "<|im_end|>", "<|im_start|>"
# Tools are shown, calls are written in the Hermes form, nothing is left out.
HERMES = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call></tool_call>.<|im_end|>
{% endif %}{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}{% if message.content or not loop.first %}

{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# ... but only the last message keeps its reasoning, as DeepSeek R1's and others' do.
DROPS = HERMES.replace(
    "{{ message.content }}{% for", "{{ message.content.split('</think>')[-1] }}{% for"
)
# ... or a reply begins with an empty <think>, which is not there afterwards, as in Qwen3.
SCAFFOLD = HERMES.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}",
)
# ... or arguments must be text, as in DeepSeek V3's.
TEXT_ARGUMENTS = HERMES.replace(
    '"arguments": {{ call.function.arguments | tojson }}',
    """"arguments": {{ '' + call.function.arguments }}""",
)
XML = HERMES.replace(
    """{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
""",
    """<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value }}
</parameter>
{% endfor %}</function>
""",
)
LLAMA = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{"name": function name, "parameters": ...}<|im_end|>{% endif %}{% for message in messages %}
{%- if message.tool_calls %}{% if message.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}
<|im_start|>assistant
{"name": "{{ message.tool_calls[0].function.name }}", "parameters": {{ message.tool_calls[0].function.arguments | tojson }}}<|im_end|>
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MISTRAL = """{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for message in messages %}
{%- if message.role == 'tool' %}{% if message.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- elif message.tool_calls %}[TOOL_CALLS]{% for call in message.tool_calls %}{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>
{%- elif message.role == 'assistant' %} {{ message.content }}<|im_end|>
{%- else %}[INST]{{ message.content }}[/INST]{% endif %}{% endfor %}"""
TEMPLATES = {
    "words": None, "hermes": HERMES, "drops": DROPS, "scaffold": SCAFFOLD, "text": TEXT_ARGUMENTS,
    "xml": XML, "llama": LLAMA, "mistral": MISTRAL,
}  # fmt: skip


def add(a: int, b: int = 0) -> int:
    """Adds.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def echo(text: str) -> str:
    """Says it again.

    Args:
        text: What to say.
    """
    return text


TOOLS = [echo, add]
SCHEMAS = [tools.schema(tool) for tool in TOOLS]


def template(name, **arguments):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATES[name] or tokenizer.chat_template
    return ChatTemplate(tokenizer, arguments, [256, 257], SCHEMAS)


def text_of(learnt, ids):
    return learnt.tokenizer.decode(ids, skip_special_tokens=False)


# ----------------------------------------------------------------------------------- without tools


def test_rendered_prompt_ends_where_the_reply_begins():
    plain = ChatTemplate(make_tokenizer())
    ids = plain.ids([{"role": "user", "content": "hi"}])
    assert text_of(plain, ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_prefilled_assistant_message_is_continued():
    plain = ChatTemplate(make_tokenizer())
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer"}]
    assert text_of(plain, plain.ids(messages)).endswith("<|im_start|>assistant\nThe answer")


def test_template_arguments_reach_the_template():
    arguments = {"chat_template": "{{ mood }}:{{ messages[0]['content'] }}", "mood": "terse"}
    plain = ChatTemplate(make_tokenizer(), arguments)
    assert text_of(plain, plain.ids([{"role": "user", "content": "hi"}])) == "terse:hi"


def test_tokenizer_without_a_template_is_named():
    with pytest.raises(ValueError, match="no chat template: use an instruct model"):
        ChatTemplate(object()).ids([{"role": "user", "content": "hi"}])


# -------------------------------------------------------------------------------- what it is like


@pytest.mark.parametrize(
    "name, form, appends",
    [
        ("words", "hermes", True),
        ("hermes", "hermes", True),
        ("drops", "hermes", False),
        ("scaffold", "hermes", True),
        ("text", "hermes", True),
        ("xml", "qwen_coder", True),
        ("llama", "llama", True),
        ("mistral", "mistral", True),
    ],
)
def test_template_is_understood_by_rendering(name, form, appends):
    learnt = template(name)
    assert (learnt.form, learnt.appends) == (form, appends)
    assert learnt.tools_in_words == (name == "words")
    assert learnt.arguments_as_text == (name == "text")
    assert ("append-only" in learnt.notes) == appends


def test_unknown_form_of_calls_is_refused_with_the_remedy():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = HERMES.replace("tool_call>", "tc>")
    with pytest.raises(ValueError, match="give the tokenizer a response_template"):
        ChatTemplate(tokenizer, {}, [256], SCHEMAS)
    tokenizer.chat_template = (
        HERMES + "{% if tools and messages|length > 1 %}{{ 1 / 0 }}{% endif %}"
    )
    with pytest.raises(ValueError, match="refuses a conversation with tools .*division by zero"):
        ChatTemplate(tokenizer, {}, [256], SCHEMAS)


def test_response_template_of_the_tokenizer_is_preferred():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = HERMES.replace("tool_call>", "tc>")
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {"close": END},
            "tool_calls": {
                "open": "<tc>", "close": "</tc>", "content": "json", "repeats": True,
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }  # fmt: skip
    learnt = ChatTemplate(tokenizer, {}, [256, 257], SCHEMAS)
    assert (learnt.form, learnt.appends) == ("response_template", True)
    prompt = learnt.ids([{"role": "user", "content": "?"}], SCHEMAS)
    reply = 'Hm.<tc>{"name": "add", "arguments": {"a": 1}}</tc>' + END
    message, calls = learnt.reply(tokenizer.encode(reply), prompt, SCHEMAS)
    assert [(call.name, call.arguments, call.error) for call in calls] == [("add", {"a": 1}, None)]
    assert message["content"] == "Hm." and len(message["tool_calls"]) == 1
    message, calls = learnt.reply(tokenizer.encode("<tc>{nonsense</tc>" + END), prompt, SCHEMAS)
    assert "cannot be read" in calls[0].error and "nonsense" in message["content"]


# ------------------------------------------------------------------------------------ continuation

REPLIES = {  # as each model would write it itself
    "llama": '{"name": "add", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1}',
    "xml": "Yes.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "words": 'Yes.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
}


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in ("drops", "scaffold")])
def test_continued_prompt_is_the_rendered_one_if_the_reply_is_as_the_template_writes_it(name):
    learnt = template(name)
    hermes = 'Yes.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    messages = [{"role": "user", "content": "1?"}]
    held = learnt.ids(messages, SCHEMAS)
    for round in range(2):
        reply = learnt.tokenizer.encode(REPLIES.get(name, hermes) + END, add_special_tokens=False)
        message, (call,) = learnt.reply(reply, held, SCHEMAS)
        assert (call.name, call.arguments, call.error) == ("add", {"a": 1}, None)
        result = {
            "role": "tool",
            "name": "add",
            "tool_call_id": call.id,
            "content": f"{round} \u2211",
        }
        messages += [message, result]
        held = learnt.continuation(held + reply, [result], SCHEMAS)
        assert text_of(learnt, held) == text_of(learnt, learnt.ids(messages, SCHEMAS))
        assert held == learnt.ids(messages, SCHEMAS)


def test_what_the_model_wrote_is_kept_however_it_wrote_it():
    learnt = template("scaffold")
    prompt = learnt.ids([{"role": "user", "content": "1?"}], SCHEMAS)
    for end in (END, ""):  # a reply that was cut off gets the end that the template writes
        text = '<tool_call>{ "arguments":{"a":1},"name":"add" }</tool_call>'
        reply = learnt.tokenizer.encode(text + end)
        result = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "1"}
        held = learnt.continuation(prompt + reply, [result], SCHEMAS)
        assert text_of(learnt, held[len(prompt) :]) == (
            text + "<|im_end|>\n<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )


def test_tools_in_words_say_what_there_is_and_how_to_call_it():
    learnt = template("words")
    text = text_of(learnt, learnt.ids([{"role": "user", "content": "?"}], SCHEMAS))
    assert "echo(text: string): Says it again. text: What to say." in text
    assert '{"name": "echo", "arguments": {"text": "..."}}' in text
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
    text = text_of(learnt, learnt.ids(own, SCHEMAS))
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call")
    parts = [{"role": "user", "content": [{"type": "text", "text": "In parts"}]}]
    assert "user\nIn parts<|im_end|>" in text_of(learnt, learnt.ids(parts, SCHEMAS))


# -------------------------------------------------------------------------------------- the loop

CALLS = {
    "llama": '{"name": "NAME", "parameters": ARGUMENTS}',
    "mistral": "[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
    "xml": "<tool_call>\n<function=NAME>\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>",
}
HERMES_CALL = '<tool_call>\n{"name": "NAME",  "arguments": ARGUMENTS}\n</tool_call>'


@st.composite
def replies(draw):
    """(template, what the model says turn by turn): calls good and bad, reasoning, odd texts, empty
    replies, and ends of all kinds."""
    name = draw(st.sampled_from(list(TEMPLATES)))
    odd = st.text(max_size=6) | st.sampled_from(
        ["\u0000\ud7ff\U0001f9ea\u202e", END, START, "\u2211"]
    )
    said = []
    for _ in range(draw(st.integers(1, 4))):
        text = draw(st.sampled_from(["", "<think>\nhm\n</think>\n\n"])) + draw(odd)
        for _ in range(draw(st.integers(0, 2))):
            arguments = {"text": draw(odd)}
            call = CALLS.get(name, HERMES_CALL)
            call = call.replace("NAME", draw(st.sampled_from(["echo", "add", "nothing"])))
            text += call.replace("ARGUMENTS", draw(st.sampled_from([json.dumps(arguments), "{"])))
        said.append((text, draw(st.sampled_from([[], [256], [257]]))))
    return name, said


class Scripted:
    """generate_one_turn that says what it was told, a log-prob of its own for each token."""

    def __init__(self, tokenizer, said):
        self.tokenizer, self.said, self.n, self.turns = tokenizer, iter(said), 0, []

    async def __call__(self, prompt_ids):
        text, end = next(self.said, ("done", [256]))
        ids = self.tokenizer.encode(text, add_special_tokens=False) + end
        numbers = [-float(self.n + i) for i in range(len(ids))]
        self.n += len(ids)
        self.turns.append(chat.TurnRecord(prompt_ids, ids, numbers))
        return self.turns[-1]


class NoServer:
    url = "http://127.0.0.1:9"


LEARNT = {name: template(name) for name in TEMPLATES}


@settings(max_examples=120, deadline=None)
@given(replies())
def test_what_is_trained_is_what_was_sampled_each_token_once_and_no_context(case):
    name, said = case
    run = Run(NoServer, [], tokenizer=LEARNT[name].tokenizer)
    loop = run.loop
    loop.template, loop.tool_names = LEARNT[name], ["add"]
    loop.generate_one_turn = scripted = Scripted(LEARNT[name].tokenizer, said)
    prompt = [{"role": "user", "content": "\u00bfqu\u00e9?"}]
    rollout = asyncio.run(loop.generate_one(prompt, TOOLS))
    assert rollout.turns == scripted.turns
    samples, drifts = chat.samples_from_turns(rollout.turns)
    expected = list(itertools.chain.from_iterable(turn.output_ids for turn in scripted.turns))
    got = sorted(
        (-log_prob, i)
        for sample in samples
        for i, log_prob in zip(
            sample.input_ids[sample.trained].tolist(), sample.sampler_log_probs[sample.trained]
        )
    )
    assert got == list(enumerate(expected))
    assert rollout.completion_ids == expected
    if LEARNT[name].appends:  # one sample, whatever was said
        assert len(samples) == bool(expected) and not any(drifts)
    else:
        starts = [i for i, m in enumerate(rollout.completion) if m["role"] == "assistant"]
        for turn, i in zip(rollout.turns, starts):
            messages = [*prompt, *rollout.completion[:i]]
            assert list(turn.prompt_ids) == LEARNT[name].ids(messages, SCHEMAS)
    roles = [message["role"] for message in rollout.completion]
    assert roles.count("assistant") == len(rollout.turns)
    assert roles.count("tool") == rollout.tool_call_count
