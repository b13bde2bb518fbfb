"""parsing.py: replies as models write them, golden texts of each form, and what nobody foresaw."""
# ruff: noqa: E501 - golden texts

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import parsing
from parsing import Call

D = parsing._DEEPSEEK  # its special tokens, which are not ASCII
WEATHER = {
    "function": {
        "name": "weather",
        "parameters": {
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "hourly": {"type": "boolean"},
                "places": {"type": "array", "items": {"type": "number"}},
                "unit": {"type": "string", "nullable": True},
            }
        },
    }
}
PARIS = Call("weather", {"city": "Paris", "days": 3})
OSLO = Call("weather", {"city": "Oslo"})

GOLDEN = [
    (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n'
        '</tool_call>\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        "Let me look.",
        [PARIS, OSLO],
    ),
    (  # reasoning is content; arguments may be a string; a block may end with the reply
        "hermes",
        '<think>\nHm.\n</think>\n\n<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}',
        "<think>\nHm.\n</think>",
        [OSLO],
    ),
    (
        "qwen_coder",
        "Looking.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "Looking.",
        [PARIS],
    ),
    (  # values have the types of the schema; text keeps its lines
        "qwen_coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\n12\nx\n</parameter>\n<parameter=hourly>\n"
        "True\n</parameter>\n<parameter=places>\n[1.5, 2]\n</parameter>\n<parameter=unit>\nnull\n"
        "</parameter>\n</function>\n</tool_call>",
        "",
        [Call("weather", {"city": "12\nx", "hourly": True, "places": [1.5, 2], "unit": None})],
    ),
    (
        "llama",
        '{"name": "weather", "parameters": {"city": "Paris", "days": 3}}',
        "",
        [PARIS],
    ),
    (
        "llama",
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Paris", "days": 3}}; '
        '{"type": "function", "name": "weather", "parameters": {"city": "Oslo"}}',
        "",
        [PARIS, OSLO],
    ),
    ("llama", '{"answer": 42}', '{"answer": 42}', []),
    (
        "deepseek",  # V3 and R1
        f"Looking.{D['calls_begin']}{D['call_begin']}function{D['sep']}weather\n```json\n"
        f'{{"city": "Paris", "days": 3}}\n```{D["call_end"]}\n{D["call_begin"]}function{D["sep"]}'
        f'weather\n```json\n{{"city": "Oslo"}}\n```{D["call_end"]}',
        "Looking.",
        [PARIS, OSLO],
    ),
    (
        "deepseek",  # V3.1
        f'{D["calls_begin"]}{D["call_begin"]}weather{D["sep"]}{{"city": "Oslo"}}{D["call_end"]}',
        "",
        [OSLO],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris", "days": 3}, '
        '"id": "abcdefghi"}, {"name": "weather", "arguments": {"city": "Oslo"}}]',
        "",
        [Call("weather", {"city": "Paris", "days": 3}, id="abcdefghi"), OSLO],
    ),
    (
        "mistral",
        'Looking.[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}'
        '[TOOL_CALLS]weather[CALL_ID]x1[ARGS]{"city": "Oslo"}',
        "Looking.",
        [PARIS, Call("weather", {"city": "Oslo"}, id="x1")],
    ),
]


@pytest.mark.parametrize("form, text, content, calls", GOLDEN)
def test_calls_are_read_as_the_model_writes_them(form, text, content, calls):
    assert parsing.parse_calls(text, form, [WEATHER]) == (content, calls)


@pytest.mark.parametrize("form", parsing._FORMATS)
def test_a_reply_without_calls_is_content_as_it_is(form):
    assert parsing.parse_calls(" The sum is 4.\n", form) == (" The sum is 4.\n", [])


MALFORMED = [
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city"', "not valid JSON"),
    ("hermes", "<tool_call>\n[1, 2]\n</tool_call>", "must be a JSON object"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '"name" and "arguments"'),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>', "JSON object"),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
    ("qwen_coder", '<tool_call>{"name": "weather"}</tool_call>', "<function=NAME>"),
    ("qwen_coder", "<tool_call><function=weather>x=1</function></tool_call>", "'x=1'"),
    ("llama", '{"name": "weather", "parameters": {', "not valid JSON"),
    ("deepseek", f"{D['calls_begin']}weather", "a name and arguments"),
    ("deepseek", f"{D['call_begin']}weather{D['sep']}{{", "arguments are not valid JSON"),
    ("mistral", '[TOOL_CALLS][{"name"', "not valid JSON"),
    ("mistral", "[TOOL_CALLS]weather[ARGS]7", "must be a JSON object"),
]


@pytest.mark.parametrize("form, text, error", MALFORMED)
def test_a_malformed_call_is_a_call_with_the_reason(form, text, error):
    _, calls = parsing.parse_calls(text, form, [WEATHER])
    assert len(calls) == 1 and error in calls[0].error


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function=weather>", "</function>", "<parameter=city>",
     "</parameter>", '{"name": "weather", ', '"arguments": {}}', "[TOOL_CALLS]", "[ARGS]", "{", "}",
     "<|python_tag|>", "[", "]", "\n", *D.values()]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(parsing._FORMATS)), st.lists(PIECES | st.text(max_size=5), max_size=12))
def test_nothing_that_a_model_writes_raises(form, pieces):
    content, calls = parsing.parse_calls("".join(pieces), form, [WEATHER])
    assert isinstance(content, str)
    for call in calls:
        assert call.error or (isinstance(call.name, str) and isinstance(call.arguments, dict))
