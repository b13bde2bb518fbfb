"""A tokenizer's chat template: messages to ids, replies back to messages, tool results to ids.

Every turn of a conversation with tools needs the ids of all that came before, and of the results.
Rendering it all anew costs more with every turn (the square of the length in all) and may write
what the model said differently from how it said it: other spaces in JSON, other tokens for the same
text, reasoning left out. So, where the template is append-only, the ids that the sampler saw and
made are kept as they are, and only the results and the next reply's beginning are rendered
(`continuation`). Whether it is, is found by rendering once, at the start (`_learn`): all that a
model can generate must still be there, in its order, after results were added. A template that only
takes its own scaffold back (an empty <think></think> before a reply without reasoning) counts as
append-only. Where it is not, each turn is rendered whole, as the template wants it, and
chat.samples_from_turns decides what the rewriting splits.

A template that shows the model no tools (small instruct models have such) gets them in words: in
the system message, with calls and results as text in the Hermes form. `notes` says what was found.

Left out: calls inside of reasoning, images.
Test: pytest tests/test_template.py
"""

import copy
import json
import re
import uuid

import parsing
from chat import text_of

_TOOLS_IN_WORDS = """\
You can call these tools:
{tools}
To call one, write its name and its arguments as JSON:
<tool_call>
{{"name": "{name}", "arguments": {arguments}}}
</tool_call>"""


class ChatTemplate:
    """The chat template of a tokenizer, with the run's chat_template_kwargs.

    `schemas` are those of every tool that a conversation may get (JSON schemas as in
    transformers.utils.get_json_schema); without any, only `ids` and plain replies are needed, and
    nothing is learnt.
    """

    def __init__(self, tokenizer, arguments: dict | None = None, eos_token_ids=(), schemas=()):
        self.tokenizer, self.arguments = tokenizer, dict(arguments or {})
        self.eos_token_ids = frozenset(int(i) for i in eos_token_ids)
        self.form = None  # how calls are written: one of parsing's, or "response_template"
        self.tools_in_words = self.arguments_as_text = self.appends = False
        self.notes = ""
        if schemas:
            self._learn(list(schemas))

    # ---- messages to ids

    def ids(self, messages, schemas=()) -> list[int]:
        """Token ids of a conversation, up to where the assistant's next reply begins.

        A conversation that ends with an assistant message is continued inside that message.
        """
        return self._render(messages, schemas, tokenize=True)

    def _render(self, messages, schemas=(), **options):
        if not getattr(self.tokenizer, "chat_template", None) and not self.arguments.get(
            "chat_template"
        ):
            raise ValueError(
                "the tokenizer has no chat template: use an instruct model, or put a "
                "chat_template.jinja into the model folder"
            )
        messages = list(messages)
        if self.tools_in_words and schemas:
            messages, schemas = in_words(messages, schemas), ()
        elif self.arguments_as_text:
            messages = [_with_arguments_as_text(message) for message in messages]
        prefilled = messages[-1]["role"] == "assistant"
        return self.tokenizer.apply_chat_template(
            messages,
            tools=list(schemas) or None,
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
            return_dict=False,
            **options,
            **self.arguments,
        )

    def continuation(self, held_ids: list[int], results: list[dict], schemas) -> list[int] | None:
        """The next turn's prompt: `held_ids` (the last prompt and its reply), then the messages
        `results` and the beginning of the next reply. None where the template is not append-only:
        render the whole conversation.

        A reply that was cut off gets the end token that the template writes, as context.
        """
        if not self.appends:
            return None
        glue = self._after_call(results, schemas)
        added = self.tokenizer.encode(glue, add_special_tokens=False)
        return held_ids + (added[1:] if held_ids[-1] in self.eos_token_ids else added)

    def _after_call(self, results, schemas) -> str | None:
        """What the template writes from the end token of a message with a call to the beginning of
        the next reply, if the messages `results` are between. None if it writes no end token."""
        mark = uuid.uuid4().hex  # in no result
        stub = parsing.Call(schemas[0]["function"]["name"], {"a": mark}, id="call00000")
        call = {"role": "assistant", "content": "", "tool_calls": [stub.message]}
        messages = [{"role": "user", "content": "?"}, call, *results]
        text = self._render(messages, schemas, tokenize=False)
        begin = text.rfind(mark) + len(mark)
        ends = [text.find(self._decode([i], special=True), begin) for i in self.eos_token_ids]
        end = min((position for position in ends if position >= 0), default=None)
        return None if end is None else text[end:]

    # ---- replies to messages

    def reply(self, output_ids, prompt_ids, schemas=()) -> tuple[dict, list[parsing.Call]]:
        """(the assistant's message, the tool calls in it) of one sampled turn."""
        ids = list(output_ids)
        if not schemas:
            return {"role": "assistant", "content": self._decode(ids, special=False)}, []
        if self.form == "response_template":
            return self._reply_by_response_template(ids, prompt_ids, schemas)
        if ids and ids[-1] in self.eos_token_ids:
            ids.pop()
        text = self._decode(ids, special=True)
        content, calls = parsing.parse_calls(text, self.form, schemas)
        return _assistant_message(text, {"content": content}, calls), calls

    def _decode(self, ids, special: bool) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )

    def _reply_by_response_template(self, ids, prompt_ids, schemas):
        text = self._decode(ids, special=False)
        try:
            # The template may have begun the message: the end of the prompt tells.
            begun = self._decode(prompt_ids[-256:], special=True)
            said = self._decode(ids, special=True)
            parsed = self.tokenizer.parse_response(said, prefix=begun, tools=list(schemas))
            calls = []
            for i, one in enumerate(parsed.get("tool_calls") or ()):
                call = parsing.call_from(one.get("function", one))
                call.id = one.get("id") or f"call{i:05d}"
                calls.append(call)
        except Exception as error:  # whatever a user's template makes of what a model wrote
            calls, parsed = [parsing.Call("", error=f"the reply cannot be read: {error}")], {}
        return _assistant_message(text, parsed, calls), calls

    # ---- what the template does

    def _learn(self, schemas) -> None:
        self.tools_in_words = not self._shows_tools(schemas[0])
        own = getattr(self.tokenizer, "response_template", None)
        if self.tools_in_words:
            self.form = "hermes"
            self.notes = "the chat template shows no tools: they are described in the system prompt"
        elif own is not None:
            self.form = "response_template"
            self.notes = "tool calls are read by the tokenizer's response_template"
        else:
            self.form = parsing.find_format(self._source(schemas))
            if self.form is None:
                raise ValueError(
                    "how this model writes tool calls is not known: its chat template has none of "
                    "the forms of parsing.py; give the tokenizer a response_template "
                    "(transformers), or call the tools in a generate_one of your own"
                )
            self.notes = f"tool calls are read in the form {self.form!r}"
        for self.arguments_as_text in (False, True):
            try:
                self._after_call([_result("?", "?")], schemas)
                break
            except Exception as error:  # TypeError or TemplateError, as the template would have it
                problem = error
        else:
            raise ValueError(
                f"the chat template refuses a conversation with tools ({problem}); use a model "
                "that knows tools, or pass another template in chat_template_kwargs"
            )
        self.appends = self._is_append_only(schemas)
        self.notes += (
            "; the template is append-only: turns never fork"
            if self.appends
            else "; the template rewrites earlier turns: each turn is rendered whole and may fork"
        )

    def _source(self, schemas) -> str:
        return self.tokenizer.get_chat_template(self.arguments.get("chat_template"), schemas)

    def _shows_tools(self, schema) -> bool:
        mark, schema = uuid.uuid4().hex, copy.deepcopy(schema)
        schema["function"]["description"] = mark
        return mark in self._render([{"role": "user", "content": "?"}], [schema], tokenize=False)

    def _is_append_only(self, schemas) -> bool:
        """Is all that two turns generate still there, in order, after both turns' results?"""
        marks = [uuid.uuid4().hex for _ in range(6)]
        reasoning, content, first, first_result, second, second_result = marks
        source, name = self._source(schemas), schemas[0]["function"]["name"]
        message = {"role": "assistant", "content": content}
        if self.form in ("llama", "mistral"):  # a reply is calls or content, not both
            message["content"], marks = "", marks[2:]
        elif self.form == "response_template":
            for key in ("reasoning_content", "reasoning", "thinking"):
                message |= {key: reasoning} if re.search(rf"\b{key}\b", source) else {}
            marks = marks if len(message) > 2 else marks[1:]
        else:
            message["content"] = f"<think>\n{reasoning}\n</think>\n\n{content}"
        calls = [parsing.Call(name, {"a": mark}, id="call00000") for mark in (first, second)]
        messages = [
            {"role": "user", "content": "?"},
            message | {"tool_calls": [calls[0].message]},
            _result(name, first_result),
            {"role": "assistant", "content": "", "tool_calls": [calls[1].message]},
            _result(name, second_result),
        ]
        try:
            text = self._render(messages, schemas, tokenize=False)
            glue = self._after_call([_result(name, second_result)], schemas)
        except Exception:  # the template refuses such a conversation; then it is never continued
            return False
        found = [text.find(mark) for mark in marks]
        if -1 in found or found != sorted(found) or glue is None or second_result not in glue:
            return False
        ids = self.tokenizer.encode(glue, add_special_tokens=False)
        return ids[0] in self.eos_token_ids and text.endswith(glue)


def _result(name: str, content: str) -> dict:
    return {"role": "tool", "name": name, "tool_call_id": "call00000", "content": content}


def _assistant_message(text: str, parsed: dict, calls) -> dict:
    """The message of a reply; the text as it was written if one of its calls cannot be read."""
    for i, call in enumerate(calls):
        call.id = call.id or f"call{i:05d}"  # nine characters, as Mistral's template wants it
    if any(call.error for call in calls):
        return {"role": "assistant", "content": text}
    message = {"role": "assistant", "content": "", **parsed}
    return message | ({"tool_calls": [call.message for call in calls]} if calls else {})


def _with_arguments_as_text(message: dict) -> dict:
    if not message.get("tool_calls"):
        return message
    calls = copy.deepcopy(message["tool_calls"])
    for call in calls:
        if not isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = json.dumps(
                call["function"]["arguments"], ensure_ascii=False
            )
    return message | {"tool_calls": calls}


def _in_words(function: dict) -> str:
    """add(a: integer, b: integer): Adds two integers. a: The first. b: The second."""
    arguments, words = [], [function["description"] or ""]
    for name, argument in function["parameters"].get("properties", {}).items():
        kind = {key: value for key, value in argument.items() if key != "description"}
        if kind.keys() == {"type"} and isinstance(kind["type"], str):
            kind = kind["type"]
        arguments.append(f"{name}: {kind if isinstance(kind, str) else json.dumps(kind)}")
        words.append(f"{name}: {argument['description']}")
    return f"{function['name']}({', '.join(arguments)}): {' '.join(words)}"


def in_words(messages: list[dict], schemas) -> list[dict]:
    """The same conversation for a template that knows only text: tools in the system message, calls
    in the assistant's text, results in the user's."""
    function = schemas[0]["function"]
    example = {name: "..." for name in function["parameters"].get("properties", {})}
    tools = "\n".join(_in_words(schema["function"]) for schema in schemas)
    system = _TOOLS_IN_WORDS.format(
        tools=tools, name=function["name"], arguments=json.dumps(example)
    )
    if messages[0]["role"] == "system":
        system = f"{text_of(messages[0])}\n\n{system}"
        messages = messages[1:]
    plain = [{"role": "system", "content": system}]
    previous = None
    for message in messages:
        role, content = message["role"], text_of(message)
        if role == "tool":
            text = f"Result: {content}"  # between tags, a small model imitates it (LOG.md)
            if previous == "tool":
                plain[-1] = {"role": "user", "content": f"{plain[-1]['content']}\n{text}"}
            else:
                plain.append({"role": "user", "content": text})
        else:
            for call in message.get("tool_calls") or ():
                body = {key: call["function"][key] for key in ("name", "arguments")}
                text = json.dumps(body, ensure_ascii=False)
                content += f"\n<tool_call>\n{text}\n</tool_call>"
            plain.append({"role": role, "content": content.strip("\n")})
        previous = role
    return plain
