"""Utilization of the learner's devices, on each row of the metrics.

learner/tokens_per_s, learner/samples_per_s    of the version's rollouts, prompts included, by the wall clock
learner/mfu           model FLOPs utilisation: the policy's training passes (flops.py) over the peak of the devices
                      (PaLM, arXiv:2204.02311, appendix B). Passes without gradient, critics and reward models are
                      not counted
learner/memory_gib    the most that a rank has needed: on a GPU within the version, on a CPU so far
share/wait/…          shares of the version's time, by the kind of wait
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from asyncrl.config.schema import Config
from asyncrl.learner.reporting.device import measured_peak_flops, peak_memory_bytes, this_device
from asyncrl.learner.reporting.flops import TrainingFlops
from asyncrl.telemetry.spans import WAIT

PASSED, PASSED_SQUARES = "passed/tokens", "passed/squares"
"""Tokens that the policy was trained on, counted with every pass over them, and their rollouts' lengths squared."""

GIB = 1 << 30


class Utilization:
    """Utilization of one rank. Its peak is measured here, in 100 ms, unless `learner.peak_tflops` is set."""

    def __init__(self, config: Config) -> None:
        self._device = this_device()
        self.training_flops = TrainingFlops.of(config.model)
        tflops = config.learner.peak_tflops
        self.peak_flops = (
            tflops * 1e12 if tflops else measured_peak_flops(self._device, getattr(torch, config.model.dtype))
        )

    def memory(self) -> int:
        """Bytes, see `peak_memory_bytes`."""
        return peak_memory_bytes(self._device)

    def values(
        self, metrics: Mapping[str, float], seconds: Mapping[str, float], memory: Sequence[int]
    ) -> dict[str, float]:
        """Metrics of one version.

        Args:
            metrics: Of the version, over all ranks.
            seconds: This rank's seconds by span.
            memory: Bytes of each rank.
        """
        step_s = sum(seconds.values())
        if step_s <= 0:
            return {}
        flops = self.training_flops.flops(metrics.get(PASSED, 0.0), metrics.get(PASSED_SQUARES, 0.0))
        waits = {f"share/{name}": s / step_s for name, s in seconds.items() if name.startswith(WAIT)}
        return {
            "learner/tokens_per_s": metrics.get("tokens_with_prompts", 0.0) / step_s,
            "learner/samples_per_s": metrics.get("rollouts", 0.0) / step_s,
            "learner/mfu": flops / (step_s * self.peak_flops * len(memory)),
            "learner/memory_gib": max(memory) / GIB,
            **waits,
        }
