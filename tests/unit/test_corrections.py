from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
import torch
from learner_cases import ORACLE, flat, oracle_batch

from asyncrl.config.schema import AlgorithmConfig, Config, CorrectionConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.corrections import RULES, correction_weights
from asyncrl.learner.objective import Objective


def weights(raw: list[float], config: CorrectionConfig, seq: list[int] | None = None) -> list[float]:
    log_w_N = torch.tensor(raw, dtype=torch.float64).log()
    seq_N = torch.tensor(seq or [0] * len(raw))
    mask_N = torch.ones(len(raw), dtype=torch.bool)
    got_N = correction_weights(log_w_N, mask_N, seq_N, int(seq_N.max()) + 1, config)
    return [round(value, 6) for value in got_N.tolist()]


def test_every_literal_has_a_rule() -> None:
    assert set(get_args(get_type_hints(CorrectionConfig)["kind"])) == set(RULES)


def test_by_hand() -> None:
    raw = [0.4, 0.8, 6.0]
    assert weights(raw, CorrectionConfig("none")) == [1, 1, 1]
    assert weights(raw, CorrectionConfig("tis", high=5.0)) == [0.4, 0.8, 5.0]
    assert weights(raw, CorrectionConfig("icepop", low=0.5, high=5.0)) == [0, 0.8, 0]


def test_a_sequence_has_the_product_of_its_tokens() -> None:
    config = CorrectionConfig("icepop", "sequence", low=0.5, high=5.0)
    assert weights([2.0, 2.0, 0.5, 0.5], config, seq=[0, 0, 1, 1]) == [4, 4, 0, 0]


def test_an_absurd_weight_does_not_overflow() -> None:
    log_w_N = torch.tensor([1e4, -1e4])
    got_N = correction_weights(
        log_w_N,
        torch.ones(2, dtype=torch.bool),
        torch.arange(2),
        2,
        CorrectionConfig("icepop", high=1e30, low=0),
    )
    torch.testing.assert_close(got_N.log(), torch.tensor([20.0, -20.0]))


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("is=token|th=2.0|bn=False", CorrectionConfig("tis", "token", high=2.0)),
        ("is=token|th=0.5_5.0|bn=False", CorrectionConfig("icepop", "token", low=0.5, high=5.0)),
        ("is=sequence|th=2.0|bn=False", CorrectionConfig("tis", "sequence", high=2.0)),
    ],
)
def test_agrees_with_the_oracle(case: str, config: CorrectionConfig) -> None:
    batch = oracle_batch()
    log_w_N = flat(ORACLE["inputs"]["log_prob"]) - flat(ORACLE["inputs"]["old_log_prob"])
    ours_N = correction_weights(log_w_N, batch.loss_mask_N, batch.seq_N, batch.rollouts, config)
    theirs_N = flat(ORACLE["correction"][case]["w"])
    torch.testing.assert_close(ours_N * batch.loss_mask_N, theirs_N, atol=1e-6, rtol=0)


def test_with_the_current_policy_as_proximal_the_gradient_is_weighted_reinforce() -> None:
    """d/dlogπ of w · ppo(ρ = 1) is −w·A, with w = π/μ truncated and no gradient of its own."""
    batch = oracle_batch()
    config = AlgorithmConfig(
        proximal="current", aggregation="token-sum", correction=CorrectionConfig("tis", high=1.2)
    )
    logp_N = flat(ORACLE["inputs"]["log_prob"]).requires_grad_()
    total, metrics = Objective(config, 9)(batch, logp_N, torch.zeros_like(logp_N))
    (grad_N,) = torch.autograd.grad(total, logp_N)
    w_N = (logp_N.detach() - batch.behaviour_N).exp().clamp(max=1.2)
    torch.testing.assert_close(grad_N, -w_N * batch.advantages_N * batch.loss_mask_N)
    assert metrics.values()["share/rejected"] == 0


def test_a_correction_around_the_behaviour_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="proximal=current"):
        Config(algorithm=AlgorithmConfig(correction=CorrectionConfig("tis")))
