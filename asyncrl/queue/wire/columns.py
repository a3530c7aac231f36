"""Bytes of the columns that a stage adds to a group.

frame 0     an envelope {spec: packed [[name, dtype, size], …], digest: xxh3-64 of spec and columns};
            size: the number of values, or of rows and of values in a row
frame 1     the columns, one after another, the widest type first
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgpack
import numpy as np

from asyncrl.errors import WireError
from asyncrl.queue.wire import wire
from asyncrl.queue.wire.payload import PART, digest
from asyncrl.types import Array, Group

DTYPES = ("<f8", "<i8", "<f4", "<i4", "<f2", "|i1", "|u1", "|b1")

REWARDS = "rewards"
"""The column that every group has room for: one value a rollout. With it come its parts, part/<name>, of as many. All
others have one a token, or a row of values."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Named arrays to be sent."""

    frames: list[wire.Buffer]
    nbytes: int
    digest: int


def encode_columns(columns: Mapping[str, Array]) -> Columns:
    """ValueError for an array of no or of more than two dimensions, or of a type that does not travel."""
    whole = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    for name, column in columns.items():
        if column.ndim not in (1, 2) or column.dtype.str not in DTYPES:
            raise ValueError(
                f"column {name!r} is {column.ndim}-dimensional {column.dtype}; {DTYPES} of one or two dimensions travel"
            )
    order = sorted(whole, key=lambda name: -whole[name].itemsize)
    spec = msgpack.packb([[name, whole[name].dtype.str, _size(whole[name])] for name in order])
    data = b"".join(whole[name].tobytes() for name in order)
    sealed = digest([spec, data])
    header = wire.pack({"spec": spec, "digest": sealed})
    return Columns([header, data], len(header) + len(data), sealed)


def decode_columns(frames: Sequence[wire.Buffer]) -> dict[str, Array]:
    """The arrays of `encode_columns`, as read-only views. Anything else is a WireError."""
    if len(frames) != 2:
        raise WireError(f"columns of {len(frames)} frames")
    header, data = wire.unpack(frames[0]), memoryview(frames[1])
    spec = header.get("spec")
    if type(spec) is not bytes or digest([spec, data]) != header.get("digest"):
        raise WireError("columns that are not as they were sealed")
    columns: dict[str, Array] = {}
    offset = 0
    try:
        for name, dtype, size in wire.unpack_value(spec):
            shape = size if isinstance(size, list) else [size]
            if dtype not in DTYPES or type(name) is not str or not _is_shape(shape):
                raise WireError(f"column {name!r} of size {size!r} and type {dtype!r}")
            values = np.frombuffer(data, np.dtype(dtype), math.prod(shape), offset)
            columns[name] = values.reshape(shape)
            offset += values.nbytes
    except wire.BAD_MSGPACK as error:
        raise WireError(f"columns: {type(error).__name__}: {error}") from error
    if offset != len(data):
        raise WireError(f"columns of {len(data)} bytes, {offset} declared")
    return columns


def _size(column: Array) -> int | list[int]:
    return len(column) if column.ndim == 1 else list(column.shape)


def _is_shape(shape: Sequence[object]) -> bool:
    return len(shape) in (1, 2) and all(type(size) is int and size >= 0 for size in shape)


def with_columns(group: Group, columns: Mapping[str, Array]) -> Group:
    """The group with these beside its own. WireError unless each has one value or row a token (of rewards: one value a
    rollout)."""
    own, parts, rewards = dict(group.columns), dict(group.reward_parts), group.rewards
    for name, column in columns.items():
        of_rollouts = name == REWARDS or name.startswith(PART)
        expected = len(group.lengths) if of_rollouts else group.tokens
        if len(column) != expected or (of_rollouts and column.ndim > 1):
            raise WireError(
                f"column {name!r} has the shape {column.shape}, the group needs {expected} values"
            )
        if name == REWARDS:
            rewards = np.asarray(column, np.float32)
        elif of_rollouts:
            parts[name.removeprefix(PART)] = np.asarray(column, np.float32)
        else:
            own[name] = column
    return dataclasses.replace(group, rewards=rewards, reward_parts=parts, columns=own)
