"""Losses and corrections whose policies would be the same by construction are refused before a run starts."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config.rules import check_section
from asyncrl.config.schema import BatchConfig, Config, LearnerConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig, CorrectionConfig, KlLossConfig, ShapingConfig
from asyncrl.errors import ConfigError


def config(mini_batches: int = 1, **keys: Any) -> Config:
    return Config(learner=LearnerConfig(mini_batches=mini_batches), algorithm=AlgorithmConfig(**keys))


SPPO: dict[str, Any] = {"loss": "sppo", "proximal": "frozen", "aggregation": "seq-mean-token-sum"}

OFF_POLICY: dict[str, Any] = {"advantage": "off_policy_baseline"}
REJECT_FIRST: dict[str, Any] = {"reject": "seq_mean_k1", "reject_first": True}


@pytest.mark.parametrize(
    ("keys", "key", "remedy"),
    [
        ({"correction": CorrectionConfig("tis")}, "algorithm.correction.kind", "proximal=frozen"),
        ({"correction": CorrectionConfig(reject="m2po")}, "algorithm.correction.reject", "proximal=frozen"),
        (
            {**OFF_POLICY, "proximal": "frozen", "correction": CorrectionConfig(**REJECT_FIRST)},
            "algorithm.correction.reject_first",
            "reject_first=false",
        ),
        (
            {"advantage": "off_policy_step_baseline", "truncated": "weigh"},
            "algorithm.truncated",
            "algorithm.truncated=refuse",
        ),
        ({"loss": "decoupled_ppo"}, "algorithm.proximal", "proximal=loglinear"),
        ({"loss": "decoupled_ppo", "proximal": "frozen"}, "algorithm.proximal", "mini_batches=4"),
        ({"loss": "kl_cov", "proximal": "frozen"}, "algorithm.proximal", "mini_batches=4"),
        (
            {"loss": "aipo", "proximal": "frozen", "correction": CorrectionConfig("tis")},
            "algorithm.correction.kind",
            "kind=none",
        ),
        ({"loss": "sppo", "aggregation": "seq-mean-token-sum"}, "algorithm.proximal", "proximal=frozen"),
        ({**SPPO, "advantage": "grpo"}, "algorithm.advantage", "advantage=sppo"),
        ({"advantage": "sppo"}, "algorithm.loss", "loss=sppo"),
        (
            {
                "mini_batches": 2,
                "proximal": "loglinear",
                "correction": CorrectionConfig("tis", normalise=True),
            },
            "algorithm.correction.normalise",
            "proximal=frozen",
        ),
        (
            {"loss": "sppo", "proximal": "frozen"},
            "algorithm.aggregation",
            "aggregation=seq-mean-token-sum",
        ),
    ],
)
def test_refused_with_a_remedy(keys: dict[str, Any], key: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**keys)
    assert caught.value.key == key
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("section", "keys", "key"),
    [
        (CorrectionConfig, {"kind": "icepop", "low": 3.0}, "algorithm.correction.low"),
        (CorrectionConfig, {"reject": "token_k1", "reject_high": 0.5}, "algorithm.correction.reject_low"),
        (CorrectionConfig, {"reject": "seq_max_k1", "reject_low": 0.0}, "algorithm.correction.reject_low"),
        (CorrectionConfig, {"reject_first": True}, "algorithm.correction.reject_first"),
        *(
            (CorrectionConfig, {"reject": reject, "also_reject": also}, "algorithm.correction.also_reject")
            for reject, also in (
                ("none", {"token_k2": 1.0}),
                ("token_k2", {"token_k2": 1.0}),
                ("token_k2", {"none": 1.0}),
                ("token_k2", {"token_k9": 1.0}),
                ("token_k2", {"token_k3": 0.0}),
                ("token_k2", {"token_k1": 0.5}),
            )
        ),
        (CorrectionConfig, {"normalise": True}, "algorithm.correction.normalise"),
        (AlgorithmConfig, {"dual_clip": 1.0}, "algorithm.dual_clip"),
        (AlgorithmConfig, {"sapo_tau": (1.0, 0.0)}, "algorithm.sapo_tau"),
        (AlgorithmConfig, {"weight_cap": 0.0}, "algorithm.weight_cap"),
        (AlgorithmConfig, {"lm_coef": -0.1}, "algorithm.lm_coef"),
        (AlgorithmConfig, {"norm_tokens": -1}, "algorithm.norm_tokens"),
        (AlgorithmConfig, {"loss": "none"}, "algorithm.loss"),
        (AlgorithmConfig, {**OFF_POLICY, "truncated": "weigh"}, "algorithm.truncated"),
        (KlLossConfig, {"coef": -1.0}, "algorithm.kl_loss.coef"),
        (ShapingConfig, {"overlong_penalty": -1.0}, "algorithm.shaping.overlong_penalty"),
    ],
)
def test_a_value_that_makes_no_sense(section: type, keys: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_section(section(**keys), key.rpartition(".")[0])
    assert caught.value.key == key


def test_taken() -> None:
    config(loss="decoupled_ppo", proximal="loglinear")
    config(loss="decoupled_ppo", proximal="frozen", mini_batches=2)
    config(loss="aipo")
    config(loss="kl_cov")
    config(**SPPO, advantage="sppo")
    config(proximal="frozen", correction=CorrectionConfig(reject="m2po", reject_high=0.04))


def test_an_own_function_is_not_judged_by_the_literal_that_it_replaces() -> None:
    """Each of these is refused without it."""
    weighed = {"proximal": "frozen", "correction": CorrectionConfig("tis")}
    config(loss="aipo", own_loss="my:loss", **weighed)
    config(loss="decoupled_ppo", own_loss="my:loss")
    config(loss="sppo", own_loss="my:loss")
    config(advantage="sppo", own_loss="my:loss")
    config(**SPPO, own_advantage="my:advantage")
    config(advantage="distill", own_advantage="my:advantage", filter="no_spread")
    config(**OFF_POLICY, own_advantage="my:advantage", truncated="weigh")
    config(advantage="gdpo", own_advantage="my:advantage", shaping=ShapingConfig(kl_coef=0.1))
    config(advantage="safe_rlhf", own_advantage="my:advantage")
    own = AlgorithmConfig(own_advantage="my:advantage")
    assert Config(batch=BatchConfig(group_size=1), algorithm=own).algorithm.built_in_advantage is None
