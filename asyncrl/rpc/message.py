"""The message of a request and of its reply: a seal, and msgpack of [protocol version, number, kind, fields].

No pickle. The seal is the xxh3-64 of all that follows: bytes that were changed on their way are refused.

A reply has the number of its request, and the kind "ok" or "error". An error has the fields `reason` and `detail`.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping
from typing import Any

import msgpack
import xxhash

from asyncrl.errors import WireError

PROTOCOL = 4

SEAL = struct.Struct("<Q")

UNREADABLE = -1
"""The number in the reply to a message that could not be read. Requests count from 1."""

MAX_BYTES = 256 << 20
"""Largest message; a layout or a plan of a large model is a few megabytes."""

MAX_LISTS = 1 << 21
"""Lists and maps of a message; the layout of a large model has some 100,000."""

UNCHECKED_BYTES = 1 << 16
"""The lists and maps of a smaller message are not counted."""

OK, ERROR = "ok", "error"

Fields = dict[str, Any]


def encode(number: int, kind: str, fields: Mapping[str, Any]) -> bytes:
    return sealed(msgpack.packb([PROTOCOL, number, kind, fields]))


def sealed(packed: bytes) -> bytes:
    """With its seal."""
    return SEAL.pack(xxhash.xxh3_64_intdigest(packed)) + packed


def decode(frame: bytes) -> tuple[int, str, Fields]:
    """(number, kind, fields) of a message that `encode` made.

    Raises:
        WireError: for anything else.
    """
    try:
        protocol, number, kind, fields = _unpacked(_opened(frame))
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"not an RPC message: {error!r}") from error
    if protocol != PROTOCOL:
        raise WireError(f"RPC protocol {protocol!r}, this side has {PROTOCOL}")
    if not (isinstance(number, int) and isinstance(kind, str) and isinstance(fields, dict)):
        raise WireError("not an RPC message: wrong types")
    return number, kind, fields


def _opened(frame: bytes) -> bytes:
    packed = frame[SEAL.size :]
    if frame[: SEAL.size] != SEAL.pack(xxhash.xxh3_64_intdigest(packed)):
        raise WireError(
            "not an RPC message as it was sealed: changed on its way, or the other side has another release"
        )
    return packed


def _unpacked(frame: bytes) -> Any:
    """A byte may be an empty list, which takes 90 bytes of memory: they are counted while they are made."""
    if len(frame) <= UNCHECKED_BYTES:
        return msgpack.unpackb(frame)
    counter = itertools.count(1)

    def counted(made: Any) -> Any:
        if next(counter) > MAX_LISTS:
            raise WireError(f"not an RPC message: more than {MAX_LISTS} lists and maps")
        return made

    return msgpack.unpackb(frame, list_hook=counted, object_hook=counted)
