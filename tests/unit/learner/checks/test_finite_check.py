"""Which groups are called not finite."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from learner_cases import random_group
from torch import Tensor

from asyncrl.learner.checks.finite_check import NonFiniteGroups, nonfinite_inputs, nonfinite_outputs
from asyncrl.learner.data.batch import MicroBatch


@pytest.fixture
def batch() -> MicroBatch:
    """Tasks 4, 7 and 9, of four rollouts each."""
    return MicroBatch.of([random_group(ordinal) for ordinal in (4, 7, 9)])


def at(batch: MicroBatch, ordinal: int, masked: bool = True) -> int:
    """A token of this task, under the mask or not."""
    mine_N = batch.ordinals_R[batch.seq_N] == ordinal
    return int(torch.nonzero(mine_N & (batch.loss_mask_N == masked))[-1])


def total(batch: MicroBatch, said_N: Tensor) -> Tensor:
    """The log-probs, with the advantages as weights."""
    return (said_N * batch.advantages_N).sum()


def test_what_came_with_a_group_must_be_finite_where_the_policy_made_the_token(batch: MicroBatch) -> None:
    assert nonfinite_inputs(batch) == set()
    batch.behaviour_N[at(batch, 7)] = math.inf
    batch.behaviour_N[at(batch, 4, masked=False)] = math.nan
    assert nonfinite_inputs(batch) == {7}
    batch.rewards_R[-1] = math.nan
    assert nonfinite_inputs(batch) == {7, 9}
    values_N = torch.zeros(batch.tokens)
    values_N[at(batch, 4)] = math.nan
    assert nonfinite_inputs(batch.with_columns(values=values_N)) == {4, 7, 9}


def test_log_probs_that_are_not_finite_are_blamed_on_their_groups(batch: MicroBatch) -> None:
    said_N = torch.zeros(batch.tokens)
    assert nonfinite_outputs(batch, [said_N], total(batch, said_N), total) == set()
    said_N[at(batch, 9)] = math.nan
    entropy_N = torch.zeros(batch.tokens)
    entropy_N[at(batch, 4)] = math.inf
    assert nonfinite_outputs(batch, [said_N, entropy_N], torch.tensor(0.0), total) == {4, 9}


def test_a_loss_that_is_not_finite_is_blamed_on_the_groups_whose_own_is_not(batch: MicroBatch) -> None:
    said_N, weights_N = torch.ones(batch.tokens), torch.zeros(batch.tokens)
    weights_N[at(batch, 7)] = math.inf
    batch = dataclasses.replace(batch, advantages_N=weights_N)
    assert nonfinite_outputs(batch, [said_N], total(batch, said_N), total) == {7}


def test_a_sum_that_only_all_groups_make_infinite_is_blamed_on_all(batch: MicroBatch) -> None:
    weights_N = torch.zeros(batch.tokens)
    weights_N[at(batch, 4)] = weights_N[at(batch, 9)] = 3e38
    batch, said_N = dataclasses.replace(batch, advantages_N=weights_N), torch.ones(batch.tokens)
    assert torch.isinf(total(batch, said_N))
    assert nonfinite_outputs(batch, [said_N], total(batch, said_N), total) == {4, 7, 9}


def test_a_message_names_a_few_tasks() -> None:
    assert str(NonFiniteGroups({3})).endswith("of tasks 3")
    assert str(NonFiniteGroups(range(9, 0, -1))).startswith("9 groups")
    assert str(NonFiniteGroups(range(9, 0, -1))).endswith("of tasks 1, 2, 3, 4, 5, …")
