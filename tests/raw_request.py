"""A request to the queue, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.queue.wire import wire


def envelope(
    op: str, request_id: int = 1, waiting: Sequence[int] | None = None, frames: int = 0, **args: object
) -> bytes:
    """Of a client that has issued numbers up to this one, and waits for this one alone unless said otherwise.

    frames: behind it
    """
    return wire.pack(
        {
            "newest": request_id,
            "waiting": [request_id] if waiting is None else list(waiting),
            "run": "run",
            "session": "raw/1",
            "requests": [[request_id, op, wire.pack_value(args), frames]],
        }
    )
