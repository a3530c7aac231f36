"""Utilization of the learner's devices, on each row of the metrics.

perf/learner/tokens_per_s, perf/learner/samples_per_s    of the version's rollouts, prompts included, by the wall clock
perf/learner/mfu           model FLOPs utilisation: the policy's training passes (`TrainingFlops`) over the peak of the
                           devices (PaLM, arXiv:2204.02311, appendix B). Passes without gradient, critics and reward
                           models are not counted
perf/learner/memory_gib    the most that a rank has needed: on a GPU within the version, on a CPU so far
perf/learner/gpu_busy, perf/learner/gpu_watts            of the ranks' GPUs, where `device/meter.py` measures them
perf/wait_fraction/…       shares of the version's time, by the kind of wait
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch

from asyncrl.config.schema import Config, ModelConfig
from asyncrl.device import accelerator
from asyncrl.device.meter import GpuTotals, measured
from asyncrl.errors import ConfigError
from asyncrl.learner.parallel.mesh import ModelShape
from asyncrl.models.loading import auto_class, load_model_config, towers
from asyncrl.telemetry.spans import WAIT

PASSED, PASSED_SQUARES = "perf/learner/passed_tokens", "perf/learner/passed_squares"
"""Tokens that the policy's training passes compute, shared prompts once; and their segments' lengths squared, less
those of repeated prompts."""

GIB = 1 << 30

SIZE_ON_CPU, SIZE_ON_ACCELERATOR = 768, 8192
"""Sizes of the square matrices whose product is timed: about 20 ms of one core, 2 ms of an H100."""

ROUNDS = 5


class Utilization:
    """Utilization of one rank. Its peak is measured here, in 100 ms, unless `learner.peak_tflops` is set."""

    def __init__(self, config: Config) -> None:
        self._device = accelerator.current_device()
        self._gpus = measured([self._device.index or 0])
        self._counted = GpuTotals()
        self.training_flops = TrainingFlops.of(config.model)
        tflops = config.learner.peak_tflops
        self.peak_flops = (
            tflops * 1e12 if tflops else measured_peak_flops(self._device, getattr(torch, config.model.dtype))
        )

    def reading(self) -> list[float]:
        """For `values`: [bytes of `accelerator.peak_memory_bytes`, *`GpuTotals` since the last reading]."""
        now = self._gpus.totals if self._gpus is not None else GpuTotals()
        before, self._counted = self._counted, now
        return [accelerator.peak_memory_bytes(self._device), *astuple(now.since(before))]

    def values(
        self, metrics: Mapping[str, float], seconds: Mapping[str, float], readings: Sequence[Sequence[float]]
    ) -> dict[str, float]:
        """Metrics of one version, from its `metrics` over all ranks, this rank's seconds by span, and the reading of
        each rank."""
        step_s = sum(seconds.values())
        if step_s <= 0:
            return {}
        flops = self.training_flops.flops(metrics.get(PASSED, 0.0), metrics.get(PASSED_SQUARES, 0.0))
        waits = {
            f"perf/wait_fraction/{name.removeprefix(WAIT)}": s / step_s
            for name, s in seconds.items()
            if name.startswith(WAIT)
        }
        gpus = sum((GpuTotals(*totals) for _, *totals in readings), GpuTotals())
        return {
            "perf/learner/tokens_per_s": metrics.get("train/tokens_with_prompts", 0.0) / step_s,
            "perf/learner/samples_per_s": metrics.get("train/rollouts", 0.0) / step_s,
            "perf/learner/mfu": flops / (step_s * self.peak_flops * len(readings)),
            "perf/learner/memory_gib": max(memory for memory, *_ in readings) / GIB,
            **{f"perf/learner/{name}": value for name, value in gpus.figures().items()},
            **waits,
        }


@dataclass(frozen=True, slots=True)
class TrainingFlops:
    """Floating-point operations of training, from the shape of the model alone.

        6 · N · tokens         every weight that a token meets: a product and a sum forward, twice that backward
        6 · A · Σ length²      causal attention, A = layers · heads · head size: scores and sums over half of length²
                               pairs

    Kaplan et al. 2020 (arXiv:2001.08361), section 2.1, and PaLM (arXiv:2204.02311), appendix B, which counts attention
    without the mask and so has twice the second term. Recomputation under activation checkpointing is not counted:
    these are the operations that the model needs, not those that the device does.

    weights: N, those that a token meets, with chosen experts alone, without a token table that is not the head too, and
    without a vision tower, which sees images alone · attention: A
    """

    weights: int
    attention: int

    @staticmethod
    def of(model: ModelConfig) -> TrainingFlops:
        """Without loading weights. Raises ConfigError as `load_model_config` does."""
        config = load_model_config(model)
        with torch.device("meta"):
            network = auto_class(config).from_config(config, trust_remote_code=model.trust_remote_code)
        of_towers = {id(parameter) for tower in towers(network) for parameter in tower.parameters()}
        text = config.get_text_config()
        experts = ModelShape.of(config).experts
        chosen = text.num_experts_per_tok / experts if experts else 1.0
        weights = sum(
            parameter.numel() * (chosen if ".experts." in name else 1.0)
            for name, parameter in network.named_parameters()
            if id(parameter) not in of_towers
        )
        table, head = network.get_input_embeddings(), network.get_output_embeddings()
        if head is not None and head.weight is not table.weight:
            weights -= table.weight.numel()
        head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return TrainingFlops(round(weights), text.num_hidden_layers * text.num_attention_heads * head_size)

    def flops(self, tokens: float, squares: float) -> float:
        """Operations of forward and backward over rollouts with `tokens` in all. squares: the sum of their squared
        lengths."""
        return 6.0 * (self.weights * tokens + self.attention * squares)

    @property
    def even_tokens(self) -> float:
        """The length at which attention costs as much as all the rest."""
        return self.weights / self.attention


def squares(lengths: Iterable[int]) -> int:
    """The sum of the squared lengths."""
    return sum(length * length for length in lengths)


def even_tokens(model: ModelConfig) -> float:
    """`TrainingFlops.even_tokens`; infinite for a model that only its backend can load: rollouts cost their tokens."""
    try:
        return TrainingFlops.of(model).even_tokens
    except ConfigError:
        return math.inf


def measured_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of the best of a few products of large square matrices, with the threads of this process."""
    size = SIZE_ON_ACCELERATOR if accelerator.is_accelerator(device) else SIZE_ON_CPU
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(ROUNDS):
        accelerator.wait_for_device(device)
        begun = time.perf_counter()
        left @ right
        accelerator.wait_for_device(device)
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best
