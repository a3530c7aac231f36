"""Bytes of the queue: versioned msgpack envelopes, and the plain values in them. No pickle.

    envelope frame   b"ARLQ" · version byte · msgpack map

The broker reads envelopes only; payload frames (payload.py) pass through it untouched.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import msgpack

from asyncrl.errors import WireError
from asyncrl.types import Task

Buffer = bytes | memoryview

VERSION = 5
ENVELOPE_MAGIC = b"ARLQ" + bytes([VERSION])

MAX_FRAME_BYTES = 1 << 30
MAX_ENVELOPE_BYTES = 1 << 26
MAX_FRAMES = 1024
MAX_ITEMS = 1 << 17
"""Limits on one message: bytes of a frame and of the envelope, frames, entries of one list or map of the envelope."""

BAD_MSGPACK = (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError, MemoryError)


class _Packer(threading.local):
    """One for every thread: to make one takes longer than to use it."""

    def __init__(self) -> None:
        self.pack = msgpack.Packer(use_bin_type=True).pack


_packer = _Packer()


def pack(message: Mapping[str, Any]) -> bytes:
    """The envelope frame of a message of plain values."""
    return ENVELOPE_MAGIC + pack_value(message)


def unpack(frame: Buffer) -> dict[str, Any]:
    """The message of an envelope frame. WireError names the fault."""
    view = memoryview(frame)
    check_magic(view, ENVELOPE_MAGIC)
    if len(view) > MAX_ENVELOPE_BYTES:
        raise WireError(f"an envelope of {len(view)} bytes; {MAX_ENVELOPE_BYTES} are allowed")
    return unpack_map(view[len(ENVELOPE_MAGIC) :], MAX_ITEMS)


def pack_value(value: Any) -> bytes:
    """A plain value inside of a message."""
    packed: bytes = _packer.pack(value)
    return packed


def unpack_value(packed: Buffer, most: int = MAX_ITEMS) -> Any:
    """`pack_value`'s. WireError for what is no msgpack.

    most: entries of one list or map, for which room is made before they are seen; -1: as many as bytes.
    """
    try:
        return msgpack.unpackb(packed, raw=False, strict_map_key=False, max_array_len=most, max_map_len=most)
    except BAD_MSGPACK as error:
        raise WireError(f"not msgpack: {type(error).__name__}: {str(error)[:200]}") from error


def unpack_map(packed: Buffer, most: int = -1) -> dict[str, Any]:
    message = unpack_value(packed, most)
    if not isinstance(message, dict):
        raise WireError(f"expected a map, got {type(message).__name__}")
    return message


def check_magic(view: memoryview, magic: bytes) -> None:
    """WireError unless that is how it begins, with the version at the end."""
    start = bytes(view[: len(magic)])
    if start == magic:
        return
    if start[:-1] == magic[:-1] and len(start) == len(magic):
        raise WireError(f"protocol version {start[-1]}, this side speaks {VERSION}")
    raise WireError(f"not a message of this protocol: begins with {start!r}")


def task_to_wire(task: Task) -> bytes:
    return pack_value([task.ordinal, task.prompt, dict(task.data)])


def task_from_wire(packed: Buffer) -> Task:
    wire = unpack_value(packed, -1)
    if not isinstance(wire, list) or len(wire) != 3:
        raise WireError("a task is [ordinal, prompt, data]")
    ordinal, prompt, data = wire
    chat = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if type(ordinal) is not int or ordinal < 0 or not (isinstance(prompt, str) or chat):
        raise WireError(f"a task with ordinal {ordinal!r} and a prompt of type {type(prompt).__name__}")
    if not isinstance(data, dict):
        raise WireError(f"task {ordinal}: data of type {type(data).__name__}")
    return Task(ordinal, prompt, data)
