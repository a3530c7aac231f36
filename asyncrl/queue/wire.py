"""Bytes of the queue: versioned msgpack envelopes, groups as a header and raw tensor frames. No pickle.

    envelope frame   b"ARLQ" · version byte · msgpack map
    group            frame 0: b"ARLG" · version byte · crc32 of all that follows · msgpack header
                     frames 1…: the columns' bytes, one frame a column, or one frame for all of a small group

The broker reads envelopes only; a group's frames pass through it untouched.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgpack
import numpy as np

from asyncrl.errors import WireError
from asyncrl.types import COLUMNS, Finish, Group, Sampling, Task, Version

Buffer = bytes | memoryview

VERSION = 1
ENVELOPE_MAGIC = b"ARLQ" + bytes([VERSION])
GROUP_MAGIC = b"ARLG" + bytes([VERSION])
SEAL = struct.Struct("<I")
GROUP_START = len(GROUP_MAGIC) + SEAL.size

JOIN_BELOW = 1 << 16
"""Columns of fewer bytes in all travel in one frame: frames cost more than copies there."""

DTYPES: dict[str, str] = {
    "lengths": "<i8",
    "token_ids": "<i8",
    "loss_mask": "|i1",
    "logprobs": "<f4",
    "versions": "<i4",
    "rewards": "<f4",
}
"""Columns that every group has. Further ones are those of `types.COLUMNS`, and a column for each part of the reward."""
PART = "part/"
PART_DTYPE = "<f4"
FINISHES: tuple[Finish, ...] = get_args(Finish)


@dataclass(frozen=True, slots=True)
class Payload:
    """A group to be sent: `frames` share memory with its arrays. digest: crc32 of header and columns."""

    frames: list[Buffer]
    tokens: int
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
    return _unpack_map(view[len(ENVELOPE_MAGIC) :])


def task_to_wire(task: Task) -> bytes:
    return msgpack.packb([task.ordinal, task.prompt, dict(task.data)], use_bin_type=True)


def task_from_wire(packed: Buffer) -> Task:
    return _task(_unpack_any(packed))


def encode_group(group: Group) -> Payload:
    """Header and column frames. Columns are not copied unless the whole group is small.

    Raises WireError for a column in `group.columns` that is unknown, of another dtype or not of one value a token.
    """
    columns = _columns(group)
    header = {
        "task": task_to_wire(group.task),
        "sampling": [group.sampling.temperature, group.sampling.max_tokens, group.sampling.seed],
        "finish": [FINISHES.index(f) for f in group.finish],
        "columns": [[name, len(column)] for name, column in columns.items()],
        "greedy_reward": None if group.greedy_reward is None else float(group.greedy_reward),
    }
    buffers: list[Buffer] = [column.data.cast("B") for column in columns.values() if column.size]
    if sum(len(b) for b in buffers) < JOIN_BELOW:
        buffers = [b"".join(buffers)]
    packed = msgpack.packb(header, use_bin_type=True)
    digest = _digest([packed, *buffers])
    frames = [GROUP_MAGIC + SEAL.pack(digest) + packed, *buffers]
    return Payload(frames, group.tokens, sum(len(f) for f in frames), group.start_version, digest)


def decode_group(frames: Sequence[Buffer]) -> Group:
    """The group of `encode_group`'s frames; its arrays are read-only views. Anything else is a WireError."""
    if not frames:
        raise WireError("a group needs at least its header frame")
    views = [memoryview(f) for f in frames]
    _check_magic(views[0], GROUP_MAGIC)
    if len(views[0]) < GROUP_START:
        raise WireError(f"a group header of {len(views[0])} bytes")
    (sealed,) = SEAL.unpack(views[0][len(GROUP_MAGIC) : GROUP_START])
    packed, buffers = views[0][GROUP_START:], views[1:]
    digest = _digest([packed, *buffers])
    if digest != sealed:
        raise WireError(f"group digest {digest:08x}, sealed with {sealed:08x}")
    header = _unpack_map(packed)
    try:
        return _group(header, _take_columns(header["columns"], buffers))
    except WireError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise WireError(f"group header: {type(error).__name__}: {error}") from error


# ---------------------------------------------------------------------- groups


def _columns(group: Group) -> dict[str, np.ndarray]:
    """The widest first, so that columns joined in one frame stay aligned."""
    columns = {
        name: np.ascontiguousarray(getattr(group, name), dtype=dtype) for name, dtype in DTYPES.items()
    }
    for name, part in group.reward_parts.items():
        columns[PART + name] = np.ascontiguousarray(part, dtype=PART_DTYPE)
    for name, column in group.columns.items():
        if name not in COLUMNS or column.dtype != COLUMNS[name] or column.shape != (group.tokens,):
            known = ", ".join(f"{known} {dtype}" for known, dtype in COLUMNS.items())
            raise WireError(
                f"column {name!r} of {column.dtype} {column.shape}; known are {known}, of {group.tokens} values"
            )
        columns[name] = np.ascontiguousarray(column, dtype=_dtype(name))
    return dict(sorted(columns.items(), key=lambda entry: -entry[1].itemsize))


def _dtype(name: str) -> np.dtype:
    """What the column of this name holds, in the byte order of the wire."""
    dtype = PART_DTYPE if name.startswith(PART) else DTYPES.get(name) or COLUMNS.get(name)
    if dtype is None:
        raise WireError(f"unknown column {name!r}")
    return np.dtype(dtype).newbyteorder("<")


def _take_columns(declared: Sequence[Sequence[Any]], buffers: list[memoryview]) -> dict[str, np.ndarray]:
    """Views of the buffers, as declared; every byte must be accounted for."""
    joined = len(buffers) == 1
    columns: dict[str, np.ndarray] = {}
    at, offset = 0, 0
    for name, count in declared:
        dtype = _dtype(name)
        if type(count) is not int or count < 0 or name in columns:
            raise WireError(f"column {name!r} of {count!r} values")
        if count == 0:
            columns[name] = np.empty(0, dtype)
            continue
        buffer, size = buffers[at], count * dtype.itemsize
        if len(buffer) < offset + size or (not joined and len(buffer) != size):
            raise WireError(f"column {name!r} needs {size} bytes, its frame has {len(buffer) - offset}")
        column = np.frombuffer(buffer, dtype, count, offset)
        columns[name] = column if column.flags.aligned else column.copy()
        at, offset = (at, offset + size) if joined else (at + 1, 0)
    if (offset != len(buffers[0])) if joined else (at != len(buffers)):
        raise WireError("frames hold more than the header declares")
    return columns


def _group(header: Mapping[str, Any], columns: dict[str, np.ndarray]) -> Group:
    lengths, rewards = columns["lengths"], columns["rewards"]
    n, total = len(lengths), int(lengths.sum())
    finish = tuple(FINISHES[f] if f >= 0 else _bad_finish(f) for f in header["finish"])
    parts = {name[len(PART) :]: column for name, column in columns.items() if name.startswith(PART)}
    if n < 1 or (lengths < 0).any():
        raise WireError(f"lengths {lengths.tolist()}")
    extra = {name: column for name, column in columns.items() if name in COLUMNS}
    for name in ("token_ids", "loss_mask", "logprobs", "versions", *extra):
        if len(columns[name]) != total:
            raise WireError(f"column {name!r} has {len(columns[name])} values for {total} tokens")
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
    temperature, max_tokens, seed = wire
    if type(temperature) not in (int, float) or type(max_tokens) is not int or type(seed) is not int:
        raise WireError(f"sampling {wire!r}")
    return Sampling(float(temperature), max_tokens, seed)


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
    digest = 0
    for buffer in buffers:
        digest = zlib.crc32(buffer, digest)
    return digest


def _check_magic(view: memoryview, magic: bytes) -> None:
    start = bytes(view[: len(magic)])
    if start == magic:
        return
    if start[:-1] == magic[:-1] and len(start) == len(magic):
        raise WireError(f"protocol version {start[-1]}, this side speaks {VERSION}")
    raise WireError(f"not a message of this protocol: begins with {start!r}")


def _unpack_map(packed: Buffer) -> dict[str, Any]:
    message = _unpack_any(packed)
    if not isinstance(message, dict):
        raise WireError(f"expected a map, got {type(message).__name__}")
    return message


def _unpack_any(packed: Buffer) -> Any:
    try:
        return msgpack.unpackb(packed, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError, OverflowError) as error:
        raise WireError(f"not msgpack: {type(error).__name__}: {error}") from error
