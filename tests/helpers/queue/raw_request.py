"""A request to the queue, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.queue.broker.queue_state import SessionRequest
from asyncrl.queue.protocol.requests import Request, unpack_request
from asyncrl.queue.storage.store import Frames
from asyncrl.queue.wire import wire
from asyncrl.queue.wire.envelope import pack_envelope


def envelope(
    op: str, request_id: int = 1, waiting: Sequence[int] | None = None, frames: int = 0, **args: object
) -> bytes:
    """Of a client that has issued numbers up to this one, and waits for this one alone unless said otherwise.

    frames: behind it
    """
    return pack_envelope(
        {
            "newest": request_id,
            "waiting": [request_id] if waiting is None else list(waiting),
            "run": "run",
            "session": "raw/1",
            "requests": [[request_id, op, wire.pack_value(args), frames]],
        }
    )


def request_of(
    verb: str, args: Mapping[str, object] | None = None, wait_s: float = 0.0, frames: Frames = ()
) -> Request:
    """The record of a request. WireError for arguments that the broker would not take."""
    nbytes = {"nbytes": sum(map(len, frames))} if frames else {}
    return unpack_request(verb, wire.pack_value({"wait_s": wait_s, **(args or {}), **nbytes}), frames)


def session_request(
    verb: str, session: str, args: Mapping[str, object], frames: Frames = ()
) -> SessionRequest:
    """A request of a session of run 'run', as the broker reads it."""
    return SessionRequest("run", session, unpack_request(verb, wire.pack_value(args), frames), frames)
