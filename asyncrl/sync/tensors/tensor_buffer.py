"""Memory for one copy of a rank's shards, a snapshot or staging: one allocation, so that a plain copy of it is the
lower bound of a pause."""

from __future__ import annotations

import time

import torch

from asyncrl.sync.channels.shared_memory import shared_memory
from asyncrl.sync.layout.layout import Layout
from asyncrl.sync.plan.plan import ALIGN
from asyncrl.sync.tensors.bucket import Shards


class TensorBuffer:
    """Room for a copy of `live`, in one stretch of memory; `shards` addresses it by boxes.

    On the device of `live` if none is given.
    """

    def __init__(self, live: Shards, device: torch.device | None = None) -> None:
        self.bytes = sum(part.numel() * part.element_size() for part in live.parts)
        padded = sum(_padded(part) for part in live.parts)
        self.memory = shared_memory(padded, device or live.device)
        free = self.memory
        copies: dict[str, list[torch.Tensor]] = {}
        for name, parts in live.tensors.items():
            copies[name] = []
            for part in parts:
                bytes_ = free[: part.numel() * part.element_size()]
                copies[name].append(bytes_.view(part.dtype).view(part.shape))
                free = free[_padded(part) :]
        self.shards = Shards(live.layout, copies)

    @staticmethod
    def for_layout(layout: Layout, device: torch.device) -> TensorBuffer:
        """Room for the boxes of a rank of this layout."""
        like = {
            name: [
                torch.empty(box.shape, dtype=getattr(torch, param.dtype), device="meta")
                for box in param.boxes
            ]
            for name, param in layout.items()
        }
        return TensorBuffer(Shards(layout, like), device)

    def take(self, live: Shards) -> float:
        """Copy everything; returns the seconds it took, the device's work included."""
        begun = time.perf_counter()
        if live.tensors:
            torch._foreach_copy_(self.shards.parts, live.parts)
        _finish(self.memory.device)
        return time.perf_counter() - begun

    def floor(self, to: torch.device | None = None) -> float:
        """Seconds of one plain copy of the same bytes, here or to another device: no pause can be shorter.

        Overwrites the contents.
        """
        half = len(self.memory) // 2
        low, high = self.memory[:half], self.memory[half : 2 * half]
        there = low.to(to) if to is not None and to.type != low.device.type else low
        begun = time.perf_counter()
        there.copy_(high)
        (high if there is low else there).copy_(low)
        _finish(there.device)
        return time.perf_counter() - begun


def _padded(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes here, so that the next one starts aligned."""
    return -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
