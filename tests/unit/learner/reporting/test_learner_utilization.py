"""What training costs, and the health figures of a row, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from learner_cases import rollout, small_config, tiny_model
from transformers import Qwen3MoeConfig

from asyncrl.config.schema import LearnerConfig, ModelConfig
from asyncrl.device import accelerator
from asyncrl.device.meter import GpuTotals
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.reporting import utilization
from asyncrl.learner.reporting.batch_metrics import age_metrics
from asyncrl.learner.reporting.utilization import (
    PASSED,
    PASSED_SQUARES,
    TrainingFlops,
    Utilization,
    measured_peak_flops,
    squares,
)
from asyncrl.types import Group, Sampling, Task

# Of tiny_model: q, o 32·32; k, v 32·16; three of 32·64; biases, norms; two layers; the last norm.
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + (32 + 16 + 16) + 2 * 32
BODY, TABLE = 2 * LAYER + 32, 33 * 32


@pytest.mark.parametrize("tied", [True, False])
def test_a_token_meets_every_weight_but_an_untied_table(tmp_path: Path, tied: bool) -> None:
    work = TrainingFlops.of(tiny_model(tmp_path, tied=tied))
    assert work == TrainingFlops(BODY + TABLE, attention=2 * 4 * 8)
    assert work.flops(10, 100) == 6 * (BODY + TABLE) * 10 + 6 * 64 * 100
    assert work.even_tokens == (BODY + TABLE) / 64


def test_a_token_meets_only_its_experts(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16}

    def work(**more: int) -> TrainingFlops:
        Qwen3MoeConfig(vocab_size=12, head_dim=4, **(sizes | experts | more)).save_pretrained(tmp_path)
        return TrainingFlops.of(ModelConfig(path=str(tmp_path)))

    one_expert = 3 * 8 * 16
    assert work(num_experts_per_tok=3).weights - work().weights == 2 * one_expert


def test_the_health_of_a_version(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    config = small_config(tmp_path, learner=LearnerConfig(peak_tflops=1e-3))
    health = Utilization(config)
    assert health.peak_flops == 1e9
    health.training_flops = TrainingFlops(weights=1000, attention=10)
    metrics = {
        "train/tokens_with_prompts": 800.0,
        "train/rollouts": 40.0,
        PASSED: 500.0,
        PASSED_SQUARES: 5000.0,
    }
    seconds = {"compute/forward_backward": 1.0, "wait/groups": 0.75, "wait/ranks": 0.25}
    readings = [[1 << 30, 0.0, 0.0, 0.0], [3 << 30, 0.0, 0.0, 0.0]]
    assert health.values(metrics, seconds, readings) == pytest.approx(
        {
            "perf/learner/tokens_per_s": 400,
            "perf/learner/samples_per_s": 20,
            "perf/learner/mfu": 6 * (1000 * 500 + 10 * 5000) / (2.0 * 1e9 * 2),
            "perf/learner/memory_gib": 3.0,
            "perf/wait_fraction/groups": 0.375,
            "perf/wait_fraction/ranks": 0.125,
        }
    )
    assert health.values(metrics, {}, readings) == {}
    measured = [[1, 4.0, 3.0, 1000.0], [1, 4.0, 1.0, 600.0]]
    found = health.values(metrics, seconds, measured)
    assert (found["perf/learner/gpu_busy"], found["perf/learner/gpu_watts"]) == (0.5, 200.0)


def test_a_reading_has_the_gpu_time_since_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model(tmp_path / "model")
    meter = SimpleNamespace(totals=GpuTotals(2.0, 1.0, 100.0))
    monkeypatch.setattr(utilization, "measured", lambda devices: meter)
    health = Utilization(small_config(tmp_path, learner=LearnerConfig(peak_tflops=1.0)))
    assert health.reading()[1:] == [2.0, 1.0, 100.0]
    meter.totals = GpuTotals(5.0, 3.5, 1000.0)
    assert health.reading()[1:] == [3.0, 2.5, 900.0]


def test_a_processor_has_a_speed_and_a_peak_of_memory() -> None:
    cpu = torch.device("cpu")
    assert measured_peak_flops(cpu, torch.float32) > 1e8
    before = accelerator.peak_memory_bytes(cpu)
    assert accelerator.peak_memory_bytes(cpu) >= before > 10 << 20


def test_metrics_are_split_by_the_age_of_tokens() -> None:
    """One rollout with tokens of ages 0, 1, 3, 2 and 5 at version 9; log μ is -1."""
    made = rollout([1, 2, 3, 4, 5, 6], 1)
    made.versions[1:] = [9, 8, 6, 7, 4]
    batch = MicroBatch.of([Group.from_rollouts(Task(0, ""), Sampling(), [made])])
    logp_N = torch.tensor([0.0, -1.0, -1.5, -2.0, -1.0, 1.0])
    clipped_N = torch.tensor([True, False, True, True, False, False])
    assert age_metrics(batch, logp_N, clipped_N, version=9).values() == {
        "train/age/0/log_ratio": 0.0,
        "train/age/0/clip_fraction": 0.0,
        "train/age/1/log_ratio": -0.5,
        "train/age/1/clip_fraction": 1.0,
        "train/age/2-3/log_ratio": -0.5,
        "train/age/2-3/clip_fraction": 0.5,
        "train/age/4-7/log_ratio": 2.0,
        "train/age/4-7/clip_fraction": 0.0,
    }
    nobody = dataclasses.replace(batch, loss_mask_N=torch.zeros(6, dtype=torch.bool))
    assert age_metrics(nobody, logp_N, clipped_N, version=9).values() == {}


def test_lengths_squared() -> None:
    assert squares([3, 4]) == 25
