"""Bytes of the queue: versioned msgpack envelopes, and the plain values in them. No pickle.

    packed map   b"ARLQ" · version byte · msgpack map

Messages have a seal besides (envelope.py).
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
"""Limits on one message: bytes of a frame and of the envelope, frames."""

MAX_VALUES, MAX_DEPTH = 1 << 19, 64
"""Limits on packed values: values in all, lists and maps in each other. A byte may become 90 bytes of memory."""

UNCHECKED_BYTES = 1 << 14
"""Fewer bytes of packed values are unpacked without a look at their number."""

TAILS = (0, 0, 0, 0, -1, -2, -4, -11, -12, -14, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 3, 5, 9, 17, -1, -2, -4)
"""Bytes that follow the first byte of a value, from 0xc0 to 0xdb. Below 0: first a length of so many bytes; 10 more: a
type, too."""

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
    return unpack_map(opened(frame))


def opened(frame: Buffer) -> memoryview:
    """The packed map of an envelope frame."""
    view = memoryview(frame)
    check_magic(view, ENVELOPE_MAGIC)
    if len(view) > MAX_ENVELOPE_BYTES:
        raise WireError(f"an envelope of {len(view)} bytes; {MAX_ENVELOPE_BYTES} are allowed")
    return view[len(ENVELOPE_MAGIC) :]


def pack_value(value: Any) -> bytes:
    """A plain value inside of a message."""
    packed: bytes = _packer.pack(value)
    return packed


def unpack_value(packed: Buffer) -> Any:
    """`pack_value`'s. WireError for what is no msgpack, or has too many values."""
    if len(packed) > UNCHECKED_BYTES:
        _check_values(memoryview(packed))
    try:
        return msgpack.unpackb(packed, raw=False, strict_map_key=False)
    except BAD_MSGPACK as error:
        raise WireError(f"not msgpack: {type(error).__name__}: {str(error)[:200]}") from error


def unpack_map(packed: Buffer) -> dict[str, Any]:
    message = unpack_value(packed)
    if not isinstance(message, dict):
        raise WireError(f"expected a map, got {type(message).__name__}")
    return message


def _check_values(packed: memoryview) -> None:
    """WireError for more than MAX_VALUES values, or more than MAX_DEPTH lists and maps in each other.

    A text that is no msgpack passes.
    """
    at, end, values = 0, len(packed), 0
    missing = [1]  # values that each open list or map still needs, the innermost last
    while missing and at < end:
        if not missing[-1]:
            missing.pop()
            continue
        missing[-1] -= 1
        values += 1
        first = packed[at]
        at += 1
        entries = 0
        if 0x80 <= first < 0xA0:
            entries = (first & 15) * (1 if first & 16 else 2)
        elif 0xA0 <= first < 0xC0:
            at += first & 31
        elif 0xDC <= first < 0xE0:
            size = 4 if first & 1 else 2
            entries = int.from_bytes(packed[at : at + size], "big") * (1 if first < 0xDE else 2)
            at += size
        elif 0xC0 <= first < 0xDC:
            at += _tail(packed, at, TAILS[first - 0xC0])
        if entries:
            missing.append(entries)
        if values + entries > MAX_VALUES or len(missing) > MAX_DEPTH + 1:
            raise WireError(f"more than {MAX_VALUES} values, or more than {MAX_DEPTH} lists in each other")


def _tail(packed: memoryview, at: int, tail: int) -> int:
    """Bytes of a value behind its first one."""
    if tail >= 0:
        return tail
    size, typed = (-tail - 10, 1) if tail < -10 else (-tail, 0)
    return size + typed + int.from_bytes(packed[at : at + size], "big")


def check_magic(view: memoryview, magic: bytes) -> None:
    """WireError unless that is how it begins, with the version at the end."""
    start = bytes(view[: len(magic)])
    if start == magic:
        return
    if start[:-1] == magic[:-1] and len(start) == len(magic):
        raise WireError(f"protocol version {start[-1]}, this side speaks {magic[-1]}")
    raise WireError(f"not a message of this protocol: begins with {start!r}")


def task_to_wire(task: Task) -> bytes:
    return pack_value([task.ordinal, task.prompt, dict(task.data)])


def task_from_wire(packed: Buffer) -> Task:
    wire = unpack_value(packed)
    if not isinstance(wire, list) or len(wire) != 3:
        raise WireError("a task is [ordinal, prompt, data]")
    ordinal, prompt, data = wire
    chat = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if type(ordinal) is not int or ordinal < 0 or not (isinstance(prompt, str) or chat):
        raise WireError(f"a task with ordinal {ordinal!r} and a prompt of type {type(prompt).__name__}")
    if not isinstance(data, dict):
        raise WireError(f"task {ordinal}: data of type {type(data).__name__}")
    return Task(ordinal, prompt, data)
