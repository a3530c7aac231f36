"""Named arrays of a stage: through the wire and into a group."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from asyncrl.errors import WireError
from asyncrl.queue.wire import wire
from asyncrl.queue.wire.columns import DTYPES, decode_columns, encode_columns, with_columns
from asyncrl.queue.wire.payload import digest
from asyncrl.types import Group, Rollout, Sampling, Task

arrays = st.sampled_from(DTYPES).flatmap(lambda dtype: npst.arrays(dtype, st.integers(0, 9)))


def group() -> Group:
    rollout = Rollout(
        token_ids=np.arange(3),
        loss_mask=np.ones(3, np.int8),
        logprobs=np.zeros(3, np.float32),
        versions=np.zeros(3, np.int32),
        finish="stop",
        reward=1.0,
    )
    return Group.from_rollouts(Task(0, ""), Sampling(), [rollout, rollout])


@given(st.dictionaries(st.text(min_size=1, max_size=8), arrays, max_size=4))
def test_columns_come_out_as_they_went_in(columns: dict[str, np.ndarray]) -> None:
    payload = encode_columns(columns)
    assert payload.nbytes == sum(map(len, payload.frames))
    decoded = decode_columns(payload.frames)
    assert decoded.keys() == columns.keys()
    for name, column in columns.items():
        assert decoded[name].dtype == column.dtype
        assert decoded[name].tobytes() == column.tobytes()


@given(st.integers(0, 200), st.integers(1, 255))
def test_a_bit_that_flipped_is_found(at: int, flip: int) -> None:
    payload = encode_columns({"values": np.arange(6, dtype=np.float32), "kept": np.ones(6, np.int8)})
    frames = [bytearray(frame) for frame in payload.frames]
    frame = frames[at % 2]
    frame[at % len(frame)] ^= flip
    with pytest.raises(WireError):
        decode_columns([bytes(frame) for frame in frames])


def test_frames_that_are_no_columns_are_named() -> None:
    payload = encode_columns({"values": np.arange(6, dtype=np.float32)})
    for frames in ([], payload.frames[:1], [b"noise", b""], [*payload.frames, b""]):
        with pytest.raises(WireError):
            decode_columns(frames)
    for shape in ((), (1, 2, 1)):
        with pytest.raises(ValueError, match=f"{len(shape)}-dimensional"):
            encode_columns({"values": np.zeros(shape, np.float32)})
    with pytest.raises(ValueError, match="complex128"):
        encode_columns({"values": np.zeros(2, np.complex128)})


@pytest.mark.parametrize(
    "size",
    [
        [1 << 60],
        [1 << 63] * 2,
        [2, -1],
        [-2],
        [],
        [2, 1, 1],
        3,
        -2,
        "2",
        None,
        [2.0],
        [True, 2],
        [0, 1 << 62],
    ],
)
def test_a_size_that_no_column_has_is_refused(size: object) -> None:
    spec, data = msgpack.packb([["values", "<f4", size]]), np.zeros(2, np.float32).tobytes()
    header = wire.pack({"spec": spec, "digest": digest([spec, data])})
    with pytest.raises(WireError):
        decode_columns([header, data])


def test_rows_of_values_travel_and_rewards_have_none() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    payload = encode_columns({"teacher": rows})
    assert decode_columns(payload.frames)["teacher"].tolist() == rows.tolist()
    assert with_columns(group(), {"teacher": rows}).columns["teacher"].shape == (6, 2)
    with pytest.raises(WireError, match=r"'rewards' has the shape \(2, 2\)"):
        with_columns(group(), {"rewards": rows[:2]})


def test_a_group_takes_columns_a_token_and_rewards_a_rollout() -> None:
    values = np.arange(6, dtype=np.float32)
    both = with_columns(group(), {"values": values, "rewards": np.array([2.0, 3.0])})
    assert (both.rewards.dtype, both.rewards.tolist()) == (np.float32, [2.0, 3.0])
    assert both.columns.keys() == {"values"}
    more = with_columns(both, {"reference": -values})
    assert {name: column.tolist() for name, column in more.columns.items()} == {
        "values": [0, 1, 2, 3, 4, 5],
        "reference": [0, -1, -2, -3, -4, -5],
    }
    with pytest.raises(WireError, match=r"'values' has the shape \(2,\), the group needs 6 values"):
        with_columns(group(), {"values": np.zeros(2)})
