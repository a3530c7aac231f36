"""A version's step and its checkpoint on a GPU, without one: only operators that CUDA has for their dtypes, a host that
waits as often as is written here, and the loss and gradient that a CPU gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_ops import CudaOps
from learner_cases import random_group, small_config, tiny_model
from pretended_gpu import GPU, GpuTensor, PretendedGpu
from step_cases import EACH_STEP, MODELS, STEPS

from asyncrl.config.schema import LearnerConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.roles import POLICY
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.packing import bins
from asyncrl.learner.models.networks import counts_prompts_once
from asyncrl.learner.training.version_step import version_step

TOWER_WAITS = 16
"""The most of a pass that shows images: transformers' towers read the sizes of these, and Qwen3-VL's layers the mask of
the tokens that stand for them."""


@pytest.mark.parametrize("name", EACH_STEP)
def test_a_step_and_its_checkpoint_run_on_cuda(tmp_path: Path, name: str) -> None:
    config = STEPS[name].config(tmp_path)
    backend, groups = FsdpBackend(config), STEPS[name].groups(config)
    with CudaOps() as ops:
        way = version_step(backend, config)
        way.add(groups, 0)
        way.add([], 0)
        report = way.step(0)
        backend.save(tmp_path / "saved")
    assert report.values["train/grad_norm"] > 0
    assert {"aten::mm", "aten::_fused_adamw_"} <= set(ops.called)
    backend.close()


@pytest.mark.slow
def test_a_step_in_float32_runs_on_cuda(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        model=tiny_model(tmp_path / "model"),
        learner=LearnerConfig(micro_batch_tokens=64),
        algorithm=AlgorithmConfig(proximal="frozen"),
    )
    backend = FsdpBackend(config)
    with CudaOps() as ops:
        way = version_step(backend, config)
        way.add([random_group(0), random_group(1)], 0)
        report = way.step(0)
    assert report.values["train/grad_norm"] > 0
    assert "aten::embedding_dense_backward" in ops.called
    backend.close()


@pytest.mark.parametrize("name", EACH_STEP)
def test_a_step_on_a_gpu_measures_what_a_cpus_does(tmp_path: Path, name: str) -> None:
    config = STEPS[name].config(tmp_path)
    groups = STEPS[name].groups(config)
    way = version_step(FsdpBackend(config), config)
    way.add(groups, 0)
    expected = way.step(0).values
    with PretendedGpu() as gpu:
        backend = FsdpBackend(config, device=GPU)
        way = version_step(backend, config)
        gpu.waits.clear()
        way.add(groups, 0)
        added = [*gpu.waits]
        found = way.step(0).values
    batch = MicroBatch.of(groups)
    shares = counts_prompts_once(POLICY, config)
    passes = len(bins(batch, range(batch.rollouts), config.learner.micro_batch_tokens, shares))
    assert len(added) <= (TOWER_WAITS * passes if STEPS[name].family in MODELS else 0), added
    assert len(gpu.waits) - len(added) == 2, gpu.waits  # the norm, and the results
    assert all(isinstance(tensor, GpuTensor) for tensor in backend.local_tensors().values())
    assert "train/grad_norm" in found
    assert found == pytest.approx(expected, rel=0.02, abs=1e-3, nan_ok=True)
