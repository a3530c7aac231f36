"""Tool calls in what a model writes. Pure.

    hermes   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>           Hermes, Qwen2.5, Qwen3
    llama3   <|python_tag|>{"name": "add", "parameters": {"a": 1}}; {…}              Llama 3.1 and later
             <|python_tag|>add.call(a=1)                                             its form for built-in tools
    json     {"name": "add", "arguments": {"a": 1}}                                  alone, a list, or in a ``` block
    harmony  <|channel|>commentary to=functions.add<|message|>{"a": 1}               gpt-oss

"arguments" and "parameters" are both accepted in every format, as an object or as a string that holds one. A call that
cannot be parsed becomes a `BadCall`, whose problem is shown to the model. Thoughts, up to </think>, hold no calls.
`call_parsers.py` has the parsers of libraries.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

ToolFormat = Literal["hermes", "llama3", "harmony", "json"]

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
HARMONY_TOOL = re.compile(r"to=functions\.([^\s<]+)")
HARMONY_END = re.compile(r"<\|(?:call|end|return)\|>")
HARMONY_THOUGHT = re.compile(r"<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|>|\Z)", re.DOTALL)
NAMED = re.compile(r'"name"\s*:')
FENCED = re.compile(r"```(?:json)?+\s*+(.*?)```", re.DOTALL)
OPENINGS: Mapping[str, str] = {"hermes": HERMES_OPEN, "llama3": PYTHON_TAG, "json": "```"}
"""What stands before a call, unless the turn is the call alone."""
MOST_CALLS = 128
"""Calls of one turn. Each is answered with a message."""
BUILT_IN = re.compile(r"[A-Za-z_]\w*\.call\(")

# Models put newlines into JSON strings as they are.
DECODER = json.JSONDecoder(strict=False)
BETWEEN = re.compile(r"[ \t\r\n;,]*")
"""What may stand between two calls."""
UNREADABLE = (ValueError, RecursionError)
"""Errors for a text that is no JSON, has too many digits in a number, or is too deep."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The name of a tool, and its arguments."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BadCall:
    """A malformed call. problem: a sentence for the model."""

    problem: str


AnyCall = ToolCall | BadCall


def calls_in(text: str, tool_format: ToolFormat) -> tuple[AnyCall, ...]:
    """The calls in the order of the text; without any, the text is an answer.

    >>> calls_in('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "hermes")
    (ToolCall(name='add', arguments={'a': 1}),)
    """
    return at_most(tuple(islice(FORMATS[tool_format](after_thoughts(text)), MOST_CALLS + 1)))


def at_most(calls: tuple[AnyCall, ...]) -> tuple[AnyCall, ...]:
    """The first `MOST_CALLS` of them, and a BadCall for the others."""
    if len(calls) <= MOST_CALLS:
        return calls
    return (
        *calls[:MOST_CALLS],
        BadCall(f"A turn has at most {MOST_CALLS} tool calls; the others were not made."),
    )


@dataclass(frozen=True, slots=True)
class TurnParts:
    """A turn as servers give it. text: without thoughts and calls · malformed: its calls are no calls, but text"""

    thoughts: str
    text: str
    calls: tuple[ToolCall, ...] = ()
    malformed: bool = False


def parts_of(text: str, calls: Sequence[AnyCall], marks: Iterable[str]) -> TurnParts:
    """The parts of a turn. calls: those in it · marks: texts that open a call

    >>> parts_of('so</think>Sure. <tool_call>{"name": "now"}</tool_call>', [ToolCall("now")], ["<tool_call>"])
    TurnParts(thoughts='so', text='Sure.', calls=(ToolCall(name='now', arguments={}),), malformed=False)
    """
    good = tuple(call for call in calls if isinstance(call, ToolCall))
    malformed = len(good) < len(calls)
    if "<|channel|>" in text:
        analysis, visible = _harmony_texts(text)
        return TurnParts(analysis.strip(), visible, () if malformed else good, malformed)
    before, closed, after = text.rpartition("</think>")
    visible, _, unfinished = after.partition("<think>")
    thoughts = " ".join(filter(None, (part.replace("<think>", "").strip() for part in (before, unfinished))))
    if malformed or not good:
        return TurnParts(thoughts, visible.lstrip() if closed else visible, malformed=malformed)
    return TurnParts(thoughts, _before_calls(visible, marks).strip(), good)


def thoughts_and_text(text: str, marks: Iterable[str] | None) -> tuple[str, str]:
    """A turn's thoughts with their tags, and the text behind them. Thoughts that are not closed go on to the end.

    marks: texts that open a call, of a turn with calls, whose text ends there; if it has none, it is a call alone

    >>> thoughts_and_text("<think>so</think>Sure. <tool_call>{}", ["<tool_call>"])
    ('<think>so</think>', 'Sure.')
    """
    if "<|channel|>" in text:
        return _harmony_texts(text)
    thoughts, closed, after = text.rpartition("</think>")
    if "<think>" in after:
        return text, ""
    if marks is not None:
        after = _before_calls(after, marks).rstrip()
    return thoughts + closed, after


def _before_calls(text: str, marks: Iterable[str]) -> str:
    """Nothing where no mark is there: the turn is a call alone."""
    return text[: min((text.find(mark) for mark in marks if mark in text), default=0)]


def _harmony_texts(text: str) -> tuple[str, str]:
    thoughts = said = ""
    for message in text.split("<|start|>"):
        header, _, body = message.partition("<|message|>")
        body = HARMONY_END.split(body, maxsplit=1)[0]
        if "<|channel|>analysis" in header:
            thoughts += body
        elif not HARMONY_TOOL.search(header):
            said += body
    return thoughts, said


def _hermes(text: str) -> Iterator[AnyCall]:
    for piece in text.split(HERMES_OPEN)[1:]:
        yield from _calls(piece.partition(HERMES_CLOSE)[0])


def _llama3(text: str) -> Iterator[AnyCall]:
    _, tag, after = text.partition(PYTHON_TAG)
    body = (after if tag else text).strip()
    if tag and BUILT_IN.match(body):
        yield _built_in(body)
    elif tag or _looks_like_a_call(body):
        yield from _calls(body)


def _harmony(text: str) -> Iterator[AnyCall]:
    for message in text.split("<|start|>"):
        header, opened, body = message.partition("<|message|>")
        if tool := HARMONY_TOOL.search(header):
            if opened:
                yield as_call({"name": tool[1], "arguments": HARMONY_END.split(body, maxsplit=1)[0]})
            else:
                yield BadCall(f"The tool call of {tool[1]} has no <|message|>.")


def _plain(text: str) -> Iterator[AnyCall]:
    for body in FENCED.findall(text) or [text]:
        if _looks_like_a_call(body.strip()):
            yield from _calls(body)


FORMATS: Mapping[ToolFormat, Callable[[str], Iterator[AnyCall]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "harmony": _harmony,
    "json": _plain,
}


def after_thoughts(text: str) -> str:
    """The prompt may have opened the thoughts; those that are not closed go on to the end."""
    return HARMONY_THOUGHT.sub("", text).rpartition("</think>")[2].partition("<think>")[0]


def _looks_like_a_call(body: str) -> bool:
    return body[:1] in ("{", "[") and NAMED.search(body) is not None


def _calls(body: str) -> Iterator[AnyCall]:
    """JSON objects, one after another or in a list; ';' and ',' may stand between them."""
    body = body.strip().removeprefix("```json").removeprefix("```").removesuffix("```").strip()
    if not body:
        yield BadCall("The tool call is empty.")
    at = 0
    while at < len(body):
        try:
            value, at = DECODER.raw_decode(body, at)
        except json.JSONDecodeError as error:
            yield BadCall(f"The tool call is not valid JSON: {error.msg} at character {error.pos}.")
            return
        except UNREADABLE:
            yield BadCall("The tool call is nested too deeply, or has a number of too many digits.")
            return
        yield from map(as_call, value if isinstance(value, list) else [value])
        if found := BETWEEN.match(body, at):
            at = found.end()


def as_call(value: Any) -> AnyCall:
    """A call of an object with a name and arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return BadCall('A tool call is a JSON object with the keys "name" and "arguments".')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = DECODER.decode(arguments)
        except UNREADABLE:
            return BadCall(f'The "arguments" of {value["name"]} are a text, not a JSON object.')
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return BadCall(f'The "arguments" of {value["name"]} are not a JSON object.')
    try:
        json.dumps([value["name"], arguments], ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, *UNREADABLE):
        return BadCall("The tool call has a value that JSON does not have, such as NaN or half a character.")
    return ToolCall(value["name"], arguments)


def _built_in(body: str) -> AnyCall:
    """
    >>> _built_in('brave_search.call(query="asyncrl")')
    ToolCall(name='brave_search', arguments={'query': 'asyncrl'})
    """
    try:
        call = ast.parse(body.strip(), mode="eval").body
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Attribute)
        assert isinstance(call.func.value, ast.Name)
        assert not call.args
        arguments = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        return BadCall("The tool call is not of the form name.call(key=value).")
    return as_call({"name": call.func.value.id, "arguments": arguments})
