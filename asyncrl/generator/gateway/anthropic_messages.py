"""Anthropic's /v1/messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Struct

from asyncrl.generator.agents.chat import Message
from asyncrl.generator.gateway.conversation import (
    ApiReply,
    AtLeastOne,
    Body,
    Conversation,
    RequestRefusedError,
    StreamEvent,
    assistant_message,
    decoded,
    named_answers,
    refuse,
)
from asyncrl.generator.gateway.openai_chat import Function, Text, joined, tool_schema

WITHOUT_EFFECT = re.compile(
    r"cache_control|context_management|inference_geo|metadata|service_tier|speed|thinking"
)
ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class Block(Struct):
    """A text, a call, the answer of a tool, or thoughts, which the record has already."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | list[Text] = ""


class TurnMessage(Struct):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class AnthropicTool(Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] = "custom"


class ToolChoice(Struct, frozen=True):
    type: Literal["auto", "none"]


class AnthropicRequest(Struct, forbid_unknown_fields=True):
    model: str
    messages: list[TurnMessage]
    max_tokens: AtLeastOne
    system: str | list[Text] = ""
    tools: list[AnthropicTool] = []
    tool_choice: ToolChoice = ToolChoice("auto")
    stop_sequences: list[str] = []
    stream: bool = False


class AnthropicMessages:
    """See `Api`."""

    path = "/v1/messages"

    def parse(self, raw: bytes) -> Conversation:
        request, sampling = decoded(raw, AnthropicRequest, WITHOUT_EFFECT)
        refuse(not request.messages, "messages", "is empty")
        refuse(
            request.messages[-1].role == "assistant", "messages", "ends with a begun turn of the assistant"
        )
        refuse(
            request.stop_sequences,
            "stop_sequences",
            "are the run's, in generator.stop",
        )
        system = [{"role": "system", "content": joined(request.system)}] if request.system else []
        turns = [one for message in request.messages for one in _messages(message)]
        return Conversation(
            request.model,
            named_answers([*system, *turns]),
            [tool_schema(Function(tool.name, tool.description, tool.input_schema)) for tool in request.tools],
            request.max_tokens,
            request.tool_choice.type == "auto",
            request.stream,
            sampling=sampling,
        )

    def body(self, conversation: Conversation, reply: ApiReply, now: int) -> Body:
        cut, called = reply.finish == "length", bool(reply.calls)
        return {
            "id": f"msg_{reply.id}",
            "type": "message",
            "role": "assistant",
            "model": conversation.model,
            "content": list(_blocks(reply)),
            "stop_reason": "max_tokens" if cut else "tool_use" if called else "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.output_tokens},
        }

    def events(self, conversation: Conversation, reply: ApiReply, now: int) -> Iterator[StreamEvent]:
        for kind, fields in _events(self.body(conversation, reply, now)):
            yield kind, {"type": kind, **fields}

    def error(self, error: RequestRefusedError) -> Body:
        kind = ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}


def _messages(message: TurnMessage) -> Iterator[Message]:
    """Answers of tools are messages of their own, before the user's text."""
    blocks = [Block("text", message.content)] if isinstance(message.content, str) else message.content
    text = joined([block for block in blocks if block.type == "text"])
    if message.role == "assistant":
        calls = [block for block in blocks if block.type == "tool_use"]
        yield assistant_message(text, [(call.id, call.name, call.input) for call in calls])
        return
    answers = [block for block in blocks if block.type == "tool_result"]
    for answer in answers:
        yield {"role": "tool", "content": joined(answer.content), "tool_call_id": answer.tool_use_id}
    if text or not answers:
        yield {"role": "user", "content": text}


def _blocks(reply: ApiReply) -> Iterator[Body]:
    if reply.thoughts:
        yield {"type": "thinking", "thinking": reply.thoughts, "signature": ""}
    if reply.text or not reply.calls:
        yield {"type": "text", "text": reply.text}
    for call in reply.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}


def _events(whole: Body) -> Iterator[tuple[str, Body]]:
    """Each event and its fields."""
    ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield "message_start", {"message": {**whole, "content": [], "stop_reason": None}}
    for index, block in enumerate(whole["content"]):
        empty, delta = _in_pieces(block)
        yield "content_block_start", {"index": index, "content_block": empty}
        yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    yield "message_delta", {"delta": ended, "usage": whole["usage"]}
    yield "message_stop", {}


def _in_pieces(block: Body) -> tuple[Body, Body]:
    """A block without its content, and the content."""
    kind = block["type"]
    if kind == "tool_use":
        return {**block, "input": {}}, {
            "type": "input_json_delta",
            "partial_json": json.dumps(block["input"]),
        }
    return {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
