"""The busy share and the power of GPUs as their driver measures them: NVML on NVIDIA's, AMD SMI on AMD's.

    a thread ─▸ twice a second: torch.cuda.utilization and power_draw of each GPU ─▸ totals

A GPU counts as busy while any kernel runs, however small, and whoever started it. So the share is an upper bound of
its use, where `perf/learner/mfu` is a lower one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from operator import add, sub

import torch

from asyncrl.device import accelerator

log = logging.getLogger(__name__)

EVERY_S = 0.5
"""NVML averages over at most a second."""


@dataclass(frozen=True, slots=True)
class GpuTotals:
    """Sums over GPUs since the meter began: seconds, busy seconds, joules."""

    seconds: float = 0.0
    busy_s: float = 0.0
    joules: float = 0.0

    def since(self, before: GpuTotals) -> GpuTotals:
        return GpuTotals(*map(sub, astuple(self), astuple(before)))

    def __add__(self, other: GpuTotals) -> GpuTotals:
        return GpuTotals(*map(add, astuple(self), astuple(other)))

    def figures(self) -> dict[str, float]:
        """gpu_busy, the share of the time, and gpu_watts, both of a GPU on average; empty without any time."""
        if not self.seconds:
            return {}
        return {"gpu_busy": self.busy_s / self.seconds, "gpu_watts": self.joules / self.seconds}


class GpuMeter:
    """Measures GPUs of this process's numbering on a thread of its own, until the process ends."""

    def __init__(self, devices: Iterable[int]) -> None:
        """Raises whatever the driver's library raises where it cannot measure."""
        self._devices = tuple(devices)
        self._measure(0.0)
        self.totals = GpuTotals()

    def start(self) -> GpuMeter:
        threading.Thread(target=self._run, daemon=True, name="gpu meter").start()
        return self

    def _run(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(EVERY_S)
            now = time.monotonic()
            try:
                self.add(now - before)
            except Exception as error:  # of the driver's library, which has no type that all share
                log.warning("the busy share of the GPUs is no longer measured: %s", error)
                return
            before = now

    def add(self, seconds: float) -> None:
        """Count the last `seconds` with what the GPUs do now."""
        self.totals += self._measure(seconds)

    def _measure(self, seconds: float) -> GpuTotals:
        shares = [torch.cuda.utilization(device) / 100 for device in self._devices]
        watts = [torch.cuda.power_draw(device) / 1000 for device in self._devices]
        return GpuTotals(seconds * len(self._devices), seconds * sum(shares), seconds * sum(watts))


def measured(devices: Iterable[int]) -> GpuMeter | None:
    """A meter that has started; None on machines without GPUs, and where they cannot be measured."""
    if accelerator.kind() != accelerator.CUDA:
        return None
    try:
        return GpuMeter(devices).start()
    except Exception as error:  # see GpuMeter
        log.info("the busy share of the GPUs is not measured: %s; pip install 'asyncrl[nvml]'", error)
        return None
