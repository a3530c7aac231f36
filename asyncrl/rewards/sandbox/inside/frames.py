"""Frames on pipes: four bytes with the length, then JSON. No frame is longer than LONGEST."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

LONGEST = 1 << 24


class FrameError(Exception):
    """The other end is gone, is late, or wrote what is no frame."""


def packed(value: Any) -> bytes:
    """Raises FrameError for what is too long or too deep."""
    try:
        raw = json.dumps(value).encode()
    except RecursionError:
        raise FrameError("a value is too deep") from None
    if len(raw) > LONGEST:
        raise FrameError(f"a frame of {len(raw)} bytes is longer than {LONGEST}")
    return len(raw).to_bytes(4, "big") + raw


def received(fd: int, deadline: float | None = None, watched: int | None = None) -> Any:
    """The next frame. watched: a pipe that becomes readable when the other end has ended."""
    length = int.from_bytes(_exactly(fd, 4, deadline, watched), "big")
    if length > LONGEST:
        raise FrameError(f"a frame of {length} bytes is longer than {LONGEST}")
    try:
        return json.loads(_exactly(fd, length, deadline, watched))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"no JSON: {error}") from None


def send(fd: int, raw: bytes, deadline: float | None = None, watched: int | None = None) -> None:
    """Write a packed frame. A descriptor with a deadline must not block."""
    while raw:
        _wait(fd, select.POLLOUT, deadline, watched)
        try:
            raw = raw[os.write(fd, raw[: 1 << 16]) :]
        except BlockingIOError:
            continue
        except OSError as error:
            raise FrameError(f"the other end is gone: {error}") from None


def discard_unread(fd: int) -> None:
    """Read all that waits in a pipe, which must not block, and discard it."""
    try:
        while os.read(fd, 1 << 16):
            pass
    except BlockingIOError:
        pass


def _exactly(fd: int, length: int, deadline: float | None, watched: int | None) -> bytes:
    raw = b""
    while len(raw) < length:
        _wait(fd, select.POLLIN, deadline, watched)
        try:
            piece = os.read(fd, min(length - len(raw), 1 << 16))
        except BlockingIOError:
            continue
        if not piece:
            raise FrameError("the other end is gone")
        raw += piece
    return raw


def _wait(fd: int, event: int, deadline: float | None, watched: int | None) -> None:
    if deadline is None:
        return
    poll = select.poll()
    poll.register(fd, event)
    if watched is not None:
        poll.register(watched, select.POLLIN)
    ready = dict(poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))))
    if fd in ready:
        return
    raise FrameError("the other end has ended" if ready else "no answer before the deadline")
