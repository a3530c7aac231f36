"""The parser that finds the calls in a model's turns: `agent.tool_format`.

    auto    the tokenizer's response template (transformers)    the first that reads the call which
            ─▸ the parsers of vLLM                              the chat template itself writes
            ─▸ `tool_formats.py`

A library takes a malformed call for an answer, or rejects the turn. So the marks that open a call are counted: where
there are more of them than calls that were read, the turn has a `BadCall`, whose problem is shown to the model.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any, Literal, cast

from asyncrl.errors import ConfigError
from asyncrl.generator.agents.chat import Chat
from asyncrl.generator.agents.tool_formats import (
    FORMATS,
    OPENINGS,
    AnyCall,
    BadCall,
    ToolCall,
    ToolFormat,
    after_thoughts,
    as_call,
    at_most,
    calls_in,
)

log = logging.getLogger(__name__)

CallParser = Callable[[str, str, Sequence[Mapping[str, Any]]], tuple[AnyCall, ...]]
"""The calls in the text of a turn. It gets the text, that of the token which ended the turn, and the tools' schemas."""

PROBE = ToolCall("look_up", {"key": "a b", "count": 3})
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE.name,
        "description": "Look a key up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}, "count": {"type": "integer"}},
        },
    },
}

VLLM_PARSERS = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<|tool_call_begin|>", "kimi_k2"),
    ("<｜tool▁sep｜>", "deepseek_v3"),
    ("<｜tool▁sep｜>", "deepseek_v31"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ('"parameters"', "llama3_json"),
)
"""Pairs: a text that occurs in calls, and vLLM's name of the parser for such calls."""

TOOL_SETS = 16
"""Sets of tools of which vLLM's parsers are kept: a program's sub-agents have their own."""

MARK = re.compile(r"<[^<>\s]+[>=]|\[[A-Z_]+\]|to=functions\.")


def call_parser(chat: Chat, tool_format: ToolFormat | Literal["auto"]) -> CallParser:
    """Raises ConfigError if `auto` finds no parser."""
    if tool_format != "auto":
        return partial(_ours, tool_format)
    written = chat.turn_with_call(PROBE.name, PROBE.arguments)
    for name, make in _candidates(chat, written):
        try:
            parser = make()
            if parser(written, "", [PROBE_TOOL]) == (PROBE,):
                log.info("calls of tools are read by %s", name)
                return parser if name in FORMATS else _showing_unread(parser, _marks(written))
        except Exception as error:  # a library's parser may need a token that the tokenizer does not have
            log.debug("%s does not read the chat template's calls: %r", name, error)
    why = (
        "no parser reads the calls that the chat template writes"
        if written
        else "the chat template writes no calls"
    )
    raise ConfigError(
        "agent.tool_format",
        "auto",
        why + ("" if find_spec("vllm") else "; vLLM, whose parsers know more formats, is not installed"),
        f"name the format, one of {', '.join(FORMATS)}, or set tasks.chat_template=FILE",
    )


def check_format(chat: Chat, tool_format: ToolFormat | Literal["auto"]) -> None:
    """Log a format that is not the chat template's. Raises ConfigError if `auto` finds none."""
    parser, written = call_parser(chat, tool_format), chat.turn_with_call(PROBE.name, PROBE.arguments)
    if PROBE.name in written and parser(written, "", [PROBE_TOOL]) != (PROBE,):
        log.warning(
            "the chat template writes calls otherwise than agent.tool_format=%s: %r", tool_format, written
        )


def _candidates(chat: Chat, written: str) -> Iterator[tuple[str, Callable[[], CallParser]]]:
    """Names of parsers that may read this turn, and functions that make them."""
    if getattr(chat.tokenizer, "response_template", None) is not None:
        yield "the tokenizer's response template", partial(partial, _by_response_template, chat)
    if find_spec("vllm"):
        for mark, name in VLLM_PARSERS:
            if mark in written:
                yield f"vLLM's parser {name}", partial(_VllmParser, chat, name)
    for tool_format in FORMATS:
        yield tool_format, partial(partial, _ours, tool_format)


def _ours(
    tool_format: ToolFormat, text: str, end: str, tools: Sequence[Mapping[str, Any]]
) -> tuple[AnyCall, ...]:
    return calls_in(text, tool_format)


def _by_response_template(
    chat: Chat, text: str, end: str, tools: Sequence[Mapping[str, Any]]
) -> tuple[AnyCall, ...]:
    parse = cast(Any, chat.tokenizer).parse_response
    message = parse(text + end, prefix=chat.opening, tools=[dict(tool) for tool in tools] or None)
    return tuple(as_call(call.get("function", call)) for call in message.get("tool_calls") or ())


class _VllmParser:
    """Raises ImportError or KeyError if this vLLM does not have it."""

    def __init__(self, chat: Chat, name: str) -> None:
        from vllm.tool_parsers import ToolParserManager

        logging.getLogger("vllm.tool_parsers").setLevel(
            logging.CRITICAL
        )  # the model is shown what it cannot read
        self._class, self._tokenizer = ToolParserManager.get_tool_parser(name), chat.tokenizer
        self._made = lru_cache(TOOL_SETS)(self._make)

    def __call__(self, text: str, end: str, tools: Sequence[Mapping[str, Any]]) -> tuple[AnyCall, ...]:
        request, parser = self._made(json.dumps(tools, default=dict))
        found = parser.extract_tool_calls(after_thoughts(text), request).tool_calls
        return tuple(as_call({"name": c.function.name, "arguments": c.function.arguments}) for c in found)

    def _make(self, tools: str) -> tuple[Any, Any]:
        """A request and a parser for these tools, in JSON. This takes long: a parser reads the whole vocabulary."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(messages=[], model="", tools=json.loads(tools) or None)
        return request, self._class(self._tokenizer, request.tools)


def call_marks(chat: Chat, tool_format: ToolFormat | Literal["auto"]) -> tuple[str, ...]:
    """Texts that open a call."""
    opening = OPENINGS.get(tool_format)
    return (opening,) if opening else _marks(chat.turn_with_call(PROBE.name, PROBE.arguments))


# ---- calls that a library does not report


def _marks(written: str) -> tuple[str, ...]:
    """Texts that open a call in this turn: those between the beginning of the turn and the name of its tool."""
    return tuple(MARK.findall(after_thoughts(written).partition(PROBE.name)[0]))


def _showing_unread(parser: CallParser, marks: Sequence[str]) -> CallParser:
    """`parser`, with a BadCall for what it does not read."""

    def parse(text: str, end: str, tools: Sequence[Mapping[str, Any]]) -> tuple[AnyCall, ...]:
        try:
            found = parser(text, end, tools)
        except Exception as error:  # of a library, at what a policy wrote
            return (BadCall(f"The tool call cannot be parsed: {error}."),)
        if not marks:  # calls are bare objects
            return at_most(found or calls_in(text, "llama3"))
        opened = max(after_thoughts(text).count(mark) for mark in marks)
        if opened > len(found):
            found = (*found, BadCall(f"{opened - len(found)} of {opened} tool calls cannot be parsed."))
        return at_most(found)

    return parse
