"""What a model wrote: the text of a reply in, its content and its tool calls out.

Models write calls in the form in which their chat template shows them, so the template tells which
of these is meant; each is described where it is parsed:

    hermes      Hermes, Qwen2.5, Qwen3, many others     <tool_call>{"name": ...}</tool_call>
    qwen_coder  Qwen3-Coder, Qwen3.5                    <tool_call><function=...>...</tool_call>
    llama       Llama 3                                 {"name": ..., "parameters": {...}}
    deepseek    DeepSeek V3, R1, V3.1                   <|tool_calls_begin|>... in special tokens
    mistral     Mistral                                 [TOOL_CALLS]...

A call that cannot be read is a Call too, with an `error` to give back to the model: nothing that a
model writes raises. A tokenizer with a `response_template` needs none of this: transformers reads
the reply by it (template.ChatTemplate.reply).

Left out: other forms (gpt-oss, GLM, Kimi, Gemma), whose tokenizers must bring a response_template.
Test: pytest tests/test_parsing.py
"""

import json
import re
from dataclasses import dataclass, field


@dataclass
class Call:
    """One tool call of a reply."""

    name: str
    arguments: dict = field(default_factory=dict)
    error: str | None = None  # why it could not be read; the name may then be empty
    id: str = ""  # if the model gave one

    @property
    def message(self) -> dict:
        """As chat templates expect it in an assistant message's tool_calls."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"type": "function", "id": self.id, "function": function}


def find_format(template: str) -> str | None:
    """The name of the form of calls in a chat template's source, None if it is not known here."""
    for name, (marker, excluded, _) in _FORMATS.items():
        if re.search(marker, template) and not (excluded and re.search(excluded, template)):
            return name
    return None


def parse_calls(text: str, form: str, schemas=()) -> tuple[str, list[Call]]:
    """(content, calls in their order) of a reply without its end token. `schemas` of the tools are
    needed where the form itself has no types."""
    content, calls = _FORMATS[form][2](text, schemas)
    return (content.strip() if calls else content), calls


def _read_json(text: str) -> tuple:
    """(value, None), or (None, what is wrong with it)."""
    try:
        return json.loads(text, strict=False), None  # models write line breaks into strings
    except (ValueError, RecursionError) as error:
        return None, f"not valid JSON: {error}"


def call_from(value, arguments_name: str = "arguments") -> Call:
    """A call written as a JSON object. Arguments may be an object, or a string that holds one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call("", error='a tool call must be a JSON object with "name" and "arguments"')
    name, arguments = value["name"], value.get(arguments_name, value.get("arguments", {}))
    if isinstance(arguments, str):
        return _named_call(name, arguments)
    if arguments is not None and not isinstance(arguments, dict):
        return Call(name, error="the arguments of a tool call must be a JSON object")
    return Call(name, arguments or {}, id=str(value.get("id") or ""))


def _named_call(name: str, arguments: str, id: str = "") -> Call:
    """A call whose name stands apart from its arguments, a JSON object."""
    value, error = _read_json(arguments)
    if error:
        return Call(name, error=f"the arguments are {error}")
    if not isinstance(value, dict):
        return Call(name, error="the arguments of a tool call must be a JSON object")
    return Call(name, value, id=id)


def _blocks(text: str, begin: str, end: str) -> tuple[str, list[str]]:
    """(text outside, texts inside) of the blocks from `begin` to `end`. A block that is not closed
    ends with the text or where the next one begins."""
    outside, *rest = text.split(begin)
    blocks = []
    for part in rest:
        inside, _, after = part.partition(end)
        blocks.append(inside)
        outside += after
    return outside, blocks


# ------------------------------------------------------------------------------------- the forms


def _hermes(text, schemas):
    """<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>, one block a call."""
    content, blocks = _blocks(text, "<tool_call>", "</tool_call>")
    calls = []
    for inside in blocks:
        value, error = _read_json(inside)
        calls.append(Call("", error=f"the tool call is {error}") if error else call_from(value))
    return content, calls


def _qwen_coder(text, schemas):
    """<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>.

    Values are bare text between two line breaks: the tool's schema says what they are.
    """
    content, blocks = _blocks(text, "<tool_call>", "</tool_call>")
    calls = []
    for inside in blocks:
        function = re.match(r"\s*<function=([^>\s]*)>(.*?)</function>\s*$", inside, re.DOTALL)
        if function is None:
            calls.append(Call("", error="a tool call must be <function=NAME>...</function>"))
            continue
        name, body = function[1], function[2]
        pairs = re.findall(r"<parameter=([^>\s]*)>(.*?)</parameter>", body, re.DOTALL)
        types = _parameter_schemas(name, schemas)
        values = {key: _typed(_unframed(value), types.get(key, {})) for key, value in pairs}
        left_over = re.sub(r"<parameter=[^>\s]*>.*?</parameter>", "", body, flags=re.DOTALL).strip()
        error = f"unreadable between the parameters: {left_over[:80]!r}" if left_over else None
        calls.append(Call(name, {} if error else values, error))
    return content, calls


def _unframed(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def _parameter_schemas(name: str, schemas) -> dict:
    for schema in schemas:
        if schema["function"]["name"] == name:
            return schema["function"]["parameters"].get("properties", {})
    return {}


def _typed(text: str, schema: dict):
    """`text` as the JSON value that the schema asks for; itself if it is none of these."""
    kinds = schema.get("type", [part.get("type") for part in schema.get("anyOf", [])])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if schema.get("nullable") and text.strip().lower() in ("null", "none"):
        return None
    if "string" in kinds or not kinds:
        return text
    if "boolean" in kinds and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    value, error = _read_json(text)
    return text if error else value


def _llama(text, schemas):
    """The whole reply is {"name": "add", "parameters": {"a": 1}}, perhaps after <|python_tag|>;
    several are separated by semicolons. Other JSON is an answer, not a call."""
    body = text.strip().removeprefix("<|python_tag|>")
    is_call = body != text.strip() or re.match(r'\{\s*"(name|type)"\s*:', body)
    if not is_call:
        return text, []
    calls, decoder = [], json.JSONDecoder(strict=False)
    while body := body.strip(" \n;,"):
        try:
            value, end = decoder.raw_decode(body)
        except (ValueError, RecursionError) as error:
            calls.append(Call("", error=f"the tool call is not valid JSON: {error}"))
            break
        calls.append(call_from(value, "parameters"))
        body = body[end:]
    return "", calls


def _deepseek(text, schemas):
    """V3 and R1: <call_begin>function<sep>add\n```json\n{"a": 1}\n```<call_end>; V3.1:
    <call_begin>add<sep>{"a": 1}<call_end>; both inside <calls_begin>...<calls_end>."""
    content = text.partition(_DEEPSEEK["calls_begin"])[0]
    content = content.partition(_DEEPSEEK["call_begin"])[0]
    _, blocks = _blocks(text[len(content) :], _DEEPSEEK["call_begin"], _DEEPSEEK["call_end"])
    calls = []
    for inside in blocks:
        name, found, body = inside.partition(_DEEPSEEK["sep"])
        if found and name.strip() == "function":
            name, _, body = body.partition("\n")
            body = body.strip().removeprefix("```json").removesuffix("```")
        if not found:
            calls.append(Call("", error="a tool call must have a name and arguments"))
            continue
        calls.append(_named_call(name.strip(), body))
    if not calls and content != text:
        calls = [Call("", error="a tool call must have a name and arguments")]
    return content, calls


# Full-width bars and U+2581 for spaces, as in these models' vocabulary.
_DEEPSEEK = {
    name: f"<\uff5ctool\u2581{words}\uff5c>"
    for name, words in {
        "calls_begin": "calls\u2581begin",
        "call_begin": "call\u2581begin",
        "call_end": "call\u2581end",
        "sep": "sep",
    }.items()
}


def _mistral(text, schemas):
    """[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "..."}, ...], and in newer ones
    [TOOL_CALLS]add[ARGS]{"a": 1} a call, with [CALL_ID]... before [ARGS] in some."""
    content, *parts = text.split("[TOOL_CALLS]")
    calls = []
    for part in parts:
        name, found, arguments = part.partition("[ARGS]")
        if found:
            name, _, id = name.partition("[CALL_ID]")
            calls.append(_named_call(name.strip(), arguments, id.strip()))
            continue
        values, error = _read_json(part)
        if error:
            calls.append(Call("", error=f"the tool calls are {error}"))
            continue
        calls += [call_from(value) for value in (values if isinstance(values, list) else [values])]
    return content, calls


# name: (what a template of the form contains, what it does not, the parser); the first match counts
_FORMATS = {
    "qwen_coder": ("<function=", None, _qwen_coder),
    "hermes": ("<tool_call>", "<arg_key>", _hermes),
    "deepseek": (re.escape(_DEEPSEEK["call_begin"]), None, _deepseek),
    "mistral": (r"\[TOOL_CALLS\]", None, _mistral),
    "llama": (r'<\|python_tag\|>|"name": function name, "parameters"', None, _llama),
}
