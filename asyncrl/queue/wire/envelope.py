"""The messages between a client and the broker: requests, and their replies.

    client ▸ broker   frame 0: {newest, waiting, run, session, requests: [[number, op, arguments, frames], …]}
    broker ▸ client   frame 0: {replies: [[number, value, error, frames], …]}
                      frames 1…: the payload of the first one, of the second, …  each has `frames` of them

    frame 0 as bytes  b"ARLQ" · version byte · xxh3-64 of the map, 8 · msgpack map

The broker reads envelopes only; payload frames (payload.py) have seals of their own and pass through it untouched. A
message whose envelope was changed on its way is refused and counted, and its sender repeats it.

All requests or replies of one turn of a loop travel in one message: both sides and their I/O threads are woken once.
Arguments and replies are packed each by itself: one that cannot be read is nobody else's problem, and a reply that is
kept to be sent again is packed once.

Every message of a client carries the highest request number given so far, and the numbers still without a reply. All
others are over for ever, so that such statements may come late,
twice or in any order. A request that is over is never handled again, and its reply is forgotten; a request that is
not is handled once, however often it comes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import xxhash
from msgspec import Meta, Struct

from asyncrl.errors import WireError
from asyncrl.queue.protocol.requests import UNREADABLE
from asyncrl.queue.wire import wire

MAGIC, SEAL = b"ARLQ" + bytes([6]), struct.Struct("<Q")
SEALED = len(MAGIC) + SEAL.size
"""Where the map begins."""

Message = list[Any]
"""Frames of a message, its envelope first; or of one reply in a message, its packed value first."""

UNKNOWN = -1
"""The number in the broker's complaint about a message that it could not read. Requests count from 1, so that nobody
takes it for a reply."""

MAX_REQUESTS = 64
"""Requests that one client may wait for at once."""

REPLY_FRAMES = wire.MAX_FRAMES - 1
REPLY_BYTES = wire.MAX_ENVELOPE_BYTES - (1 << 16)
"""Limits on one reply: frames behind the envelope; bytes of tasks and payloads, of which a single group may have more.
The rest of an envelope is for numbers and names."""

SHARED_BYTES = 1 << 20
"""More than that in one message would only delay the first of them. Half of it: 5 to 15 % fewer groups a second."""

MAX_NAME = 256
"""Characters of the name of a run or session."""

REPLY = 4
"""Fields of a reply."""

Name = Annotated[str, Meta(max_length=MAX_NAME)]


class ClientEnvelope(Struct):
    """The envelope of a client's message. The annotation of a field is its check."""

    newest: int
    waiting: Annotated[list[int], Meta(max_length=4 * MAX_REQUESTS)]
    run: Name
    session: Name
    requests: Annotated[
        list[tuple[int, str, bytes, Annotated[int, Meta(ge=0)]]], Meta(max_length=4 * MAX_REQUESTS)
    ]


_calls = msgspec.msgpack.Decoder(ClientEnvelope)


class WireRequest(NamedTuple):
    """One request as it travels. args: packed."""

    number: int
    op: str
    args: bytes
    frames: Sequence[Any]


class ClientMessage(NamedTuple):
    """A client's message."""

    newest: int
    waiting: Sequence[int]
    run: str
    session: str
    requests: Sequence[WireRequest] = ()


class ReplyRoom:
    """The room that is left in a reply of several tasks or groups.

    >>> room = ReplyRoom()
    >>> room.take(1000, 9), room.take(23, 9), room.take(1, 9)
    (True, True, False)
    """

    def __init__(self) -> None:
        self._empty, self._frames, self._bytes = True, REPLY_FRAMES, REPLY_BYTES

    def take(self, frames: int, nbytes: int) -> bool:
        """Whether one more fits, which then has its room. The first one fits in any case."""
        if not self._empty and (frames > self._frames or nbytes > self._bytes):
            return False
        self._empty = False
        self._frames, self._bytes = self._frames - frames, self._bytes - nbytes
        return True


def pack_envelope(message: Mapping[str, Any]) -> bytes:
    """The first frame of a message."""
    return sealed(wire.pack_value(message))


def sealed(packed: bytes) -> bytes:
    """An envelope of bytes that should be a packed map."""
    return b"".join([MAGIC, SEAL.pack(xxhash.xxh3_64_intdigest(packed)), packed])


def unpack_envelope(frame: Any) -> dict[str, Any]:
    """The map of an envelope. WireError for anything else."""
    return wire.unpack_map(_opened(frame))


def pack_calls(call: ClientMessage) -> list[Message]:
    """As few messages as the limits allow; one for a call without requests."""
    parts = [[request.args, *request.frames] for request in call.requests]
    shared = list(_shared(parts)) or [range(0)]
    return [_packed_call(call, call.requests[share.start : share.stop]) for share in shared]


def unpack_call(frames: Sequence[Any]) -> ClientMessage:
    """The message in the frames behind the identity. WireError unless every field is of its kind."""
    try:
        call = _calls.decode(_envelope(frames))
    except UNREADABLE as error:
        raise WireError(f"envelope: {error}") from error
    waiting = call.waiting
    if waiting and not 0 < min(waiting) <= max(waiting) <= call.newest:
        raise WireError(f"envelope: waiting must be some of the numbers up to newest = {call.newest}")
    if not (call.run.isprintable() and call.session.isprintable()):
        raise WireError(
            f"envelope: the names {call.run!r:.100} and {call.session!r:.100} must be printable characters"
        )
    return ClientMessage(call.newest, waiting, call.run, call.session, _requests(call.requests, frames))


def pack_reply(number: int, value: Any, error: Sequence[str] | None, frames: Sequence[Any]) -> Message:
    """A part of a message: a packed reply, and its payload. TypeError, ValueError, OverflowError for what msgpack
    cannot pack."""
    return [wire.pack_value([number, value, error, len(frames)]), *frames]


def pack_replies(parts: Sequence[Message]) -> list[Message]:
    """`pack_reply`'s in as few messages as the limits allow, in the same order."""
    return [_packed_replies(parts[share.start : share.stop]) for share in _shared(parts)]


def unpack_replies(frames: Sequence[Any]) -> list[tuple[int, Any, Any, Sequence[Any]]]:
    """[(number, value, error, frames)]. WireError for anything else."""
    packed = wire.unpack_map(_envelope(frames)).get("replies")
    if not isinstance(packed, list) or {*map(type, packed)} - {bytes}:
        raise WireError("a message of the queue without replies")
    replies, at = [], 1
    for one in packed:
        reply = wire.unpack_value(one)
        if not isinstance(reply, list) or len(reply) != REPLY or not type(reply[0]) is type(reply[3]) is int:
            raise WireError("a reply that is none")
        number, value, error, count = reply
        replies.append((number, value, error, frames[at : at + count]))
        at += count
    return replies


# ---------------------------------------------------------------------- messages


def _packed_call(call: ClientMessage, requests: Sequence[WireRequest]) -> Message:
    entries = [[each.number, each.op, each.args, len(each.frames)] for each in requests]
    head = pack_envelope(
        {
            "newest": call.newest,
            "waiting": call.waiting,
            "run": call.run,
            "session": call.session,
            "requests": entries,
        }
    )
    return [head, *(frame for each in requests for frame in each.frames)]


def _packed_replies(parts: Sequence[Message]) -> Message:
    head = pack_envelope({"replies": [part[0] for part in parts]})
    return [head, *(frame for part in parts for frame in part[1:])]


def _envelope(frames: Sequence[Any]) -> memoryview:
    if not 0 < len(frames) <= wire.MAX_FRAMES:
        raise WireError(f"a message of {len(frames)} frames; 1 to {wire.MAX_FRAMES} are allowed")
    return _opened(frames[0])


def _opened(frame: Any) -> memoryview:
    view = memoryview(frame)
    wire.check_magic(view, MAGIC)
    if not SEALED <= len(view) <= wire.MAX_ENVELOPE_BYTES:
        raise WireError(f"an envelope of {len(view)} bytes; {wire.MAX_ENVELOPE_BYTES} are allowed")
    packed = view[SEALED:]
    (seal,) = SEAL.unpack_from(view, len(MAGIC))
    if xxhash.xxh3_64_intdigest(packed) != seal:
        raise WireError("an envelope that is not as it was sealed")
    return packed


def _requests(entries: Iterable[tuple[int, str, bytes, int]], frames: Sequence[Any]) -> list[WireRequest]:
    requests, at = [], 1
    for number, op, args, count in entries:
        requests.append(WireRequest(number, op, args, tuple(frames[at : at + count])))
        at += count
    if at != len(frames):
        raise WireError(f"envelope: {len(frames) - 1} frames behind it, its requests have {at - 1}")
    return requests


def _shared(parts: Sequence[Message]) -> Iterator[range]:
    """Which of them go into one message: frames of all, and bytes, unless one alone has more.

    >>> list(_shared([[bytes(600_000)], [bytes(400_000), b"x"], [bytes(100_000)], [bytes(9_000_000)]]))
    [range(0, 2), range(2, 3), range(3, 4)]
    """
    start, frames, nbytes = 0, 1, 0
    for at, part in enumerate(parts):
        size = _size(part)
        if at > start and (frames + len(part) - 1 > wire.MAX_FRAMES or nbytes + size > SHARED_BYTES):
            yield range(start, at)
            start, frames, nbytes = at, 1, 0
        frames, nbytes = frames + len(part) - 1, nbytes + size
    if parts:
        yield range(start, len(parts))


def _size(part: Iterable[Any]) -> int:
    return sum(map(len, part))
