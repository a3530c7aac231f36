from __future__ import annotations

import pytest
import torch
from advantage_cases import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import ORACLE, flat, oracle_batch
from loss_cases import drift_of, f64

from asyncrl.config.sections.algorithm import AlgorithmConfig, CorrectionConfig
from asyncrl.learner.algorithms.corrections import Drift, correction_weights
from asyncrl.learner.algorithms.registry import Gather, alone
from asyncrl.learner.training.objectives import PolicyObjective


def weights(
    raw: list[float], config: CorrectionConfig, seq: list[int] | None = None, gather: Gather | None = None
) -> list[float]:
    drift = drift_of(f64(raw).log(), seq or [0] * len(raw))
    got_N = correction_weights(drift, config, gather)
    return [round(value, 6) for value in got_N.tolist()]


def oracle_weights(config: CorrectionConfig, gather: Gather | None = None) -> torch.Tensor:
    batch = oracle_batch()
    log_w_N = flat(ORACLE["inputs"]["log_prob"]) - flat(ORACLE["inputs"]["old_log_prob"])
    return correction_weights(Drift.of(log_w_N, batch), config, gather)


def test_by_hand() -> None:
    raw = [0.4, 0.8, 6.0]
    assert weights(raw, CorrectionConfig("none")) == [1, 1, 1]
    assert weights(raw, CorrectionConfig("tis", high=5.0)) == [0.4, 0.8, 5.0]
    assert weights(raw, CorrectionConfig("icepop", low=0.5, high=5.0)) == [0, 0.8, 0]


def test_a_sequence_has_the_product_of_its_tokens() -> None:
    config = CorrectionConfig("icepop", "sequence", low=0.5, high=5.0)
    assert weights([2.0, 2.0, 0.5, 0.5], config, seq=[0, 0, 1, 1]) == [4, 4, 0, 0]


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("is=token|th=2.0|bn=False", CorrectionConfig("tis", "token", high=2.0)),
        ("is=token|th=0.5_5.0|bn=False", CorrectionConfig("icepop", "token", low=0.5, high=5.0)),
        ("is=sequence|th=2.0|bn=False", CorrectionConfig("tis", "sequence", high=2.0)),
    ],
)
def test_agrees_with_the_oracle(case: str, config: CorrectionConfig) -> None:
    ours_N = oracle_weights(config) * oracle_batch().loss_mask_N
    torch.testing.assert_close(ours_N, flat(ORACLE["correction"][case]["w"]), atol=1e-6, rtol=0)


# --- normalised over the batch


def test_normalised_weights_of_tokens_have_mean_1_after_the_truncation() -> None:
    # 0.5, 2, 4 truncated at 3.5: sum 6, mean 2
    got = weights([0.5, 2.0, 4.0], CorrectionConfig("tis", high=3.5, normalise=True), gather=alone)
    assert got == [0.25, 1.0, 1.75]


def test_normalised_weights_of_rollouts_have_mean_1_whatever_their_lengths() -> None:
    # rollout 0: 1.5 · 2 = 3; rollout 1: 1. Mean over rollouts 2, not (3 + 3 + 1) / 3
    config = CorrectionConfig("tis", "sequence", high=9.0, normalise=True)
    assert weights([1.5, 2.0, 1.0], config, seq=[0, 0, 1], gather=alone) == [1.5, 1.5, 0.5]


def test_rollouts_without_policy_tokens_have_no_part_in_the_mean() -> None:
    config = CorrectionConfig("tis", "sequence", high=9.0, normalise=True)
    drift = drift_of(f64([3.0, 1.0, 5.0]).log(), [0, 1, 2], mask=[True, True, False])
    got_N = correction_weights(drift, config, alone)
    assert got_N[:2].tolist() == pytest.approx([1.5, 0.5])


def test_weights_that_are_all_0_stay_so() -> None:
    config = CorrectionConfig("icepop", low=0.5, high=2.0, normalise=True)
    assert weights([0.1, 9.0], config, gather=alone) == [0, 0]


@pytest.mark.parametrize(
    "config",
    [
        CorrectionConfig("tis", "token", high=1.2, normalise=True),
        CorrectionConfig("icepop", "sequence", low=0.5, high=2.0, normalise=True),
    ],
    ids=["tokens", "rollouts"],
)
@settings(max_examples=15, deadline=None)
@given(owner=st.lists(st.integers(0, 2), min_size=12, max_size=12))
def test_ranks_do_not_matter(config: CorrectionConfig, owner: list[int]) -> None:
    batch = oracle_batch()
    log_w_N = flat(ORACLE["inputs"]["log_prob"]) - flat(ORACLE["inputs"]["old_log_prob"])
    whole_N = oracle_weights(config, alone)
    tokens = [batch.tokens_of([r for r in range(12) if owner[r] == rank] or [0]) for rank in range(3)]
    masks = [batch.loss_mask_N[at_N] & (rank in owner) for rank, at_N in enumerate(tokens)]

    def work(rank: int, gather: Gather) -> torch.Tensor:
        at_N = tokens[rank]
        return correction_weights(Drift(log_w_N[at_N], masks[rank], batch.seq_N[at_N], 12), config, gather)

    for at_N, mask_N, got_N in zip(tokens, masks, on_ranks(3, work), strict=True):
        torch.testing.assert_close(got_N[mask_N], whole_N[at_N][mask_N], atol=1e-12, rtol=0)


def test_what_needs_the_batch_does_not_take_a_part_for_it() -> None:
    config = CorrectionConfig("tis", normalise=True)
    with pytest.raises(ValueError, match="whole batch"):
        oracle_weights(config)


# --- around them


def test_an_absurd_weight_does_not_overflow() -> None:
    config = CorrectionConfig("icepop", high=1e30, low=0)
    got_N = correction_weights(drift_of(torch.tensor([1e4, -1e4]), [0, 1]), config)
    torch.testing.assert_close(got_N.log(), torch.tensor([20.0, -20.0]))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_what_stands_outside_the_mask_does_not_matter(level: str) -> None:
    config = CorrectionConfig("tis", level, high=9.0, normalise=True, reject="seq_max_k3")
    clean_N, spoiled_N = (
        correction_weights(drift_of(f64([0.1, -0.2, outside]), [0] * 3, [True, True, False]), config, alone)
        for outside in (0.0, torch.nan)
    )
    assert (clean_N[:2] == spoiled_N[:2]).all()
    assert spoiled_N[:2].isfinite().all()


def test_weights_have_no_gradient() -> None:
    log_w_N = f64([0.1, 0.2]).requires_grad_()
    got_N = correction_weights(drift_of(log_w_N, [0, 1]), CorrectionConfig("tis"))
    assert not got_N.requires_grad


def test_with_the_current_policy_as_proximal_the_gradient_is_weighted_reinforce() -> None:
    """d/dlogπ of w · ppo(ρ = 1) is −w·A, with w = π/μ truncated and no gradient of its own."""
    batch = oracle_batch()
    config = AlgorithmConfig(
        proximal="frozen", aggregation="token-sum", correction=CorrectionConfig("tis", high=1.2)
    )
    logp_N = flat(ORACLE["inputs"]["log_prob"]).requires_grad_()
    total, metrics = PolicyObjective(config, 9)(batch, logp_N, torch.zeros_like(logp_N))
    (grad_N,) = torch.autograd.grad(total, logp_N)
    w_N = (logp_N.detach() - batch.behaviour_N).exp().clamp(max=1.2)
    torch.testing.assert_close(grad_N, -w_N * batch.advantages_N * batch.loss_mask_N)
    assert metrics.values()["train/zero_weight_fraction"] == 0
