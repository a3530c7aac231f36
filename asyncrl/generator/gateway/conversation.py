"""The form between the APIs and the policy: a conversation that a program sends, and the policy's reply. Pure.

    body of a request ─▸ an API's `parse` ─▸ Conversation ─▸ the policy
    body of a response ◂─ `body`, `events` ◂─ ApiReply ◂────────────┘

Each API is a translation to and from these records: openai_chat.py, openai_responses.py, anthropic_messages.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec

from asyncrl.generator.agents.chat import Message
from asyncrl.generator.agents.tools import Schema

Body = Mapping[str, Any]
StreamEvent = tuple[str | None, Body | str]
"""An event of a stream: its name, if the API names events, and its data."""
Arguments = Mapping[str, Any]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
T = TypeVar("T")

SAMPLING = re.compile(r"temperature|top_[pk]|min_p|seed|(presence|frequency|repetition)_penalty|logit_bias")
"""Fields of a request that would change which tokens are drawn. The run's configuration alone decides that."""
UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`")
PLACE = re.compile(r" - at `\$\.?(.*)`$")


class RequestRefusedError(Exception):
    """A request that is answered with an error. status: of HTTP · param: the field at fault · code: the API's word."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


@dataclass(frozen=True, slots=True)
class ReplyCall:
    """A tool call of a reply."""

    id: str
    name: str
    arguments: Arguments

    @property
    def json(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ApiReply:
    """One turn of the policy. id: the same each time that a recorded turn is given again."""

    id: str
    thoughts: str
    text: str
    calls: tuple[ReplyCall, ...]
    finish: Literal["stop", "length"]
    prompt_tokens: int
    output_tokens: int

    @property
    def message(self) -> Message:
        """As a program returns it."""
        return assistant_message(self.text, [(call.id, call.name, call.arguments) for call in self.calls])


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request for a turn.

    messages    as chat templates read them · tools: schemas, likewise
    max_tokens  of the turn, as the program limits it
    may_call    False: the turn is text, also where it contains calls (tool_choice none)
    sampling    what the program demands of sampling, by the names of `SAMPLING`
    """

    model: str
    messages: Sequence[Message]
    tools: Sequence[Schema] = ()
    max_tokens: int | None = None
    may_call: bool = True
    stream: bool = False
    with_usage: bool = False
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reads_calls(self) -> bool:
        """Whether the calls in the turn are given as calls, and not as text."""
        return self.may_call and bool(self.tools)

    def digests(self) -> list[bytes]:
        """Hashes of the conversation without any message, with the first, the first two, … Ids have no influence."""
        digests = [_hashed(b"", list(self.tools))]
        for message in self.messages:
            digests.append(digest_after(digests[-1], message))
        return digests


class Api(Protocol):
    """The translation of one API. path: of its requests · now: seconds since 1970"""

    path: str

    def parse(self, raw: bytes) -> Conversation:
        """Raises RequestRefusedError."""
        ...

    def body(self, conversation: Conversation, reply: ApiReply, now: int) -> Body: ...

    def events(self, conversation: Conversation, reply: ApiReply, now: int) -> Iterator[StreamEvent]:
        """The response as a stream. Each text is one piece: calls are known once the turn is over."""
        ...

    def error(self, error: RequestRefusedError) -> Body: ...


def assistant_message(text: str, calls: Iterable[tuple[str, str, Arguments]] = ()) -> Message:
    """calls: (id, name, arguments) of each."""
    made = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        for number, name, arguments in calls
    ]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {})}


def digest_after(digest: bytes, message: Message) -> bytes:
    """The hash of a conversation with one message more. Programs may strip the text of turns."""
    role, content = message["role"], message["content"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return _hashed(digest, [role, content.strip() if role == "assistant" else content, calls])


def named_answers(messages: Iterable[Message]) -> list[Message]:
    """The messages. Answers of tools get the names of the tools, which some templates show."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        answered = message.get("tool_call_id")
        named.append({**message, "name": names[answered]} if answered in names else message)
    return named


def decoded(raw: bytes, kind: type[T], without_effect: re.Pattern[str]) -> tuple[T, dict[str, Any]]:
    """The body of a request, without the fields that have no effect, and what it demands of sampling. Null is no value.

    Raises RequestRefusedError, which names the field at fault.
    """
    try:
        body = msgspec.json.decode(raw, type=dict[str, Any])
        given = {k: v for k, v in body.items() if v is not None and not without_effect.fullmatch(k)}
        sampling = {name: given.pop(name) for name in list(given) if SAMPLING.fullmatch(name)}
        return msgspec.convert(given, kind), sampling
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        text = str(error)
    if unknown := UNKNOWN.match(text):
        why = f"Unrecognized or unsupported request argument supplied: {unknown[1]}"
        raise RequestRefusedError(why, unknown[1], code="unsupported_parameter")
    place = PLACE.search(text)
    raise RequestRefusedError(f"Invalid request: {text}", place[1] if place else None, code="invalid_value")


def arguments_of(text: str, param: str) -> Arguments:
    """The arguments of a call that a program returns. Raises RequestRefusedError."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestRefusedError(f"Invalid request: {param} is no JSON object: {error}", param) from None


def refuse(holds: object, param: str, why: str) -> None:
    """Raise RequestRefusedError for a value that is not supported."""
    if holds:
        raise RequestRefusedError(f"Unsupported value: '{param}' {why}", param, code="unsupported_value")


def server_sent(events: Iterable[StreamEvent]) -> bytes:
    """
    >>> server_sent([("ping", {"a": 1}), (None, "[DONE]")])
    b'event: ping\\ndata: {"a":1}\\n\\ndata: [DONE]\\n\\n'
    """
    pieces = []
    for name, data in events:
        text = data.encode() if isinstance(data, str) else msgspec.json.encode(data)
        pieces.append((f"event: {name}\n".encode() if name else b"") + b"data: " + text + b"\n\n")
    return b"".join(pieces)


def _hashed(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()
