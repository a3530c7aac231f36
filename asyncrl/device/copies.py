"""Copies between this process's memory and an accelerator that no thread waits for.

A copy from pageable memory, and any copy that is not queued, makes the thread wait until the device has done all of its
work. `on_device` copies from pinned memory; `on_host` gives tensors that may be read when a `Mark` after it is reached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.device.accelerator import CPU, is_accelerator


def on_device(values: Tensor, device: torch.device | None) -> Tensor:
    """The values on a device, for work that is queued there later; None: where they are."""
    if device is None or values.device == device:
        return values
    if is_accelerator(device) and not is_accelerator(values.device):
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def on_host(values: Tensor) -> Tensor:
    """The values without gradient in this process's memory, filled when the device gets there; themselves if they are
    there already."""
    return values.detach().to(CPU, non_blocking=True)


class Mark:
    """A point in the work of a device's current stream. The CPU is always beyond it."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.Event | None = None
        if is_accelerator(device):
            self._event = torch.Event(device)
            self._event.record()

    @property
    def reached(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
