"""Both ways through a version on two gloo processes, with models beside the policy: the same as on one. Gradients of a
model in half precision, summed over micro-batches and ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from learner_cases import random_group, small_config, tiny_model, without_counts
from parallel_cases import parts, together
from rank_processes import run_ranks
from torch import Tensor

from asyncrl.config.schema import Config, LearnerConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig, CorrectionConfig, KlLossConfig
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.training import requirements
from asyncrl.learner.training.version_step import version_step
from asyncrl.system.rank_process import end_rank

ALGORITHMS = {
    "streaming": AlgorithmConfig(kl_loss=KlLossConfig(coef=0.1)),
    "whole": AlgorithmConfig(advantage="gae", proximal="frozen", correction=CorrectionConfig(kind="tis")),
}

WAYS = {"micro_batch": 3, "step": 1}
"""`learner.reduce_gradients`, and how often ranks sum the gradient of a module for three micro-batches."""
SUMS = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
"""torch's function that sums gradients, which had another name before torch 2.13."""
MODULES = 3
"""Two decoder layers and the rest."""


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
        a, b, c = (random_group(3 * version + i, version=version, segments=3 - i) for i in range(3))
        claims = [[[a], [c]], [[b], []]] if backend.world == 2 else [[[a, b, c]]]
        for groups in claims[backend.rank]:
            step.add(groups, version)
        rows.append(without_counts(step.step(version).values))
    return rows


def half(folder: Path, way: str) -> FsdpBackend:
    learner = LearnerConfig(reduce_gradients=way)  # type: ignore[arg-type]
    return FsdpBackend(
        small_config(folder, model=tiny_model(folder / "half", tied=False, dtype="bfloat16"), learner=learner)
    )


def add(backend: FsdpBackend, *ordinals: int) -> None:
    """The gradients of one micro-batch for each."""
    batches = [MicroBatch.of([random_group(ordinal)]) for ordinal in ordinals]
    backend.policy.accumulate(batches, lambda _, logp_N, entropy_N: (0.3 * entropy_N - logp_N).sum())


def gradients(backend: FsdpBackend) -> Any:
    masters = backend.policy._masters.tensors
    return parts({name: master.grad for name, master in masters.items() if master.grad is not None})


def reduced(folder: Path, way: str) -> dict[str, Any]:
    """The gradients of three micro-batches of each rank, in two claims, the number of sums over ranks, and the norm.
    Other gradients were dropped before."""
    backend = half(folder, way)
    add(backend, 50 + backend.rank)
    backend.policy.forget_gradients()
    with mock.patch.object(dist, SUMS, wraps=getattr(dist, SUMS)) as sums:
        add(backend, 3 * backend.rank, 3 * backend.rank + 1)
        add(backend, 3 * backend.rank + 2)
        norm = backend.policy.gradient_norm(1.0)
    return {"gradients": gradients(backend), "sums": sums.call_count, "norm": norm}


def rank_main(folder: Path) -> None:
    halves = {way: reduced(folder, way) for way in WAYS}
    torch.save(halves, folder / f"half{os.environ['RANK']}")
    says = {name: trained(config_of(folder, name)) for name in ALGORITHMS}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(says))
    end_rank()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    tiny_model(folder / "model")
    tiny_model(folder / "half", tied=False, dtype="bfloat16")
    run_ranks("test_two_ranks:rank_main", folder)
    return folder


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_ranks_measure_and_train_what_one_does(two_ranks: Path, name: str) -> None:
    """What the second version measures depends on what the first one did to every model."""
    alone = trained(config_of(two_ranks, name))
    assert len(alone) == 2
    assert ("train/critic/grad_norm" in alone[0]) == (name == "whole")
    for rank in range(2):
        theirs = json.loads((two_ranks / f"rank{rank}.json").read_text())[name]
        for row, mine in zip(theirs, alone, strict=True):
            assert row == pytest.approx(mine, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_half_precision_are_summed_in_float32(two_ranks: Path, way: str) -> None:
    """Over ranks and micro-batches: a single process with one micro-batch has no sum at all."""
    ranks = [torch.load(two_ranks / f"half{rank}", weights_only=False)[way] for rank in range(2)]
    found = together([rank["gradients"] for rank in ranks])
    alone, expected = half(two_ranks, way), dict[str, Tensor]()
    for ordinal in range(6):
        add(alone, ordinal)
        for name, gradient in together([gradients(alone)]).items():
            expected[name] = expected.get(name, 0) + gradient
        alone.policy.forget_gradients()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=2e-6 * float(gradient.abs().max()), rtol=1e-6)
    norm = float(torch.stack([gradient.square().sum() for gradient in expected.values()]).sum().sqrt())
    assert [rank["norm"] for rank in ranks] == pytest.approx([norm] * 2, rel=1e-5)
    assert [rank["sums"] for rank in ranks] == [MODULES * WAYS[way]] * 2
