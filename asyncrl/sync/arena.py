"""Memory for one snapshot of a rank's shards: one allocation, so that a plain copy of it is the floor."""

from __future__ import annotations

import time

import torch

from asyncrl.sync.bucket import Shards
from asyncrl.sync.plan import ALIGN


class Arena:
    """A copy of `live`, in one stretch of memory on the same device; `shards` addresses it by boxes."""

    def __init__(self, live: Shards) -> None:
        self.bytes = sum(t.numel() * t.element_size() for t in live.tensors.values())
        starts, end = [], 0
        for tensor in live.tensors.values():
            starts.append(end)
            end += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
        self.memory = torch.zeros(end, dtype=torch.uint8, device=live.device)
        copies = {
            name: self.memory[start : start + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for start, (name, t) in zip(starts, live.tensors.items(), strict=True)
        }
        self.shards = Shards(live.layout, copies)

    def take(self, live: Shards) -> float:
        """Copy everything; returns the seconds it took, the device's work included."""
        begun = time.perf_counter()
        if live.tensors:
            torch._foreach_copy_(list(self.shards.tensors.values()), list(live.tensors.values()))
        _finish(self.memory.device)
        return time.perf_counter() - begun

    def floor(self, other: Arena) -> float:
        """Seconds of one plain copy of the same bytes: what `take` cannot beat."""
        begun = time.perf_counter()
        self.memory.copy_(other.memory)
        _finish(self.memory.device)
        return time.perf_counter() - begun


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
