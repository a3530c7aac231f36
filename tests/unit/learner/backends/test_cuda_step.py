"""A version's step and its checkpoint call only operators that CUDA has for their dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_ops import CudaOps
from learner_cases import random_group, small_config, tiny_model

from asyncrl.config.schema import LearnerConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.training.version_step import version_step


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_step_and_its_checkpoint_run_on_cuda(tmp_path: Path, dtype: str) -> None:
    config = small_config(
        tmp_path,
        model=tiny_model(tmp_path / "model", dtype=dtype),
        learner=LearnerConfig(micro_batch_tokens=64),
        algorithm=AlgorithmConfig(proximal="frozen"),
    )
    backend = FsdpBackend(config)
    with CudaOps() as ops:
        way = version_step(backend, config)
        way.add([random_group(0), random_group(1)], 0)
        way.add([], 0)
        report = way.step(0)
        backend.save(tmp_path / "saved")
    assert report.values["grad_norm"] > 0
    assert {"aten::mm", "aten::embedding_dense_backward", "aten::_fused_adamw_"} <= set(ops.called)
    backend.close()
