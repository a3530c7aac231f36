"""Bytes of the queue: versioned msgpack envelopes, groups as a header and raw tensor frames. No pickle.

    envelope frame   b"ARLQ" · version byte · msgpack map
    group            frame 0: b"ARLG" · version byte · xxh3-64 of all that follows · bytes of the header, 4 ·
                              msgpack header, padded to 8 · the bytes of all small columns, one after another
                     frames 1…: one large column each

The broker reads envelopes only; a group's frames pass through it untouched. Nothing that a frame says of sizes
is believed before it was compared with the bytes that are there.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, get_args

import msgpack
import numpy as np
import xxhash

from asyncrl.errors import WireError
from asyncrl.types import COLUMNS, Finish, Group, Sampling, Task, Version

Buffer = bytes | memoryview

VERSION = 4
ENVELOPE_MAGIC = b"ARLQ" + bytes([VERSION])
GROUP_MAGIC = b"ARLG" + bytes([VERSION])
SEAL, LENGTH = struct.Struct("<Q"), struct.Struct("<I")
GROUP_SEALED = len(GROUP_MAGIC) + SEAL.size
GROUP_HEADER = GROUP_SEALED + LENGTH.size
"""Where in a group's first frame begins what its digest is of, and its header."""

ALIGNED = 8
"""Columns begin at a multiple of this."""


MAX_FRAME_BYTES = 1 << 30
MAX_ENVELOPE_BYTES = 1 << 26
MAX_FRAMES = 1024
MAX_ITEMS = 1 << 17
"""Limits on one message: bytes of a frame and of the envelope, frames, entries of one list or map of the envelope."""


LARGE = 1 << 16
"""Columns of so many bytes travel in a frame of their own, uncopied."""

EVERY = {
    name: np.dtype(dtype)
    for name, dtype in {
        "lengths": "<i8",
        "token_ids": "<i8",
        "loss_mask": "|i1",
        "logprobs": "<f4",
        "versions": "<i4",
        "rewards": "<f4",
    }.items()
}
"""Columns that every group has. Further ones are those of `types.COLUMNS`, and a column for each part of the reward."""
DTYPES = EVERY | {name: np.dtype(dtype).newbyteorder("<") for name, dtype in COLUMNS.items()}
PART = "part/"
PART_DTYPE = np.dtype("<f4")
SAMPLING = (float, int, int, float, int, float)
SAMPLED = attrgetter(*(each.name for each in dataclasses.fields(Sampling)))
"""What the fields of a `Sampling` are, and their values."""
FINISHES: tuple[Finish, ...] = get_args(Finish)
BAD_MSGPACK = (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError, MemoryError)


class Payload(NamedTuple):
    """A group to be sent: `frames` share memory with its arrays. squares: of its rollouts' lengths, added up · digest:
    xxh3-64 of header and columns."""

    frames: list[Buffer]
    tokens: int
    squares: int
    nbytes: int
    start_version: Version
    digest: int


def pack(message: Mapping[str, Any]) -> bytes:
    """The envelope frame of a message of plain values."""
    return ENVELOPE_MAGIC + msgpack.packb(message, use_bin_type=True)


def unpack(frame: Buffer) -> dict[str, Any]:
    """The message of an envelope frame. WireError says what is wrong with it."""
    view = memoryview(frame)
    _check_magic(view, ENVELOPE_MAGIC)
    if len(view) > MAX_ENVELOPE_BYTES:
        raise WireError(f"an envelope of {len(view)} bytes; {MAX_ENVELOPE_BYTES} are allowed")
    return _unpack_map(view[len(ENVELOPE_MAGIC) :], MAX_ITEMS)


def pack_value(value: Any) -> bytes:
    """A plain value inside of a message."""
    return msgpack.packb(value, use_bin_type=True)


def unpack_value(packed: Buffer) -> Any:
    """`pack_value`'s, as `unpack` does it."""
    return _unpack_any(packed, MAX_ITEMS)


def task_to_wire(task: Task) -> bytes:
    return msgpack.packb([task.ordinal, task.prompt, dict(task.data)], use_bin_type=True)


def task_from_wire(packed: Buffer) -> Task:
    return _task(_unpack_any(packed))


def encode_group(group: Group) -> Payload:
    """Header and column frames. Large columns are not copied.

    Raises WireError for a column in `group.columns` that is unknown, of another dtype or not of one value a token.
    """
    columns = _columns(group)
    header = {
        "task": task_to_wire(group.task),
        "sampling": [kind(value) for kind, value in zip(SAMPLING, SAMPLED(group.sampling), strict=True)],
        "finish": [FINISHES.index(f) for f in group.finish],
        "columns": [[name, len(column)] for name, column in columns.items()],
        "greedy_reward": None if group.greedy_reward is None else float(group.greedy_reward),
    }
    packed = msgpack.packb(header, use_bin_type=True)
    padding = bytes(-(GROUP_HEADER + len(packed)) % ALIGNED)
    views = [column.data.cast("B") for column in columns.values() if column.size]
    small = [LENGTH.pack(len(packed)), packed, padding, *(view for view in views if len(view) < LARGE)]
    large = [view for view in views if len(view) >= LARGE]
    digest = _digest([*small, *large])
    frames: list[Buffer] = [b"".join([GROUP_MAGIC, SEAL.pack(digest), *small]), *large]
    tokens, nbytes = len(columns["token_ids"]), sum(map(len, frames))
    squares = sum(length * length for length in columns["lengths"].tolist())
    return Payload(frames, tokens, squares, nbytes, group.start_version, digest)


def decode_group(frames: Sequence[Buffer]) -> Group:
    """The group of `encode_group`'s frames; its arrays are read-only views. Anything else is a WireError."""
    if not frames:
        raise WireError("a group needs at least its header frame")
    first, *large = [memoryview(f) for f in frames]
    _check_magic(first, GROUP_MAGIC)
    if len(first) < GROUP_HEADER:
        raise WireError(f"a group's first frame of {len(first)} bytes")
    (sealed,) = SEAL.unpack_from(first, len(GROUP_MAGIC))
    digest = _digest([first[GROUP_SEALED:], *large])
    if digest != sealed:
        raise WireError(f"group digest {digest:016x}, sealed with {sealed:016x}")
    (length,) = LENGTH.unpack_from(first, GROUP_SEALED)
    end = GROUP_HEADER + length
    header = _unpack_map(first[GROUP_HEADER:end])
    try:
        return _group(header, _take_columns(header["columns"], first[end + -end % ALIGNED :], large))
    except WireError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise WireError(f"group header: {type(error).__name__}: {error}") from error


# ---------------------------------------------------------------------- groups


def _columns(group: Group) -> dict[str, np.ndarray]:
    """The widest first, so that columns joined in one frame stay aligned."""
    columns = {name: np.ascontiguousarray(getattr(group, name), dtype) for name, dtype in EVERY.items()}
    for name, part in group.reward_parts.items():
        columns[PART + name] = np.ascontiguousarray(part, PART_DTYPE)
    for name, column in group.columns.items():
        if name not in COLUMNS or column.dtype != COLUMNS[name] or column.shape != (group.tokens,):
            known = ", ".join(f"{known} {dtype}" for known, dtype in COLUMNS.items())
            raise WireError(
                f"column {name!r} of {column.dtype} {column.shape}; known are {known}, of {group.tokens} values"
            )
        columns[name] = np.ascontiguousarray(column, DTYPES[name])
    return dict(sorted(columns.items(), key=lambda entry: -entry[1].itemsize))


def _dtype(name: str) -> np.dtype:
    """What the column of this name holds, in the byte order of the wire."""
    dtype = DTYPES.get(name) or (PART_DTYPE if name.startswith(PART) else None)
    if dtype is None:
        raise WireError(f"unknown column {name!r}")
    return dtype


def _take_columns(
    declared: Sequence[Sequence[Any]], small: memoryview, large: Sequence[memoryview]
) -> dict[str, np.ndarray]:
    """Views of the bytes, as declared; every byte must be accounted for."""
    columns: dict[str, np.ndarray] = {}
    taken, own = 0, iter(large)  # bytes of `small`, frames of `large`
    for name, count in declared:
        dtype = _dtype(name)
        if type(count) is not int or count < 0 or name in columns:
            raise WireError(f"column {name!r} of {count!r} values")
        size = count * dtype.itemsize
        if size < LARGE:
            frame, at, fits = small, taken, taken + size <= len(small)
            taken += size
        else:
            frame, at = next(own, memoryview(b"")), 0
            fits = len(frame) == size
        if not fits:
            raise WireError(f"column {name!r} needs {size} bytes, its frame has {len(frame) - at}")
        column = np.frombuffer(frame, dtype, count, at) if count else np.empty(0, dtype)
        columns[name] = column if column.flags.aligned else column.copy()
    if taken != len(small) or next(own, None) is not None:
        raise WireError("frames hold more than the header declares")
    return columns


def _group(header: Mapping[str, Any], columns: dict[str, np.ndarray]) -> Group:
    lengths, rewards = columns["lengths"], columns["rewards"]
    n, tokens = len(lengths), len(columns["token_ids"])
    finish = tuple(FINISHES[f] if f >= 0 else _bad_finish(f) for f in header["finish"])
    parts = {name[len(PART) :]: column for name, column in columns.items() if name.startswith(PART)}
    numbers = lengths.tolist()  # whose sum does not wrap around
    if n < 1 or min(numbers) < 0 or sum(numbers) != tokens:
        raise WireError(f"{n} lengths that sum up to {sum(numbers)} for {tokens} tokens")
    extra = {name: column for name, column in columns.items() if name in COLUMNS}
    for name in ("loss_mask", "logprobs", "versions", *extra):
        if len(columns[name]) != tokens:
            raise WireError(f"column {name!r} has {len(columns[name])} values for {tokens} tokens")
    if not len(rewards) == len(finish) == n or any(len(part) != n for part in parts.values()):
        raise WireError(f"rewards, finish and reward parts must have {n} values each")
    return Group(
        task=task_from_wire(header["task"]),
        sampling=_sampling(header["sampling"]),
        lengths=lengths,
        token_ids=columns["token_ids"],
        loss_mask=columns["loss_mask"],
        logprobs=columns["logprobs"],
        versions=columns["versions"],
        rewards=rewards,
        finish=finish,
        reward_parts=parts,
        columns=extra,
        greedy_reward=_greedy_reward(header.get("greedy_reward")),
    )


def _greedy_reward(wire: Any) -> float | None:
    if wire is not None and not (type(wire) is float and math.isfinite(wire)):
        raise WireError(f"greedy reward {wire!r}")
    return wire


def _bad_finish(code: object) -> Any:
    raise WireError(f"finish code {code!r}")


def _sampling(wire: Any) -> Sampling:
    if not isinstance(wire, list) or tuple(map(type, wire)) != SAMPLING:
        raise WireError(f"sampling {wire!r}")
    return Sampling(*wire)


def _task(wire: Any) -> Task:
    if not isinstance(wire, list) or len(wire) != 3:
        raise WireError("a task is [ordinal, prompt, data]")
    ordinal, prompt, data = wire
    chat = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if type(ordinal) is not int or ordinal < 0 or not (isinstance(prompt, str) or chat):
        raise WireError(f"a task with ordinal {ordinal!r} and a prompt of type {type(prompt).__name__}")
    if not isinstance(data, dict):
        raise WireError(f"task {ordinal}: data of type {type(data).__name__}")
    return Task(ordinal, prompt, data)


# ---------------------------------------------------------------------- bytes


def _digest(buffers: Sequence[Buffer]) -> int:
    """XXH3 of the buffers one after another (https://xxhash.com): as fast as memory, which no CRC is."""
    digest = xxhash.xxh3_64()
    for buffer in buffers:
        digest.update(buffer)
    return digest.intdigest()


def _check_magic(view: memoryview, magic: bytes) -> None:
    start = bytes(view[: len(magic)])
    if start == magic:
        return
    if start[:-1] == magic[:-1] and len(start) == len(magic):
        raise WireError(f"protocol version {start[-1]}, this side speaks {VERSION}")
    raise WireError(f"not a message of this protocol: begins with {start!r}")


def _unpack_map(packed: Buffer, most: int = -1) -> dict[str, Any]:
    message = _unpack_any(packed, most)
    if not isinstance(message, dict):
        raise WireError(f"expected a map, got {type(message).__name__}")
    return message


def _unpack_any(packed: Buffer, most: int = -1) -> Any:
    """most: entries of one list or map, for which room is made before they are seen; -1: as many as bytes."""
    try:
        return msgpack.unpackb(packed, raw=False, strict_map_key=False, max_array_len=most, max_map_len=most)
    except BAD_MSGPACK as error:
        raise WireError(f"not msgpack: {type(error).__name__}: {str(error)[:200]}") from error
