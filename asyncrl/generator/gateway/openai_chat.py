"""OpenAI's /v1/chat/completions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Struct

from asyncrl.generator.agents.chat import Message
from asyncrl.generator.agents.tools import Schema
from asyncrl.generator.gateway.conversation import (
    ApiReply,
    AtLeastOne,
    Body,
    Conversation,
    ReplyCall,
    RequestRefusedError,
    StreamEvent,
    arguments_of,
    assistant_message,
    decoded,
    named_answers,
    refuse,
)

WITHOUT_EFFECT = re.compile(
    r"metadata|parallel_tool_calls|prediction|prompt_cache_\w+|reasoning_effort|safety_identifier|service_tier|store|"
    r"user|verbosity"
)


class Text(Struct, tag_field="type", tag="text"):
    text: str


class Function(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(Struct, tag_field="type", tag="function"):
    function: Function


class CalledFunction(Struct):
    name: str
    arguments: str


class FunctionCall(Struct, tag_field="type", tag="function"):
    id: str
    function: CalledFunction


class ChatMessage(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Text] | None = None
    tool_calls: list[FunctionCall] | None = None
    tool_call_id: str = ""


class TextFormat(Struct, frozen=True, tag_field="type", tag="text"):
    """The format of all turns of the policy."""


class StreamOptions(Struct, frozen=True):
    include_usage: bool = False


class ChatRequest(Struct, forbid_unknown_fields=True):
    model: str
    messages: list[ChatMessage]
    tools: list[ChatTool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    max_tokens: AtLeastOne | None = None
    max_completion_tokens: AtLeastOne | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: Literal[1] = 1
    stop: str | list[str] = ""
    logprobs: bool = False
    response_format: TextFormat = TextFormat()
    modalities: list[Literal["text"]] = []


class ChatCompletions:
    """See `Api`."""

    path = "/v1/chat/completions"

    def parse(self, raw: bytes) -> Conversation:
        request, sampling = decoded(raw, ChatRequest, WITHOUT_EFFECT)
        refuse(not request.messages, "messages", "is empty")
        refuse(request.stop, "stop", "is the run's, in generator.stop")
        refuse(request.logprobs, "logprobs", "go into training and nowhere else")
        return Conversation(
            request.model,
            named_answers(
                _message(message, f"messages[{at}]") for at, message in enumerate(request.messages)
            ),
            [tool_schema(tool.function) for tool in request.tools],
            request.max_completion_tokens or request.max_tokens,
            request.tool_choice == "auto",
            request.stream,
            request.stream_options.include_usage,
            sampling,
        )

    def body(self, conversation: Conversation, reply: ApiReply, now: int) -> Body:
        message = {"role": "assistant", "refusal": None, **_content(reply)}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(reply)}
        return _completion("chat.completion", conversation, reply, now, choices=[choice], usage=_usage(reply))

    def events(self, conversation: Conversation, reply: ApiReply, now: int) -> Iterator[StreamEvent]:
        def chunk(*choices: Body, **more: Any) -> StreamEvent:
            return None, _completion(
                "chat.completion.chunk", conversation, reply, now, choices=choices, **more
            )

        content = _content(reply)
        if calls := content.get("tool_calls"):
            content["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        delta = {"role": "assistant", **content}
        yield chunk({"index": 0, "delta": delta, "finish_reason": None})
        yield chunk({"index": 0, "delta": {}, "finish_reason": _finish(reply)})
        if conversation.with_usage:
            yield chunk(usage=_usage(reply))
        yield None, "[DONE]"

    def error(self, error: RequestRefusedError) -> Body:
        return openai_error(error)


def openai_error(error: RequestRefusedError) -> Body:
    """The body of an error of any of OpenAI's APIs."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def tool_schema(function: Function) -> Schema:
    """A tool as chat templates read it."""
    parameters = function.parameters or {"type": "object", "properties": {}}
    named = {"name": function.name, "description": function.description or "", "parameters": parameters}
    return {"type": "function", "function": named}


def joined(content: str | list[Any] | None) -> str:
    """The text of a content that may be in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _message(message: ChatMessage, at: str) -> Message:
    text = joined(message.content)
    if message.role == "assistant":
        calls = [(call.id, call.function) for call in message.tool_calls or ()]
        param = f"{at}.tool_calls"
        return assistant_message(text, [(i, f.name, arguments_of(f.arguments, param)) for i, f in calls])
    refuse(message.content is None, f"{at}.content", "is missing")
    if message.role == "tool":
        return {"role": "tool", "content": text, "tool_call_id": message.tool_call_id}
    return {"role": "system" if message.role == "developer" else message.role, "content": text}


def _content(reply: ApiReply) -> dict[str, Any]:
    thoughts = {"reasoning_content": reply.thoughts} if reply.thoughts else {}
    calls = {"tool_calls": [_call(call) for call in reply.calls]} if reply.calls else {}
    return {"content": reply.text or None, **thoughts, **calls}


def _call(call: ReplyCall) -> Body:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.json}}


def _finish(reply: ApiReply) -> str:
    return "tool_calls" if reply.calls and reply.finish == "stop" else reply.finish


def _usage(reply: ApiReply) -> Body:
    counts = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.output_tokens}
    return {**counts, "total_tokens": sum(counts.values())}


def _completion(kind: str, conversation: Conversation, reply: ApiReply, now: int, **more: Any) -> Body:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": now,
        "model": conversation.model,
        **more,
    }
