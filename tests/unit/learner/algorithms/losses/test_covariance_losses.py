"""Losses of selected tokens by hand, and the selection: exact, and the same for any ranks and any batching."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from advantage_cases import on_ranks, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import outcome, tokens
from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.losses.covariance_losses import select_covariance
from asyncrl.learner.algorithms.registry import AlgorithmContext
from asyncrl.learner.data.batch import MicroBatch

GROUPS, SIZE = 4, 3


def test_clip_cov_silences_the_selected_tokens_and_is_ppo_for_the_rest() -> None:
    got = outcome(
        tokens([1.1, 1.1, 2.0], [1.0] * 3, selected=[True, False, False]), AlgorithmConfig(loss="clip_cov")
    )
    assert got.loss == pytest.approx([0.0, -1.1, -1.28])
    assert got.slope == pytest.approx([0.0, -1.1, 0.0])
    assert got.clipped == [True, False, True]


def test_kl_cov_penalises_the_selected_tokens_and_clips_nothing() -> None:
    config = AlgorithmConfig(loss="kl_cov", cov_kl_coef=0.5)
    got = outcome(tokens([2.0, 0.5, 2.0], [1.0] * 3, selected=[True, True, False]), config)
    penalty = 0.5 * np.log(2.0)
    assert got.loss == pytest.approx([-2.0 + penalty, -0.5 + penalty, -2.0])
    assert got.slope == pytest.approx([-2.0 + 0.5, -0.5 - 0.5, -2.0])


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_without_a_selection_there_is_no_loss(loss: str) -> None:
    with pytest.raises(ValueError, match="select_covariance"):
        outcome(tokens([1.0], [1.0]), AlgorithmConfig(loss=loss))


# --- the selection


def case(seed: int) -> MicroBatch:
    """Random log-probs π in the column values, π_p in proximal, advantages per token."""
    batch = random_batch(seed, GROUPS, SIZE)
    return batch.with_advantages(batch.columns["teacher"])


def selected(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext | None = None) -> Tensor:
    return select_covariance(
        batch, batch.columns["values"], batch.columns["proximal"], config, context or AlgorithmContext()
    )


def covariance(batch: MicroBatch) -> Tensor:
    """[P]"""
    logp_P = batch.columns["values"][batch.loss_mask_N].double()
    advantages_P = batch.advantages_N[batch.loss_mask_N].double()
    return (logp_P - logp_P.mean()) * (advantages_P - advantages_P.mean())


@given(seed=st.integers(0, 10_000), share=st.floats(1e-4, 0.5))
@settings(max_examples=30, deadline=None)
def test_kl_cov_selects_exactly_the_largest(seed: int, share: float) -> None:
    batch = case(seed)
    chosen_P = selected(batch, AlgorithmConfig(loss="kl_cov", cov_share=share))[batch.loss_mask_N]
    covariance_P = covariance(batch)
    count = max(1, int(share * len(covariance_P)))
    assert chosen_P.sum() == count
    assert set(chosen_P.nonzero()[:, 0].tolist()) == set(covariance_P.topk(count).indices.tolist())


@given(seed=st.integers(0, 10_000), share=st.sampled_from([1e-4, 0.05, 1.0]))
@settings(max_examples=30, deadline=None)
def test_clip_cov_selects_so_many_of_the_eligible(seed: int, share: float) -> None:
    batch = case(seed)
    config = AlgorithmConfig(loss="clip_cov", cov_share=share, cov_range=(0.1, 1.0))
    chosen_N = selected(batch, config)
    chosen_P, covariance_P = chosen_N[batch.loss_mask_N], covariance(batch)
    assert not chosen_N[~batch.loss_mask_N].any()
    log_rho_P = (batch.columns["values"] - batch.columns["proximal"])[batch.loss_mask_N]
    rho_P, a_P = log_rho_P.exp(), batch.advantages_N[batch.loss_mask_N]
    clipped_P = ((rho_P > 1.28) & (a_P > 0)) | ((rho_P < 0.8) & (a_P < 0))
    eligible_P = (covariance_P > 0.1) & (covariance_P < 1.0) & ~clipped_P
    assert not (chosen_P & ~eligible_P).any()
    assert chosen_P.sum() == min(max(1, int(share * len(covariance_P))), int(eligible_P.sum()))


def test_who_is_drawn_changes_from_version_to_version() -> None:
    batch = case(3)
    config = AlgorithmConfig(loss="clip_cov", cov_share=0.1, cov_range=(-9.0, 9.0))
    draws = [selected(batch, config, AlgorithmContext(seed=(7, version))) for version in range(4)]
    assert all(
        (draw == selected(batch, config, AlgorithmContext(seed=(7, v)))).all() for v, draw in enumerate(draws)
    )
    assert len({tuple(draw.tolist()) for draw in draws}) > 1


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
@given(seed=st.integers(0, 10_000), owner=st.lists(st.integers(0, 2), min_size=GROUPS, max_size=GROUPS))
@settings(max_examples=15, deadline=None)
def test_ranks_and_order_do_not_matter(loss: str, seed: int, owner: list[int]) -> None:
    batch = case(seed)
    config = AlgorithmConfig(loss=loss, cov_share=0.2, cov_range=(-0.5, 1.0))
    whole_N = selected(batch, config)

    def part(rank: int) -> list[int]:
        """The rollouts of this rank's groups, the last group first."""
        mine = [g for g in reversed(range(GROUPS)) if owner[g] == rank]
        return [g * SIZE + i for g in mine for i in range(SIZE)]

    def work(rank: int, gather) -> Tensor:  # type: ignore[no-untyped-def]
        here = batch.select(part(rank)) if part(rank) else MicroBatch.empty()
        if not part(rank):
            here = here.with_columns(values=torch.zeros(1), proximal=torch.zeros(1))
        return selected(here, config, AlgorithmContext(gather=gather))

    for rank, chosen_N in enumerate(on_ranks(3, work)):
        if part(rank):
            assert (chosen_N == whole_N[batch.tokens_of(part(rank))]).all()
        else:
            assert not chosen_N.any()


def test_equal_covariances_are_told_apart_by_the_draw() -> None:
    batch = case(0).with_advantages(torch.zeros(case(0).tokens))  # all covariances are 0
    chosen_N = selected(batch, AlgorithmConfig(loss="kl_cov", cov_share=0.25))
    assert chosen_N.sum() == int(0.25 * batch.loss_mask_N.sum())


def test_nobody_to_select_from() -> None:
    nobody = MicroBatch.empty().with_columns(values=torch.zeros(1), proximal=torch.zeros(1))
    for loss in ("clip_cov", "kl_cov"):
        assert not selected(nobody, AlgorithmConfig(loss=loss)).any()
