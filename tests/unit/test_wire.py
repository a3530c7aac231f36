"""Groups survive the wire bit by bit; anything else is a WireError that says what is wrong."""

from __future__ import annotations

import dataclasses
import random
from contextlib import suppress
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import WireError
from asyncrl.queue import wire
from asyncrl.types import COLUMNS as EXTRA
from asyncrl.types import Group, Sampling, Task

COLUMNS = ("lengths", "token_ids", "loss_mask", "logprobs", "versions", "rewards")


def group(
    lengths: tuple[int, ...] = (3, 0, 5),
    parts: tuple[str, ...] = ("exact",),
    columns: tuple[str, ...] = (),
    greedy_reward: float | None = None,
) -> Group:
    n, total = len(lengths), sum(lengths)
    rng = np.random.default_rng(total)
    return Group(
        task=Task(7, [{"role": "user", "content": "2+2=é"}], {"answer": "4", "weights": [1, 2.5, None]}),
        sampling=Sampling(0.7, 12, 99, top_p=0.9, top_k=40, min_p=0.01),
        lengths=np.array(lengths, np.int64),
        token_ids=rng.integers(0, 1 << 40, total),
        loss_mask=rng.integers(0, 2, total).astype(np.int8),
        logprobs=-rng.random(total, np.float32),
        versions=rng.integers(-1, 5, total).astype(np.int32),
        rewards=rng.random(n, np.float32),
        finish=tuple(("stop", "length", "abort")[i % 3] for i in range(n)),
        reward_parts={name: rng.random(n, np.float32) for name in parts},
        columns={name: rng.integers(-1, 9, total).astype(EXTRA[name]) for name in columns},
        greedy_reward=greedy_reward,
    )


def raw(payload: wire.Payload) -> list[bytes]:
    return [bytes(frame) for frame in payload.frames]


def sealed(header: Any, small: bytes = b"", *large: bytes) -> list[bytes]:
    """A group whose digest is right, whatever its header says."""
    packed = msgpack.packb(header)
    padding = bytes(-(wire.GROUP_HEADER + len(packed)) % wire.ALIGNED)
    content = wire.LENGTH.pack(len(packed)) + packed + padding + small
    digest = xxhash.xxh3_64_intdigest(b"".join([content, *large]))
    return [wire.GROUP_MAGIC + wire.SEAL.pack(digest) + content, *large]


def opened(frames: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """The header, then the small columns' bytes and each of the large ones."""
    first, *large = frames
    (length,) = wire.LENGTH.unpack_from(first, wire.GROUP_SEALED)
    end = wire.GROUP_HEADER + length
    return msgpack.unpackb(first[wire.GROUP_HEADER : end]), [first[end + -end % wire.ALIGNED :], *large]


def assert_same(a: Group, b: Group) -> None:
    assert (a.task, a.sampling, a.finish) == (b.task, b.sampling, b.finish)
    for name in COLUMNS:
        assert getattr(a, name).dtype == getattr(b, name).dtype
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes()
    assert a.greedy_reward == b.greedy_reward
    for mapping in ("reward_parts", "columns"):
        mine, other = (
            {name: (column.dtype, column.tobytes()) for name, column in getattr(of, mapping).items()}
            for of in (a, b)
        )
        assert mine == other


@pytest.mark.parametrize("lengths", [(3, 0, 5), (1,), (0,), (4000, 900)])
@pytest.mark.parametrize("parts", [(), ("exact", "format")])
def test_a_group_survives(lengths: tuple[int, ...], parts: tuple[str, ...]) -> None:
    sent = group(lengths, parts)
    payload = wire.encode_group(sent)
    assert_same(wire.decode_group(raw(payload)), sent)
    assert payload.nbytes == sum(len(frame) for frame in payload.frames)
    assert (payload.tokens, payload.start_version) == (sent.tokens, sent.start_version)


sizes = st.lists(st.integers(0, 40) | st.integers(3000, 9000), min_size=1, max_size=4)
names = st.lists(st.sampled_from(["a", "b", "lengths", "step"]), unique=True, max_size=3)
extras = st.lists(st.sampled_from(sorted(EXTRA)), unique=True)


@given(sizes, names, extras, st.none() | st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=60, deadline=None)
def test_any_group_survives(
    lengths: list[int], parts: list[str], columns: list[str], greedy_reward: float | None
) -> None:
    sent = group(tuple(lengths), tuple(parts), tuple(columns), greedy_reward)
    frames = raw(wire.encode_group(sent))
    assert_same(wire.decode_group(frames), sent)


def test_large_columns_are_not_copied_and_small_ones_share_a_frame() -> None:
    large, small = group((9000, 8000), ()), group((3,), ("exact",), tuple(EXTRA), 0.5)
    frames = wire.encode_group(large).frames
    own = ("token_ids", "logprobs", "versions")  # 17,000 of 8 and 4 bytes; the mask has 1 byte each
    assert len(frames) == 1 + len(own)
    for frame, name in zip(frames[1:], own, strict=True):
        assert np.shares_memory(np.frombuffer(frame, np.uint8), getattr(large, name))
    assert len(wire.encode_group(small).frames) == 1
    decoded = wire.decode_group(frames)
    assert np.shares_memory(decoded.token_ids, large.token_ids)
    assert_same(decoded, large)


def test_a_large_column_needs_its_own_frame_and_all_of_it() -> None:
    frames = raw(wire.encode_group(group((9000, 8000), ())))
    header, (small, *own) = opened(frames)
    for damaged in (
        [small, *own[:-1]],
        [small, *own, b""],
        [small, own[1], own[0], own[2]],
        [small + own[0], *own],
    ):
        with pytest.raises(WireError):
            wire.decode_group(sealed(header, *damaged))


@pytest.mark.parametrize(
    "columns",
    [
        {"salary": np.zeros(8, np.float32)},
        {"step": np.zeros(8, np.int64)},
        {"step": np.zeros(7, np.int32)},
        {"step": np.zeros((8, 1), np.int32)},
    ],
)
def test_columns_that_nobody_knows_or_of_another_kind_are_not_sent(columns: dict[str, np.ndarray]) -> None:
    (name,) = columns
    with pytest.raises(WireError, match=f"column '{name}' of .*; known are step int32, anchor int64"):
        wire.encode_group(dataclasses.replace(group(), columns=columns))


def test_columns_of_another_kind_are_converted() -> None:
    sent = group((2,), ())
    wide = Group(**{f: getattr(sent, f) for f in Group.__slots__} | {"rewards": [0.5], "lengths": [2]})
    read = wire.decode_group(raw(wire.encode_group(wide)))
    assert (read.rewards.dtype, read.rewards.tolist()) == (np.float32, [0.5])
    assert (read.lengths.dtype, read.lengths.tolist()) == (np.int64, [2])


def test_every_mutation_of_a_group_is_a_wire_error() -> None:
    frames, rng = raw(wire.encode_group(group(columns=("step",), greedy_reward=0.5))), random.Random(0)
    for _ in range(500):
        mutated = [bytearray(frame) for frame in frames]
        frame = rng.choice(mutated)
        match rng.randrange(4):
            case 0:
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            case 1:
                del frame[rng.randrange(len(frame)) :]
            case 2:
                frame += rng.randbytes(3)
            case _:
                mutated.remove(frame)
        with pytest.raises(WireError):
            wire.decode_group([bytes(m) for m in mutated])


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["task", "sampling", "finish", "columns", "greedy_reward"]), values, st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_sealed_header_with_strange_fields_is_a_group_or_a_wire_error(
    field: str, value: Any, leave_out: bool
) -> None:
    header, buffers = opened(raw(wire.encode_group(group())))
    if leave_out:
        del header[field]
    else:
        header[field] = value
    with suppress(WireError):
        assert isinstance(wire.decode_group(sealed(header, *buffers)), Group)


@given(st.lists(st.binary(max_size=40), max_size=4))
@settings(max_examples=200, deadline=None)
def test_noise_is_a_wire_error(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        wire.decode_group(frames)
    for frame in frames:
        with pytest.raises(WireError):
            wire.unpack(frame)
        with pytest.raises(WireError):
            wire.task_from_wire(msgpack.packb({"not": frame}))


def change(**fields: Any) -> list[bytes]:
    header, buffers = opened(raw(wire.encode_group(group((2, 1), ()))))
    return sealed({**header, **fields}, *buffers)


WRONG = {
    "is 3 values": ("columns", [["lengths", 3]], "more than the header declares"),
    "too many values": ("columns", [["lengths", 1 << 40]], "column 'lengths' needs"),
    "negative": ("columns", [["lengths", -1]], "column 'lengths' of -1 values"),
    "twice": ("columns", [["lengths", 1], ["lengths", 1]], "column 'lengths' of 1 values"),
    "unknown column": ("columns", [["salary", 2]], "unknown column 'salary'"),
    "greedy text": ("greedy_reward", "0.5", "greedy reward '0.5'"),
    "greedy nan": ("greedy_reward", float("nan"), "greedy reward nan"),
    "finish code": ("finish", [0, -1], "finish code -1"),
    "one finish": ("finish", [0], "must have 2 values each"),
    "sampling": ("sampling", ["hot", 1, 1, 1.0, 0, 0.0], "sampling"),
    "sampling of too few": ("sampling", [1.0, 1, 1], "sampling"),
    "task": ("task", msgpack.packb([-1, "x", {}]), "a task with ordinal -1"),
    "task data": ("task", msgpack.packb([1, "x", 5]), "task 1: data of type int"),
}


@pytest.mark.parametrize(("field", "value", "says"), WRONG.values(), ids=WRONG.keys())
def test_errors_say_what_is_wrong(field: str, value: Any, says: str) -> None:
    with pytest.raises(WireError, match=says):
        wire.decode_group(change(**{field: value}))


def test_lengths_that_are_not_those_of_the_columns_are_refused() -> None:
    lengths = np.array([5], "<i8").tobytes()
    header = {"task": wire.task_to_wire(Task(0, "x")), "sampling": [1.0, 1, 0, 1.0, 0, 0.0], "finish": [0]}
    counts = [["lengths", 1], ["token_ids", 0], ["logprobs", 0], ["versions", 0], ["rewards", 0]]
    with pytest.raises(WireError, match="1 lengths that sum up to 5 for 0 tokens"):
        wire.decode_group(sealed({**header, "columns": [*counts, ["loss_mask", 0]]}, lengths))
    wrapped = np.array([2**63 - 1, 2**63 - 1, 2], "<i8").tobytes()  # their sum is 0 in 64 bits
    columns = [["lengths", 3], *counts[1:], ["loss_mask", 0]]
    with pytest.raises(WireError, match="3 lengths"):
        wire.decode_group(sealed({**header, "columns": columns}, wrapped))


def test_a_further_column_of_another_length_is_refused() -> None:
    header, buffers = opened(raw(wire.encode_group(group((2, 1), ()))))
    header["columns"].append(["step", 2])
    with pytest.raises(WireError, match="column 'step' has 2 values for 3 tokens"):
        wire.decode_group(sealed(header, buffers[0] + bytes(8)))


def test_envelopes_are_versioned() -> None:
    message = {"id": 1, "op": "hello", "args": {"a": [1, None, b"x"]}}
    assert wire.unpack(wire.pack(message)) == message
    later = bytearray(wire.pack(message))
    later[4] = 9
    with pytest.raises(WireError, match="protocol version 9, this side speaks 4"):
        wire.unpack(bytes(later))
    with pytest.raises(WireError, match="not a message of this protocol"):
        wire.unpack(b"GET / HTTP/1.1")
    with pytest.raises(WireError, match="expected a map, got int"):
        wire.unpack(wire.ENVELOPE_MAGIC + b"\x01")
