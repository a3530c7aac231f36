"""A rollout of several segments is trained on as these contexts alone, with one outcome."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_cases import random_group, rollout, small_config, tiny_model
from learner_fakes import FakeBackend
from torch import Tensor

from asyncrl.config.schema import LearnerConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.learner.algorithms.advantages import advantages, segment_shares
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.training.version_step import version_step
from asyncrl.types import Group, Rollout, Sampling, Task


def group_of(*rollouts: list[Rollout]) -> Group:
    return Group.from_rollouts(Task(0, ""), Sampling(), [Rollout.from_segments(each) for each in rollouts])


def test_positions_begin_anew_and_segments_are_counted() -> None:
    batch = MicroBatch.of(
        [group_of([rollout([5, 6, 7, 8], 2)], [rollout([5, 6, 9], 2), rollout([3, 2], 1, reward=4.0)])]
    )
    assert batch.position_ids_N.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1]
    assert batch.seq_N.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert (batch.lengths_R, batch.segment_lengths, batch.segments) == ((4, 5), (4, 3, 2), 3)
    parts = batch.by_segment()
    assert parts.seq_N.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert (parts.lengths_R, parts.rewards_R.tolist(), parts.group_R.tolist()) == (
        (4, 3, 2),
        [0, 4, 4],
        [0] * 3,
    )
    assert parts.by_segment() is parts
    last = batch.select([1])
    assert (last.segment_lengths, last.position_ids_N.tolist()) == ((3, 2), [0, 1, 2, 0, 1])


def test_log_probs_and_gradients_are_those_of_the_segments_alone(tmp_path: Path) -> None:
    """Three contexts with the same tokens but one: a token that saw another segment, or went on counting positions,
    would have another log-prob."""
    backend = FsdpBackend(small_config(tmp_path, model=tiny_model(tmp_path / "model")))
    segments = [rollout([1, 2, 3, 4, 5], 2), rollout([9, 2, 3, 4, 5], 2), rollout([1, 2, 3, 4, 5, 6, 7], 3)]

    def trained(*batches: MicroBatch) -> tuple[Tensor, Tensor]:
        """The log-probs, and the gradients of all parameters."""
        found: list[Tensor] = []

        def loss(batch: MicroBatch, logp_N: Tensor, entropy_N: Tensor) -> Tensor:
            found.append(logp_N.detach())
            return (torch.cos(batch.token_ids_N) * logp_N + 0.3 * entropy_N).sum()

        backend.policy.accumulate(batches, loss)
        masters = backend.policy._masters.tensors.values()
        gradient = torch.cat([torch.as_tensor(m.grad).flatten() for m in masters])
        backend.policy.forget_gradients()
        return torch.cat(found), gradient

    joined = MicroBatch.of([group_of(segments)])
    logp_N, gradient = trained(joined)
    apart_N, expected = trained(*(MicroBatch.of([group_of([each])]) for each in segments))
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(logp_N, apart_N, atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(backend.policy.predict(joined), apart_N, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("loss", "whole"), [("ppo", False), ("gspo", True)])
def test_a_long_rollout_is_spread_over_passes_where_its_loss_permits(
    tmp_path: Path, loss: str, whole: bool
) -> None:
    group = group_of(*([rollout(range(1, 9), 2, reward=float(i))] * 5 for i in range(4)))

    def step(tokens: int) -> tuple[Tensor, list[int]]:
        """The gradient, and the size of each micro-batch of the policy."""
        backend, sizes = FakeBackend(["reference"]), list[int]()
        optimizer = OptimizerConfig(lr=1e-2, warmup_steps=1)
        config = small_config(
            tmp_path,
            learner=LearnerConfig(micro_batch_tokens=tokens, optimizer=optimizer),
            algorithm=AlgorithmConfig(loss=loss, aggregation="seq-mean-token-mean"),  # type: ignore[arg-type]
        )
        accumulate = backend.policy.accumulate

        def recorded(batches: list[MicroBatch], objective: object) -> None:
            sizes.extend(batch.tokens for batch in batches)
            accumulate(batches, objective)  # type: ignore[arg-type]

        backend.policy.accumulate = recorded  # type: ignore[method-assign, assignment]
        training = version_step(backend, config)  # type: ignore[arg-type]
        training.add([group], 0)
        training.step(0)
        return backend.policy.gradients[0], sizes

    gradient, sizes = step(16)
    expected, _ = step(4096)
    assert max(sizes) == (40 if whole else 16)
    assert sum(sizes) == group.tokens
    torch.testing.assert_close(gradient, expected)


shapes = st.lists(st.lists(st.integers(2, 5), min_size=1, max_size=4), min_size=2, max_size=4)


@given(shapes)
def test_credit_is_shared_by_rule(sizes: list[list[int]]) -> None:
    """By the sums of the shares of each segment's policy tokens, and of the advantages that are left."""
    group = group_of(*([rollout(range(n), 1, reward=i) for n in each] for i, each in enumerate(sizes)))
    batch = MicroBatch.of([group])
    parts, whole_N = batch.by_segment(), advantages(batch, AlgorithmConfig())
    shares = {"each": [], "split": [], "last": []}
    for each in sizes:
        shares["each"] += [1.0] * len(each)
        shares["split"] += [1 / len(each)] * len(each)
        shares["last"] += [0.0] * (len(each) - 1) + [1.0]
    for rule, expected_D in shares.items():
        share_N = segment_shares(batch, rule)
        assert share_N.tolist() == torch.tensor(expected_D, dtype=torch.float64)[parts.seq_N].tolist()
        credited_N = advantages(batch, AlgorithmConfig(segment_credit=rule))  # type: ignore[arg-type]
        torch.testing.assert_close(credited_N, (whole_N * share_N).float())
        if rule != "each":  # the shares of a rollout make one whole
            per_R = torch.zeros(batch.rollouts, dtype=torch.float64)
            starts_N = batch.position_ids_N == 0
            per_R.index_add_(0, batch.seq_N[starts_N], share_N[starts_N])
            torch.testing.assert_close(per_R, torch.ones_like(per_R))


def test_a_group_without_segments_is_divided_into_itself() -> None:
    batch = MicroBatch.of([random_group(0)])
    assert batch.by_segment() is batch
    assert dataclasses.replace(batch).segments == batch.rollouts
