"""Segments that are joined into rollouts come out of a group's bytes as they went in."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner_cases import rollout

from asyncrl.queue.wire.payload import decode_group, encode_group
from asyncrl.types import Group, Rollout, Sampling, Task

STEPS = {
    "step": np.array([-1, 0, 0], np.int32),
    "anchor": np.array([0, 5, 5]),
    "step_rewards": np.zeros(3, np.float32),
}
shapes = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4)


@given(shapes, st.integers(0, 3))
def test_the_lengths_of_segments_survive_the_wire(lengths: list[list[int]], cut: int) -> None:
    rollouts = []
    for sizes in lengths:
        segments = [rollout(range(size), 1, reward=size) for size in sizes]
        first, rest = segments[: cut + 1], segments[cut + 1 :]
        rollouts.append(Rollout.from_segments([Rollout.from_segments(first), *rest]))  # a join of a join
        assert rollouts[-1].reward == sizes[-1]
    group = Group.from_rollouts(Task(0, ""), Sampling(), rollouts)
    payload = encode_group(group)
    received = decode_group(payload.frames)
    assert received.lengths.tolist() == [sum(sizes) for sizes in lengths]
    assert received.segment_lengths.tolist() == [size for sizes in lengths for size in sizes]
    assert payload.squares == sum(size**2 for sizes in lengths for size in sizes)
    if "segment" in group.columns:
        numbers = [number for sizes in lengths for number, size in enumerate(sizes) for _ in range(size)]
        assert received.columns["segment"].tolist() == numbers


def test_steps_are_counted_on_and_a_segment_without_any_belongs_to_none() -> None:
    with_steps = dataclasses.replace(rollout([1, 2, 3], 1), columns=STEPS)
    joined = Rollout.from_segments([with_steps, rollout([4, 5], 1), with_steps])
    assert joined.token_ids.tolist() == [1, 2, 3, 4, 5, 1, 2, 3]
    assert joined.columns["segment"].tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert joined.columns["step"].tolist() == [-1, 0, 0, -1, -1, -1, 1, 1]
    assert joined.columns["anchor"].tolist() == [0, 5, 5, 0, 0, 0, 5, 5]


@pytest.mark.parametrize("wrong", [[], [rollout([], 0)], [rollout([1, 2], 1), rollout([3], 0)]])
def test_nothing_joins_segments_without_context(wrong: list[Rollout]) -> None:
    with pytest.raises(ValueError, match="segment"):
        Rollout.from_segments(wrong)
