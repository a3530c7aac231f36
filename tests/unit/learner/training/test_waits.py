"""How often a learner's thread waits for its GPU, on a GPU that is not there (`gpu_without_values.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cuda_ops import CudaOps
from gpu_without_values import GPU, GpuWithoutValues
from learner_cases import random_group, small_config, tiny_model
from model_families import FAMILIES
from torch import Tensor

from asyncrl.config.schema import LearnerConfig, ModelConfig
from asyncrl.config.sections.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    KlLossConfig,
    TeacherLossConfig,
)
from asyncrl.learner.algorithms.losses.aggregation import AGGREGATIONS
from asyncrl.learner.algorithms.registry import CORRECTIONS, LOSSES
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.packing import bins
from asyncrl.learner.training import passes
from asyncrl.learner.training.objectives import OutcomeObjective, PolicyObjective, ValueObjective
from asyncrl.learner.training.passes import Objective
from asyncrl.learner.training.version_step import version_step

OBJECTIVES: dict[str, Objective] = {
    **{name: PolicyObjective(AlgorithmConfig(loss=name), 9) for name in LOSSES},  # type: ignore[arg-type]
    **{
        f"{kind} of a {level}": PolicyObjective(
            AlgorithmConfig(correction=CorrectionConfig(kind=kind, level=level)),  # type: ignore[arg-type]
            9,
        )
        for kind in CORRECTIONS
        for level in ("token", "sequence")
    },
    **{name: PolicyObjective(AlgorithmConfig(aggregation=name), 9) for name in AGGREGATIONS},  # type: ignore[arg-type]
    "terms": PolicyObjective(
        AlgorithmConfig(kl_loss=KlLossConfig(coef=0.1), entropy_bonus=0.1, lm_coef=0.1), 9
    ),
    "teacher": PolicyObjective(AlgorithmConfig(loss="none", teacher_loss=TeacherLossConfig(1.0, "topk")), 9),
    "critic": ValueObjective("critic", "values", "returns", 0.5),
    "reward model": OutcomeObjective(0.05),
}
READS = ("reference", "outcome", "values", "returns", "lm", "proximal")


def test_a_version_waits_for_the_gpu_at_its_end_alone(tmp_path: Path) -> None:
    """Not while micro-batches run: with several of them, in two claims, only the step reads values, the norm and the
    results of each claim."""
    config = small_config(
        tmp_path,
        model=tiny_model(tmp_path / "model", dtype="bfloat16"),
        learner=LearnerConfig(micro_batch_tokens=24),
        algorithm=AlgorithmConfig(),
    )
    with GpuWithoutValues() as gpu:
        backend = FsdpBackend(config, device=GPU)
        step = version_step(backend, config)
        gpu.waits.clear()
        for claim in range(2):
            step.add([random_group(2 * claim), random_group(2 * claim + 1)], version=0)
        assert gpu.waits == []
        step.step(version=0)
    assert len(gpu.waits) == 3, gpu.waits


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3", "gpt-oss"])
def test_no_router_waits_for_the_gpu(tmp_path: Path, family: str) -> None:
    """Nor do the experts behind it, whose rows depend on values, in forward and backward."""
    FAMILIES[family].save_config(tmp_path)
    model = ModelConfig(path=str(tmp_path), dtype="bfloat16")
    config = small_config(tmp_path, model=model, algorithm=AlgorithmConfig())
    with GpuWithoutValues() as gpu:
        backend = FsdpBackend(config, device=GPU)
        step = version_step(backend, config)
        gpu.waits.clear()
        step.add([random_group(0), random_group(1)], version=0)
    assert gpu.waits == []


def test_a_frozen_model_waits_for_the_gpu_once_a_micro_batch(tmp_path: Path) -> None:
    """For its log-probs, which the advantages read on the CPU."""
    config = small_config(
        tmp_path,
        model=tiny_model(tmp_path / "model", dtype="bfloat16"),
        learner=LearnerConfig(micro_batch_tokens=24),
        algorithm=AlgorithmConfig(kl_loss=KlLossConfig(coef=0.1)),
    )
    with GpuWithoutValues() as gpu:
        backend = FsdpBackend(config, models=["reference"], device=GPU)
        gpu.waits.clear()
        groups = [random_group(0), random_group(1)]
        version_step(backend, config).add(groups, version=0)
    claim = MicroBatch.of(groups)
    passes = bins(claim, range(claim.rollouts), config.learner.micro_batch_tokens, share=True)
    assert 1 < len(passes) == len(gpu.waits), gpu.waits


def outputs_of(name: str, tokens: int, device: torch.device | None = None) -> list[Tensor]:
    """Of the model of an objective."""
    shapes = [(tokens,), (tokens,), (tokens, 33)][: {"critic": 1, "teacher": 3}.get(name, 2)]
    return [torch.zeros(shape, device=device, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_objective_waits_for_the_gpu(name: str) -> None:
    batch = MicroBatch.of([random_group(0), random_group(1)])
    columns = {column: torch.zeros(batch.tokens) for column in READS}
    columns["teacher_likeliest"] = torch.zeros(batch.tokens, 33)
    selections = dict.fromkeys(("kept", "selected"), batch.loss_mask_N)
    whole = batch.with_columns(**columns, **selections)
    with GpuWithoutValues() as gpu:
        here = whole.to(GPU)
        outputs = outputs_of(name, batch.tokens, GPU)
        objective = OBJECTIVES[name]
        objective.total(here, *outputs, version=1).backward()
        padding = passes._padding([whole]).to(GPU)
        objective.total(padding, *outputs_of(name, 1, GPU), version=1)
    assert gpu.waits == []


@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_objective_calls_what_cuda_has(name: str) -> None:
    batch = MicroBatch.of([random_group(0), random_group(1)])
    columns = {column: torch.zeros(batch.tokens) for column in READS}
    columns["teacher_likeliest"] = torch.zeros(batch.tokens, 33)
    selections = dict.fromkeys(("kept", "selected"), batch.loss_mask_N)
    outputs = outputs_of(name, batch.tokens)
    with CudaOps() as ops:
        here = batch.with_columns(**columns, **selections)
        OBJECTIVES[name].total(here, *outputs, version=1).backward()
    assert ops.called


WAITING: dict[str, Callable[[Tensor], object]] = {
    "a value": lambda values: float(values.sum()),
    "a condition": lambda values: bool(values.any()),
    "a copy": lambda values: values.cpu(),
    "a copy to it": lambda values: values + torch.ones(3).to(GPU),
    "pageable memory": lambda values: values + torch.ones(3).to(GPU, non_blocking=True),
}
FAILING: dict[str, Callable[[Tensor], object]] = {
    "the CPU's tensor": lambda values: values + torch.ones(3),
    "nonzero": lambda values: torch.nonzero(values),
    "a mask": lambda values: values[values > 0],
}


@pytest.mark.parametrize("name", WAITING)
def test_a_wait_is_seen(name: str) -> None:
    with GpuWithoutValues() as gpu:
        WAITING[name](torch.zeros(3, device=GPU))
    assert len(gpu.waits) == 1


@pytest.mark.parametrize("name", FAILING)
def test_a_gpu_that_is_not_there_refuses(name: str) -> None:
    with GpuWithoutValues(), pytest.raises((AssertionError, RuntimeError)):
        FAILING[name](torch.zeros(3, device=GPU))
