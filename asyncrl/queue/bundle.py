"""Small messages for the same peer in one ZeroMQ message: both sides and their I/O threads are woken once for all.

    bundle    frame 0: b"ARLB" · version byte · how many frames each message has, 2 bytes each
              frames 1…: those of the first message, those of the second, …

A message by itself travels as it is. Nobody above the sockets knows of bundles.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from asyncrl.queue.wire import MAX_FRAMES

MAGIC = b"ARLB" + bytes([1])
BUNDLE_BYTES = 1 << 19
"""More than that in one message would only delay the first of them."""

Message = Sequence[Any]
"""Frames: anything with the buffer protocol and a length."""


def bundled(messages: Iterable[Message]) -> list[Message]:
    """The same in as few messages as the limits allow, in the same order.

    >>> bundled([[b"a"]]), bundled([[b"a", b"1"], [b"b"]])
    ([[b'a']], [[b'ARLB\\x01\\x02\\x00\\x01\\x00', b'a', b'1', b'b']])
    """
    bundles: list[list[Message]] = []
    frames = nbytes = 0
    for message in messages:
        size = sum(map(len, message))
        frames, nbytes = frames + len(message), nbytes + size
        if not bundles or frames >= MAX_FRAMES or nbytes > BUNDLE_BYTES:
            bundles.append([])
            frames, nbytes = len(message), size
        bundles[-1].append(message)
    return [_joined(bundle) if len(bundle) > 1 else bundle[0] for bundle in bundles]


def messages_of(frames: Message) -> list[Message]:
    """What was bundled. A bundle that is not as it says is no message of anybody, and is left as it is."""
    start = len(MAGIC)
    if not frames or bytes(memoryview(frames[0])[:start]) != MAGIC or len(frames[0]) % 2 != start % 2:
        return [frames]
    counts = struct.unpack_from(f"<{(len(frames[0]) - start) // 2}H", frames[0], start)
    if sum(counts) != len(frames) - 1:
        return [frames]
    messages, at = [], 1
    for count in counts:
        messages.append(frames[at : at + count])
        at += count
    return messages


def _joined(messages: Sequence[Message]) -> Message:
    counts = struct.pack(f"<{len(messages)}H", *map(len, messages))
    return [MAGIC + counts, *(frame for message in messages for frame in message)]
