from __future__ import annotations

import dataclasses
from typing import get_args, get_type_hints

import pytest
import torch
from advantage_cases import tokens_batch
from learner_cases import ORACLE, flat, oracle_batch
from loss_cases import aggregated, f64, weighted_sum

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.losses.aggregation import AGGREGATIONS, Counts
from asyncrl.learner.data.batch import MicroBatch


def test_every_literal_is_there() -> None:
    assert set(get_args(get_type_hints(AlgorithmConfig)["aggregation"])) == set(AGGREGATIONS)


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_agrees_with_the_oracle(aggregation: str) -> None:
    value = aggregated(flat(ORACLE["inputs"]["advantages"]), oracle_batch(), aggregation)
    assert value.item() == pytest.approx(ORACLE["aggregation"][aggregation], abs=1e-6)


@pytest.mark.parametrize(
    ("aggregation", "value"),
    [
        ("token-sum", 13.0),  # 1 + 2 + 4 + 6
        ("token-mean", 13 / 4),
        ("seq-mean-token-sum", 13 / 2),
        ("seq-mean-token-mean", (3 / 2 + 10 / 2) / 2),
        ("seq-mean-token-sum-norm", 13 / 2 / 9),
    ],
)
def test_by_hand(aggregation: str, value: float) -> None:
    batch = tokens_batch(["110", "101"], [0.0, 0.0])
    assert aggregated(f64([1, 2, 30, 4, 50, 6]), batch, aggregation).item() == pytest.approx(value)


def test_a_third_is_exact_in_float64() -> None:
    batch = tokens_batch(["0111", "01"], [0.0, 0.0])
    assert aggregated(f64([0, 1, 0, 0, 0, 0]), batch, "seq-mean-token-mean").item() == 1 / 3 / 2
    assert aggregated(f64([0, 1, 0, 0, 0, 0]), batch, "seq-mean-token-sum-norm").item() == 1 / 9 / 2


def test_a_rollout_without_policy_tokens_is_none() -> None:
    batch = tokens_batch(["110", "000"], [0.0, 0.0])
    assert Counts.of(batch) == Counts(tokens=2, rollouts=1)
    assert Counts.of(MicroBatch.empty()) == Counts()


@pytest.mark.parametrize("aggregation", sorted(AGGREGATIONS))
def test_a_rollout_that_counts_k_times_is_k_rollouts(aggregation: str) -> None:
    loss_N = flat(ORACLE["inputs"]["advantages"])
    batch, copies = oracle_batch(), [0, 3, 1, 0, 2, 1, 1, 1, 0, 1, 2, 2]
    counted = dataclasses.replace(batch, copies_R=torch.tensor(copies).float())
    repeated = [r for r, k in enumerate(copies) for _ in range(k)]
    spelt_out = batch.select(repeated)
    assert Counts.of(counted) == Counts.of(spelt_out)
    torch.testing.assert_close(
        weighted_sum(loss_N, counted, aggregation),
        weighted_sum(loss_N[batch.tokens_of(repeated)], spelt_out, aggregation),
    )


def test_counts_add_up() -> None:
    assert Counts(3, 1) + Counts(4, 2) + Counts() == Counts(7, 3)
