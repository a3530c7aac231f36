from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from learner_cases import random_group, rewards_batch, rollout, tiny_model

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.advantages import advantages
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.packing import first_fit, level, moving_rollouts, pack_micro_batches
from asyncrl.learner.models.attention import PACKED
from asyncrl.learner.models.documents import Documents
from asyncrl.models.loading import load_causal_lm
from asyncrl.types import Group, Sampling, Task


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 40))
def test_first_fit_packs_each_item_once_and_overfills_nothing(lengths: list[int], capacity: int) -> None:
    bins = first_fit(lengths, capacity)
    assert sorted(item for chosen in bins for item in chosen) == list(range(len(lengths)))
    assert all(len(chosen) == 1 or sum(lengths[i] for i in chosen) <= capacity for chosen in bins)
    assert all(chosen == sorted(chosen) for chosen in bins)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40),
    st.integers(30, 60),
    st.integers(0, 3),
    st.floats(5, 100),
)
def test_levelled_bins_hold_each_item_once_within_the_capacity(
    lengths: list[int], capacity: int, spare: int, even: float
) -> None:
    most = len(first_fit(lengths, capacity)) + spare
    bins = level(lengths, [length + length * length / even for length in lengths], capacity, most)
    assume(bins is not None)  # else those of first fit are taken
    assert bins is not None
    assert len(bins) <= most
    assert sorted(item for chosen in bins for item in chosen) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in chosen) <= capacity for chosen in bins)
    assert all(chosen == sorted(chosen) for chosen in bins)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 6), st.floats(5, 100))
def test_with_room_enough_no_bin_is_much_dearer_than_another(
    lengths: list[int], most: int, even: float
) -> None:
    """Graham 1966: at most the mean and the largest item that could not be avoided."""

    def cost(length: int) -> float:
        return length + length * length / even

    bins = level(lengths, [cost(length) for length in lengths], sum(lengths), most)
    assert bins is not None
    total, largest = sum(map(cost, lengths)), max(map(cost, lengths))
    assert max(sum(cost(lengths[i]) for i in chosen) for chosen in bins) <= (
        total / most + (1 - 1 / most) * largest + 1e-6
    )


def test_rollouts_are_spread_over_the_passes_that_are_run_anyway() -> None:
    batch = rewards_batch([1, 0, 0, 0])  # two tokens each
    assert [b.rollouts for b in pack_micro_batches(batch, range(4), max_tokens=6)] == [3, 1]
    assert [b.rollouts for b in pack_micro_batches(batch, range(4), max_tokens=6, passes=2)] == [2, 2]
    assert [b.rollouts for b in pack_micro_batches(batch, range(4), max_tokens=6, passes=9)] == [1, 1, 1, 1]
    assert pack_micro_batches(batch, [], max_tokens=6, passes=3) == []


def test_columns_of_a_batch() -> None:
    groups = [
        Group.from_rollouts(Task(7, ""), Sampling(temperature=0.5), [rollout([5, 6, 7, 8], 2, version=3)]),
        Group.from_rollouts(
            Task(8, ""), Sampling(temperature=2.0), [rollout([5, 9], 1, 1.0, version=4), rollout([5, 4], 1)]
        ),
    ]
    batch = MicroBatch.of(groups)
    assert batch.token_ids_N.tolist() == [5, 6, 7, 8, 5, 9, 5, 4]
    assert batch.position_ids_N.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert batch.seq_N.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert batch.loss_mask_N.int().tolist() == [0, 0, 1, 1, 0, 1, 0, 1]
    assert batch.versions_N.tolist() == [-1, -1, 3, 3, -1, 4, -1, 0]
    assert (batch.lengths_R, batch.group_R.tolist()) == ((4, 2, 2), [0, 1, 1])
    assert batch.temperature_R.tolist() == [0.5, 2.0, 2.0]
    picked = batch.select([2, 0])
    assert picked.token_ids_N.tolist() == [5, 4, 5, 6, 7, 8]
    assert (picked.seq_N.tolist(), picked.group_R.tolist()) == ([0, 0, 1, 1, 1, 1], [1, 0][::-1])
    assert picked.temperature_R.tolist() == [2.0, 0.5]


def test_what_cannot_be_trained_on_is_refused() -> None:
    def group(temperature: float, prompt: int = 1) -> Group:
        return Group.from_rollouts(Task(0, ""), Sampling(temperature=temperature), [rollout([1, 2], prompt)])

    with pytest.raises(ValueError, match="above 0"):
        MicroBatch.of([group(0.0)])
    with pytest.raises(ValueError, match="first token"):
        MicroBatch.of([group(1.0, prompt=0)])


def test_only_groups_with_advantages_move() -> None:
    batch = rewards_batch([1, 1, 1], [1, 0.5, 0], [0, 0])
    batch = batch.with_advantages(advantages(batch, AlgorithmConfig(advantage="dr_grpo")))
    # The middle rollout has no advantage itself, but its group has.
    assert moving_rollouts(batch) == [3, 4, 5]
    (only,) = pack_micro_batches(batch, moving_rollouts(batch), max_tokens=100)
    assert only.rewards_R.tolist() == [1, 0.5, 0]


def test_an_advantage_of_a_token_outside_the_loss_mask_moves_nothing() -> None:
    batch = rewards_batch([1, 1], [1, 0])  # of two tokens each, the first a prompt
    batch = batch.with_advantages(torch.tensor([3.0, 0.0, 3.0, 0.0, 0.0, 1.0, 0.0, -1.0]))
    assert moving_rollouts(batch) == [2, 3]


def test_joined_batches_are_in_the_order_of_ordinals() -> None:
    groups = [random_group(ordinal, size=2) for ordinal in range(4)]
    claims = [MicroBatch.of([groups[3], groups[0]]), MicroBatch.of([groups[2], groups[1]])]
    joined = MicroBatch.joined([c.with_columns(reference=c.ordinals_R[c.seq_N]) for c in claims])
    whole = MicroBatch.of(groups)
    assert torch.equal(joined.token_ids_N, whole.token_ids_N)
    assert torch.equal(joined.seq_N, whole.seq_N)
    assert torch.equal(joined.group_R, whole.group_R)
    assert torch.equal(joined.rewards_R, whole.rewards_R)
    assert joined.lengths_R == whole.lengths_R
    assert torch.equal(joined.columns["reference"], whole.ordinals_R[whole.seq_N])


def test_the_groups_of_some_ordinals() -> None:
    batch = MicroBatch.of([random_group(ordinal, size=2) for ordinal in (4, 6, 9)])
    some = batch.of_ordinals([9, 5, 4])
    assert some is not None
    assert some.ordinals_R.tolist() == [4, 4, 9, 9]
    assert some.group_R.tolist() == [0, 0, 1, 1]
    assert batch.of_ordinals([5]) is None


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_buckets_hold_each_token_once(lengths: list[int]) -> None:
    documents = Documents(lengths)
    places = torch.cat([bucket.index_DL[bucket.keep_DL] for bucket in documents.buckets])
    assert sorted(places.tolist()) == list(range(sum(lengths)))
    assert documents.keys.take_P[documents.keys.back_M].tolist() == list(range(sum(lengths)))
    assert documents.boundaries.tolist() == [0, *np.cumsum(lengths).tolist()]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_padding_of_a_bucket_stays_inside_its_document(lengths: list[int]) -> None:
    """Past the end of the last one there is nothing to read."""
    document_N = np.repeat(np.arange(len(lengths)), lengths)
    for bucket in Documents(lengths).buckets:
        assert int(bucket.index_DL.max()) < sum(lengths)
        for row in document_N[bucket.index_DL.numpy()]:
            assert len(set(row.tolist())) == 1


def test_packed_attention_is_attention_within_each_document(tmp_path: object) -> None:
    folder = tmp_path / "model"  # type: ignore[operator]
    packed = load_causal_lm(tiny_model(folder), seed=3, attention=PACKED)
    plain = load_causal_lm(tiny_model(folder), seed=3, attention="eager")
    batch = MicroBatch.of([random_group(0), random_group(1, size=2)])
    together = packed(
        input_ids=batch.token_ids_N[None],
        position_ids=batch.position_ids_N[None],
        documents=Documents(batch.lengths_R),
        use_cache=False,
    ).logits[0]
    alone = torch.cat([plain(ids[None]).logits[0] for ids in batch.token_ids_N.split(batch.lengths_R)])
    torch.testing.assert_close(together, alone, atol=2e-6, rtol=0)
