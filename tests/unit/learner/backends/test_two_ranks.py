"""Both ways through a version on two gloo processes, with models beside the policy: the same as on one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from learner_cases import random_group, small_config, tiny_model
from rank_processes import run_ranks

from asyncrl.config.schema import Config, LearnerConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig, CorrectionConfig, KlLossConfig
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.training import requirements
from asyncrl.learner.training.version_step import version_step
from asyncrl.system.rank_process import end_rank

ALGORITHMS = {
    "streaming": AlgorithmConfig(kl_loss=KlLossConfig(coef=0.1)),
    "whole": AlgorithmConfig(advantage="gae", proximal="frozen", correction=CorrectionConfig(kind="tis")),
}


def config_of(folder: Path, name: str) -> Config:
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=1)
    steps = {"mini_batches": 2, "epochs": 2} if name == "whole" else {}
    learner = LearnerConfig(micro_batch_tokens=64, optimizer=optimizer, **steps)
    return small_config(folder, learner=learner, algorithm=ALGORITHMS[name])


def trained(config: Config) -> list[dict[str, float]]:
    """The metrics of two versions of three groups each; the second of two ranks has one of them, in the first claim."""
    backend = FsdpBackend(config, requirements.models(config))
    step, rows = version_step(backend, config), []
    for version in range(2):
        a, b, c = (random_group(3 * version + i, version=version) for i in range(3))
        claims = [[[a], [c]], [[b], []]] if backend.world == 2 else [[[a, b, c]]]
        for groups in claims[backend.rank]:
            step.add(groups, version)
        rows.append(dict(step.step(version).values))
    return rows


def rank_main(folder: Path) -> None:
    says = {name: trained(config_of(folder, name)) for name in ALGORITHMS}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(says))
    end_rank()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    tiny_model(folder / "model")
    run_ranks("test_two_ranks:rank_main", folder)
    return folder


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_ranks_measure_and_train_what_one_does(two_ranks: Path, name: str) -> None:
    """What the second version measures depends on what the first one did to every model."""
    alone = trained(config_of(two_ranks, name))
    assert len(alone) == 2
    assert ("critic/grad_norm" in alone[0]) == (name == "whole")
    for rank in range(2):
        theirs = json.loads((two_ranks / f"rank{rank}.json").read_text())[name]
        for row, mine in zip(theirs, alone, strict=True):
            assert row == pytest.approx(mine, rel=1e-3, abs=1e-5)
