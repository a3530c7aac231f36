from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_cases import random_group, rollout

from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.packing import (
    bins,
    fit_shared,
    joint_tokens,
    level_shared,
    pack_micro_batches,
    worthwhile_needs,
)
from asyncrl.learner.data.shared_prompts import (
    Need,
    Prompts,
    computed_tokens,
    needs_of,
    repeated_lengths,
    sources,
)
from asyncrl.types import Group, Rollout, Sampling, Task

PROMPT, ANSWERS = [5, 6], ([7, 8], [9], [4])


def group(*rollouts: Rollout) -> Group:
    return Group.from_rollouts(Task(0, ""), Sampling(), list(rollouts))


def answers(prompt: Sequence[int] = PROMPT, *, to: Sequence[Sequence[int]] = ANSWERS) -> MicroBatch:
    return MicroBatch.of([group(*(rollout([*prompt, *answer], len(prompt)) for answer in to))])


def test_three_answers_to_one_prompt_by_hand() -> None:
    source_N = sources(batch := answers())
    assert source_N is not None
    assert source_N.tolist() == [0, 1, 2, 3, 0, 1, 6, 0, 1, 9]
    assert computed_tokens(batch, source_N) == 6
    assert repeated_lengths(batch) == [2, 2]


def test_other_prompts_are_computed_each() -> None:
    """Of other tokens, or of another length with equal tokens."""
    batch = MicroBatch.of([group(rollout([5, 6, 7], 2), rollout([5, 7, 7], 2), rollout([5, 6, 7], 1))])
    assert sources(batch) is None
    assert (computed_tokens(batch, None), repeated_lengths(batch)) == (9, [])


def test_tokens_without_an_answer_share_nothing() -> None:
    tokens = torch.tensor([5, 6, 5, 6])
    assert sources(MicroBatch.of_tokens(tokens, [2, 2])) is None


def test_a_prompt_that_shows_another_picture_is_another_prompt() -> None:
    media_N = torch.full((10,), -1, dtype=torch.int32)
    media_N[[1, 5, 8]] = torch.tensor([0, 0, 1], dtype=torch.int32)
    batch = MicroBatch.of_tokens(
        answers().token_ids_N, [4, 3, 3], loss_mask_N=answers().loss_mask_N, media_N=media_N
    )
    source_N = sources(batch)
    assert source_N is not None
    assert source_N.tolist() == [0, 1, 2, 3, 0, 1, 6, 7, 8, 9]


def test_a_prompt_that_went_to_other_experts_is_another_prompt() -> None:
    experts = torch.zeros(10, 2, dtype=torch.int16)
    experts[5, 1] = 3
    source_N = sources(answers().with_columns(experts=experts))
    assert source_N is not None
    assert source_N.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 9]


def test_segments_of_one_rollout_share_what_they_begin_with() -> None:
    twice = Rollout.from_segments([rollout([5, 6, 7], 2), rollout([5, 6, 8], 2)])
    batch = MicroBatch.of([group(twice, rollout([5, 6, 9], 2))])
    assert Prompts.of(batch) == ([0, 0, 0], [2, 2, 2])
    source_N = sources(batch)
    assert source_N is not None
    assert source_N.tolist() == [0, 1, 2, 0, 1, 5, 0, 1, 8]
    assert needs_of(batch, [1, 0]) == [Need(1, {0: 2}, 3), Need(2, {0: 2}, 6)]


def test_rollouts_with_a_prompt_in_common_stay_together_if_that_saves_much() -> None:
    batch = MicroBatch.of([group(*(rollout([*p, 7], 2) for _ in range(3))) for p in ([5, 6], [6, 5])])
    assert bins(batch, range(6), 7) == [[0, 1], [2, 3], [4, 5]]
    assert bins(batch, range(6), 7, share=True) == [[0, 1, 2], [3, 4, 5]]
    assert bins(batch, range(6), 10, share=True) == [[0, 1, 2, 3, 4, 5]]
    passes = pack_micro_batches(batch, range(6), 10, passes=2, share=True)
    assert [each.rollouts for each in passes] == [3, 3]
    assert [each.groups for each in passes] == [1, 1]
    little = answers([5], to=[[6] * 19] * 2)
    assert worthwhile_needs(little, range(2)) is None  # one token of forty
    assert bins(little, range(2), 39, share=True) == [[0], [1]]


def test_the_keys_of_a_micro_batch_are_bounded() -> None:
    """One token each, after a prompt of 9: four times 20 are 8 of them."""
    assert [len(chosen) for chosen in fit_shared([Need(1, {0: 9}, 10)] * 10, 20)] == [8, 2]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 9)), max_size=30),
    st.integers(1, 60),
)
def test_no_bin_of_shared_prompts_is_overfilled(items: list[tuple[int, int, int]], capacity: int) -> None:
    lengths = {number: length for number, length, _ in items}
    every = [Need(own, {number: lengths[number]}, own + lengths[number]) for number, _, own in items]
    filled = fit_shared(every, capacity)
    assert sorted(item for chosen in filled for item in chosen) == list(range(len(every)))
    assert all(len(c) == 1 or joint_tokens([every[i] for i in c]) <= capacity for c in filled)
    for most in range(1, len(filled) + 2):
        level = level_shared(every, capacity, most) if every else []
        if level is not None:
            assert len(level) <= most
            assert sorted(item for chosen in level for item in chosen) == list(range(len(every)))
            assert all(len(c) == 1 or joint_tokens([every[i] for i in c]) <= capacity for c in level)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=5),
    st.integers(8, 60),
    st.integers(0, 4),
)
def test_micro_batches_have_each_rollout_once_and_no_more_tokens_than_they_may(
    shapes: list[tuple[int, int]], most: int, passes: int
) -> None:
    batch = MicroBatch.of(
        [random_group(g, size=size, segments=segments) for g, (size, segments) in enumerate(shapes)]
    )
    assert joint_tokens(needs_of(batch, range(batch.rollouts))) == computed_tokens(batch, sources(batch))
    packed = pack_micro_batches(batch, range(batch.rollouts), most, passes, share=True)
    counts = [computed_tokens(each, sources(each)) for each in packed]
    assert all(each.rollouts == 1 or count <= most for each, count in zip(packed, counts, strict=True))
    assert len(packed) <= max(passes, len(bins(batch, range(batch.rollouts), most, share=True)))
    ordinals = np.concatenate([each.ordinals_R.numpy() for each in packed])
    assert sorted(ordinals.tolist()) == batch.ordinals_R.tolist()
    for each, count in zip(packed, counts, strict=True):
        assert count == each.tokens - sum(repeated_lengths(each))
