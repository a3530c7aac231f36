"""One rank's tensors by the boxes of its layout, and memory for a copy of all of them.

A copy, a snapshot or staging, is one allocation, so that a plain copy of it is the lower bound of a pause.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from asyncrl.device import accelerator
from asyncrl.errors import WeightSyncError
from asyncrl.sync.channels.shared_memory import shared_memory
from asyncrl.sync.layout.layout import Box, Layout, ParamLayout, layout_bytes, whole_layout
from asyncrl.sync.plan.plan import aligned


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 → "bfloat16", as layouts spell it."""
    return str(dtype).removeprefix("torch.")


def layout_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, ParamLayout]:
    """The layout of a rank that holds every parameter whole."""
    return whole_layout({name: (tensor.shape, dtype_name(tensor.dtype)) for name, tensor in tensors.items()})


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as [bytes] uint8, no copy."""
    return tensor.view(-1).view(torch.uint8)


BoxTensors = torch.Tensor | Sequence[torch.Tensor]
"""A rank's tensors of one parameter: one of each box's shape, in the order of the layout's boxes; that of a single box
may stand alone. Any strides: views into a fused parameter will do."""


class Shards:
    """One rank's tensors, addressed by boxes in checkpoint coordinates.

    Raises WeightSyncError, naming the parameter, when a tensor is missing or does not fit its box.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, BoxTensors]) -> None:
        self.layout = layout
        self.tensors: dict[str, tuple[torch.Tensor, ...]] = {}
        for name, param in layout.items():
            if param.elements:
                if name not in tensors:
                    raise WeightSyncError(f"parameter {name}: in the layout, but there is no tensor of it")
                given = tensors[name]
                parts = (given,) if isinstance(given, torch.Tensor) else tuple(given)
                _check(name, param, parts)
                self.tensors[name] = tuple(part.detach() for part in parts)
        # Each version has the same pieces; to slice a tensor takes longer than to copy a small one.
        self._views: dict[tuple[str, Box], torch.Tensor] = {}

    @property
    def parts(self) -> list[torch.Tensor]:
        """All tensors, one per box, in the order of the layout."""
        return [part for parts in self.tensors.values() for part in parts]

    @property
    def device(self) -> torch.device:
        return next((part.device for part in self.parts), torch.device("cpu"))

    def copy_to(self, copy: Shards) -> None:
        """Copy everything to tensors of the same layout, on this thread's stream."""
        if self.tensors:
            torch._foreach_copy_(copy.parts, self.parts, non_blocking=True)

    def view(self, name: str, box: Box) -> torch.Tensor:
        """The elements of `box`, which one held box must contain, as a view of shape `box.shape`."""
        key = (name, box)
        if (found := self._views.get(key)) is None:
            found = self._views[key] = self._view(name, box)
        return found

    def _view(self, name: str, box: Box) -> torch.Tensor:
        parts = self.tensors.get(name, ())
        for held, part in zip(
            self.layout[name].boxes, parts, strict=False
        ):  # of an empty parameter: no parts
            if held.contains(box):
                return part[box.within(held).slices()]
        raise WeightSyncError(f"parameter {name}: {box} is not held here")


def _check(name: str, param: ParamLayout, parts: Sequence[torch.Tensor]) -> None:
    here = [f"{dtype_name(part.dtype)} {tuple(part.shape)}" for part in parts]
    there = [f"{param.dtype} {box.shape}" for box in param.boxes]
    if here != there:
        raise WeightSyncError(
            f"parameter {name}: the tensor is {' and '.join(here) or 'missing'}, its layout has {' and '.join(there)}"
        )


class LiveShards(Protocol):
    """The tensors that snapshots are taken of: `Shards`, or those that take another form on the way."""

    @property
    def layout(self) -> Layout:
        """That of the snapshots."""
        ...

    @property
    def device(self) -> torch.device: ...

    def copy_to(self, copy: Shards) -> None: ...


class TensorBuffer:
    """Room for a copy of a rank's tensors, in one stretch of memory on `device`; `shards` addresses it by boxes.

    pinned: memory of the host that an accelerator copies to by itself
    """

    def __init__(self, layout: Layout, device: torch.device, pinned: bool = False) -> None:
        held = [
            (name, box, getattr(torch, param.dtype))
            for name, param in layout.items()
            if param.elements
            for box in param.boxes
        ]
        self.bytes = layout_bytes(layout)
        size = sum(aligned(box.elements * dtype.itemsize) for _, box, dtype in held)
        self.memory = accelerator.pinned_memory(size) if pinned else shared_memory(size, device)
        copies: dict[str, list[torch.Tensor]] = defaultdict(list)
        start = 0
        for name, box, dtype in held:
            size = box.elements * dtype.itemsize
            copies[name].append(self.memory[start : start + size].view(dtype).view(box.shape))
            start += aligned(size)
        self.shards = Shards(layout, copies)

    def take(self, live: LiveShards) -> float:
        """Copy everything on this thread's stream, and wait for it; returns the seconds it took."""
        begun = time.perf_counter()
        live.copy_to(self.shards)
        accelerator.wait_for_stream(live.device)
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
        accelerator.wait_for_stream(there.device)
        return time.perf_counter() - begun
