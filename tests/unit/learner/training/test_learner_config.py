"""What a configuration asks of the learner, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from learner_cases import small_config

from asyncrl.config.schema import (
    Config,
    CriticConfig,
    LearnerConfig,
    ReferenceConfig,
    RewardConfig,
    RewardModelConfig,
    TeacherConfig,
)
from asyncrl.config.sections.algorithm import AlgorithmConfig, KlLossConfig, ShapingConfig
from asyncrl.config.sections.learner import ParallelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.training import requirements

SAFE, DISTILL = AlgorithmConfig(advantage="safe_rlhf"), AlgorithmConfig(advantage="distill")


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"algorithm": DISTILL}, "teacher.path"),
        ({"algorithm": SAFE}, "reward.weights"),
        ({"learner": LearnerConfig(mini_batches=3)}, "learner.mini_batches"),  # of two groups
        ({"critic": CriticConfig(warmup_versions=3)}, "critic.warmup_versions"),  # of three versions
    ],
)
def test_what_cannot_work_is_refused(sections: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        small_config(Path("nowhere"), **sections)
    assert error.value.key == key
    assert error.value.remedy


@pytest.mark.parametrize(
    ("learner", "key"),
    [
        ({"compile": True, "parallel": ParallelConfig(tensor=2)}, "compile"),
        ({"compile": True, "backend": "megatron"}, "compile"),
        ({"offload": "optimizer", "backend": "megatron"}, "offload"),
        ({"offload": "disk", "offload_folder": ".", "backend": "megatron"}, "offload"),
    ],
)
def test_what_a_backend_cannot_do_is_refused(learner: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config(learner=LearnerConfig(**learner))
    assert error.value.key == f"learner.{key}"


def test_values_of_models_are_within_their_limits() -> None:
    for wrong in (CriticConfig(warmup_versions=-1), CriticConfig(clip=0.0)):
        with pytest.raises(ConfigError, match="critic"):
            Config(critic=wrong)
    with pytest.raises(ConfigError, match=r"reference\.update_every"):
        Config(reference=ReferenceConfig(update_every=0))


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"critic": CriticConfig(path="there")}, "critic.path"),
        ({"critic": CriticConfig(warmup_versions=1)}, "critic.warmup_versions"),
        ({"reference": ReferenceConfig(path="there")}, "reference.path"),
        ({"reference": ReferenceConfig(update_every=1)}, "reference.update_every"),
        ({"reward_model": RewardModelConfig(path="there")}, "reward_model.path"),
        ({"teacher": TeacherConfig(path="there")}, "teacher.path"),
    ],
)
def test_settings_of_a_model_that_nothing_asks_for(sections: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        requirements.check(small_config(Path("nowhere"), **sections))
    assert error.value.key == key
    users = {
        "critic": AlgorithmConfig(advantage="gae"),
        "reference": AlgorithmConfig(kl_loss=KlLossConfig(coef=0.1)),
        "reward_model": AlgorithmConfig(advantage="prime"),
        "teacher": DISTILL,
    }
    requirements.check(small_config(Path("nowhere"), algorithm=users[key.partition(".")[0]], **sections))


def test_models_that_stand_beside_the_policy() -> None:
    def models(**sections: Any) -> frozenset[str]:
        return requirements.models(small_config(Path("nowhere"), **sections))

    assert models() == set()
    assert models(algorithm=AlgorithmConfig(kl_loss=KlLossConfig(coef=0.1))) == {"reference"}
    assert models(algorithm=AlgorithmConfig(advantage="gae")) == {"critic"}
    assert models(algorithm=DISTILL, teacher=TeacherConfig(path="there")) == {"teacher"}
    shaped = AlgorithmConfig(advantage="prime", shaping=ShapingConfig(kl_coef=0.1))
    assert models(algorithm=shaped) == {"reference", "reward_model"}
    assert models(algorithm=SAFE, reward=RewardConfig(weights={"cost": 0})) == {"critic", "cost_critic"}


@pytest.mark.parametrize(
    ("algorithm", "mini_batches", "whole", "extra_pass"),
    [
        (AlgorithmConfig(), 1, False, False),
        (AlgorithmConfig(), 2, True, False),
        (AlgorithmConfig(proximal="frozen"), 1, False, False),
        (AlgorithmConfig(proximal="frozen"), 2, True, True),
        (AlgorithmConfig(proximal="loglinear"), 2, True, False),
        (AlgorithmConfig(advantage="gae", proximal="frozen"), 1, True, False),
        (AlgorithmConfig(loss="clip_cov"), 1, True, True),
        (AlgorithmConfig(lm_coef=0.1), 1, True, False),
    ],
)
def test_which_way_through_a_version(
    algorithm: AlgorithmConfig, mini_batches: int, whole: bool, extra_pass: bool
) -> None:
    config = small_config(
        Path("nowhere"), algorithm=algorithm, learner=LearnerConfig(mini_batches=mini_batches)
    )
    assert requirements.whole_batch(config) == whole
    assert requirements.proximal_pass(config) == extra_pass
    assert requirements.steps_per_version(config) == mini_batches
