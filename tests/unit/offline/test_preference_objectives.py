"""The objectives of offline training, against numbers computed by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_cases import rollout
from torch import Tensor

from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.training.passes import PADDING, Objective
from asyncrl.offline.objectives import (
    REFERENCE,
    TARGET,
    ImitationObjective,
    PreferenceObjective,
    signed_sums,
    with_signs,
)
from asyncrl.types import Group, Rollout, Sampling, Task

LOG = torch.tensor([0.0, -1.0, -2.0, 0.0, -4.0, 0.0, -0.5, 0.0, 0.0, -1.0])
"""Two pairs: chosen −1 −2, rejected −4; chosen −0.5, rejected −1 (its prompt has two tokens)."""


def pairs(mean: bool = False, **parts: list[float]) -> MicroBatch:
    first = Rollout.from_segments([rollout([1, 2, 3], 1), rollout([1, 4], 1)])
    second = Rollout.from_segments([rollout([1, 2], 1), rollout([1, 5, 6], 2)])
    groups = [Group.from_rollouts(Task(o, ""), Sampling(), [one]) for o, one in enumerate([first, second])]
    batch = with_signs(MicroBatch.of(groups), mean)
    return dataclasses.replace(batch, parts_R={name: torch.tensor(each) for name, each in parts.items()})


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def test_the_margin_of_a_pair_is_its_chosen_sum_less_its_rejected_one() -> None:
    assert signed_sums(pairs(), LOG).tolist() == [1.0, 0.5]
    assert signed_sums(pairs(mean=True), LOG).tolist() == [2.5, 0.5]


@pytest.mark.parametrize(
    ("objective", "parts", "expected"),
    [
        (PreferenceObjective(), {}, -log_sigmoid(1.0) - log_sigmoid(0.5)),
        (PreferenceObjective(), {TARGET: [0.5, 0.0]}, -2 * log_sigmoid(0.5)),
        (
            PreferenceObjective(0.1, 0.2),
            {REFERENCE: [-1.0, 1.5]},  # h = 0.2, −0.1
            -0.8 * (log_sigmoid(0.2) + log_sigmoid(-0.1)) - 0.2 * (log_sigmoid(-0.2) + log_sigmoid(0.1)),
        ),
        (PreferenceObjective(0.1, 0.0, "ipo"), {REFERENCE: [-1.0, 1.5]}, (2 - 5) ** 2 + (-1 - 5) ** 2),
    ],
)
def test_hand_computed_losses(
    objective: PreferenceObjective, parts: dict[str, list[float]], expected: float
) -> None:
    assert float(objective.total(pairs(**parts), LOG)) == pytest.approx(expected, rel=1e-6)


def test_simpo_compares_log_probs_a_token() -> None:
    """β 2, γ 1: the target is ½."""
    batch = pairs(mean=True, **{TARGET: [0.5, 0.5]})
    expected = -log_sigmoid(2 * 2.5 - 1) - log_sigmoid(2 * 0.5 - 1)
    assert float(PreferenceObjective(2.0).total(batch, LOG)) == pytest.approx(expected, rel=1e-6)


def test_the_metrics_of_pairs_know_the_reference_and_not_the_target() -> None:
    batch = pairs(**{REFERENCE: [-1.0, 1.5], TARGET: [9.0, 9.0]})
    _, metrics = PreferenceObjective(0.1)(batch, LOG)
    assert metrics.values() == {"train/accuracy": 0.5, "train/margin": pytest.approx(0.05)}


def test_imitation_is_the_cross_entropy_of_the_targets() -> None:
    objective, batch = ImitationObjective(), pairs()
    total, metrics = objective(batch, LOG, torch.full_like(LOG, 2.0) * batch.loss_mask_N)
    assert float(total) == 8.5
    assert objective.denominator(objective.counts(batch)) == 5
    assert metrics.values() == {"train/entropy": 2.0}


OBJECTIVES: list[Objective] = [
    ImitationObjective(),
    PreferenceObjective(),
    PreferenceObjective(0.3, 0.1),
    PreferenceObjective(0.3, 0.0, "ipo"),
]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_rank_without_examples_adds_nothing(objective: Objective) -> None:
    assert float(objective.total(PADDING, torch.zeros(1), torch.zeros(1))) == 0


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(seed=st.integers(0, 99))
def test_micro_batches_add_up(objective: Objective, seed: int) -> None:
    """Sums of loss and gradient over pairs one by one are those over all."""
    made = pairs(**{REFERENCE: [0.25, -0.5], TARGET: [0.125, 1.0]})

    def total(batch: MicroBatch, out_N: Tensor) -> Tensor:
        return objective.total(batch, out_N, torch.zeros_like(out_N))

    out_N = torch.randn(10, generator=torch.Generator().manual_seed(seed)).double().requires_grad_()
    whole = total(made, out_N)
    (slope_N,) = torch.autograd.grad(whole, out_N)
    parts = [total(made.select([r]), out_N[made.tokens_of([r])]) for r in range(2)]
    (by_parts_N,) = torch.autograd.grad(sum(parts, torch.zeros(())), out_N)
    torch.testing.assert_close(sum(parts, torch.zeros(())).double(), whole.double())
    torch.testing.assert_close(by_parts_N, slope_N)
