"""What a supervised warm-up keeps of a configuration that was written for a run."""

from __future__ import annotations

from pathlib import Path

from learner_cases import small_config

from asyncrl.config.schema import CriticConfig, RunConfig, SftConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.sft import as_supervised


def test_a_critic_that_warms_up_longer_than_the_warm_up_lasts() -> None:
    config = small_config(
        Path("nowhere"),
        run=RunConfig(versions=100),
        algorithm=AlgorithmConfig(advantage="vapo"),
        critic=CriticConfig(warmup_versions=50),
        sft=SftConfig(steps=20),
    )
    supervised = as_supervised(config)
    assert supervised.run.versions == 20
    assert supervised.critic == CriticConfig()
