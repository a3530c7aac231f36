"""OpenAI's /v1/responses. Nothing is stored: each request has the whole conversation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from msgspec import Struct

from asyncrl.generator.agents.chat import Message
from asyncrl.generator.gateway.conversation import (
    ApiReply,
    Arguments,
    AtLeastOne,
    Body,
    Conversation,
    RequestRefusedError,
    StreamEvent,
    arguments_of,
    assistant_message,
    decoded,
    named_answers,
    refuse,
)
from asyncrl.generator.gateway.openai_chat import Function, TextFormat, joined, openai_error, tool_schema

WITHOUT_EFFECT = re.compile(
    r"include|max_tool_calls|metadata|parallel_tool_calls|prompt_cache_\w+|reasoning|safety_identifier|service_tier|"
    r"store|stream_options|user"
)
Fields = dict[str, Any]


class Part(Struct):
    text: str
    type: Literal["input_text", "output_text", "reasoning_text"]


class Item(Struct):
    """A message, a call, the answer of a tool, or thoughts, which the record has already."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[Part] = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[Part] = ""


class ResponsesTool(Struct, tag_field="type", tag="function"):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class TextOptions(Struct, frozen=True):
    format: TextFormat = TextFormat()


class ResponsesRequest(Struct, forbid_unknown_fields=True):
    model: str
    input: str | list[Item]
    instructions: str = ""
    tools: list[ResponsesTool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    max_output_tokens: AtLeastOne | None = None
    stream: bool = False
    text: TextOptions = TextOptions()
    truncation: Literal["disabled"] = "disabled"
    top_logprobs: Literal[0] = 0
    background: bool = False


class Responses:
    """See `Api`."""

    path = "/v1/responses"

    def parse(self, raw: bytes) -> Conversation:
        request, sampling = decoded(raw, ResponsesRequest, WITHOUT_EFFECT)
        refuse(not request.input, "input", "is empty")
        refuse(request.background, "background", "has no place in a rollout")
        items = [Item(content=request.input)] if isinstance(request.input, str) else request.input
        system = [{"role": "system", "content": request.instructions}] if request.instructions else []
        return Conversation(
            request.model,
            named_answers([*system, *_messages(items)]),
            [tool_schema(Function(tool.name, tool.description, tool.parameters)) for tool in request.tools],
            request.max_output_tokens,
            request.tool_choice == "auto",
            request.stream,
            sampling=sampling,
        )

    def body(self, conversation: Conversation, reply: ApiReply, now: int) -> Body:
        cut = reply.finish == "length"
        usage = {"input_tokens": reply.prompt_tokens, "output_tokens": reply.output_tokens}
        return {
            **_begun(conversation, reply, now),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": list(_items(reply)),
            "usage": {
                **usage,
                "total_tokens": sum(usage.values()),
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": 0},
            },
        }

    def events(self, conversation: Conversation, reply: ApiReply, now: int) -> Iterator[StreamEvent]:
        whole = self.body(conversation, reply, now)
        for number, (kind, fields) in enumerate(_events(whole, _begun(conversation, reply, now))):
            yield f"response.{kind}", {"type": f"response.{kind}", "sequence_number": number, **fields}

    def error(self, error: RequestRefusedError) -> Body:
        return openai_error(error)


def _messages(items: Iterable[Item]) -> Iterator[Message]:
    """Text and calls that the policy wrote without a break are one message."""
    texts: list[str] = []
    calls: list[tuple[str, str, Arguments]] = []
    for at, item in enumerate(items):
        if item.type == "reasoning":
            continue
        if item.type == "function_call":
            calls.append((item.call_id, item.name, arguments_of(item.arguments, f"input[{at}].arguments")))
            continue
        text = joined(item.output if item.type == "function_call_output" else item.content)
        if item.type == "message" and item.role == "assistant":
            texts.append(text)
            continue
        if texts or calls:
            yield assistant_message("".join(texts), calls)
            texts, calls = [], []
        if item.type == "function_call_output":
            yield {"role": "tool", "content": text, "tool_call_id": item.call_id}
        else:
            yield {"role": "user" if item.role == "user" else "system", "content": text}
    if texts or calls:
        yield assistant_message("".join(texts), calls)


def _begun(conversation: Conversation, reply: ApiReply, now: int) -> Fields:
    """The response before its first item."""
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": now,
        "status": "in_progress",
        "model": conversation.model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto" if conversation.may_call else "none",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in conversation.tools],
    }


def _items(reply: ApiReply) -> Iterator[Fields]:
    status = "incomplete" if reply.finish == "length" else "completed"
    if reply.thoughts:
        thoughts = [{"type": "reasoning_text", "text": reply.thoughts}]
        yield {"id": f"rs_{reply.id}", "type": "reasoning", "summary": [], "content": thoughts}
    if reply.text or not reply.calls:
        text = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        message = {"type": "message", "role": "assistant", "status": status, "content": [text]}
        yield {"id": f"msg_{reply.id}", **message}
    for call in reply.calls:
        named = {"call_id": call.id, "name": call.name, "arguments": call.json}
        yield {"id": f"fc_{call.id}", "type": "function_call", "status": status, **named}


def _events(whole: Body, begun: Body) -> Iterator[tuple[str, Fields]]:
    """Each event and its fields."""
    yield "created", {"response": begun}
    yield "in_progress", {"response": begun}
    for index, item in enumerate(whole["output"]):
        empty: Fields = {"content": []} if "content" in item else {"arguments": ""}
        yield "output_item.added", {"output_index": index, "item": {**item, **empty}}
        yield from _content_events(item, {"item_id": item["id"], "output_index": index})
        yield "output_item.done", {"output_index": index, "item": item}
    yield whole["status"], {"response": whole}


def _content_events(item: Body, at: Body) -> Iterator[tuple[str, Fields]]:
    if item["type"] == "function_call":
        yield "function_call_arguments.delta", {**at, "delta": item["arguments"]}
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield "function_call_arguments.done", {**at, **done}
        return
    (part,) = item["content"]
    at = {**at, "content_index": 0}
    yield "content_part.added", {**at, "part": {**part, "text": ""}}
    yield f"{part['type']}.delta", {**at, "delta": part["text"], "logprobs": []}
    yield f"{part['type']}.done", {**at, "text": part["text"], "logprobs": []}
    yield "content_part.done", {**at, "part": part}
