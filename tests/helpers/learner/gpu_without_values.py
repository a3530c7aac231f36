"""A GPU that is not there: its tensors are on torch's device "meta", with shapes and without values.

    with GpuWithoutValues() as gpu:
        step.add(groups, version)
    assert gpu.waits == []

Whole networks and optimizers run on it, unlike on `pretended_gpu.py`, whose tensors have values. `waits` lists what
would make this thread wait for all work that a GPU has queued: reading a value, a copy that is not queued, a copy from
pageable memory, an event. Operations whose result's shape depends on values (`nonzero`, a mask as an index) raise, and
so does one that gets a tensor of the CPU beside one of the GPU. A queued copy to the CPU gives ones.
"""

from __future__ import annotations

import importlib
import traceback
from contextlib import ExitStack
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
GPU = torch.device("meta")
INDEXED = (aten.index_put_.default, aten.index_put.default, aten.index.Tensor)


class GpuWithoutValues(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._stack = ExitStack()
        self._pinned: dict[int, Tensor] = {}  # kept alive, so that no other tensor gets the address

    def __enter__(self) -> Self:
        def event(device: torch.device) -> EventOfGpu:
            return EventOfGpu(self)

        for target, name, replaced in (
            (Tensor, "pin_memory", lambda values: self._pin(values)),
            (torch, "Event", event),
            (importlib.import_module("torch.optim.adam"), "_device_dtype_check_for_fused", lambda *_: None),
        ):
            self._stack.enter_context(mock.patch.object(target, name, replaced))
        self._stack.enter_context(mock.patch("asyncrl.device.copies.is_accelerator", GPU.__eq__))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in tensors if tensor.device == GPU]
        if operation is aten._to_copy.default:
            return self._copied(operation, args[0], kwargs)
        if not there:
            return operation(*args, **kwargs)
        if operation is aten.copy_.default and len(there) == 1:
            return self._copied_over(*args, **kwargs)
        if operation is aten._local_scalar_dense.default:
            self._wait("a value is read")
            return 1.0 if args[0].dtype.is_floating_point else 1
        if operation in INDEXED and any(index is not None and index.dtype == torch.bool for index in args[1]):
            raise AssertionError("a mask is an index: its result has a shape that depends on values")
        for tensor in tensors:
            if tensor.device != GPU:
                assert tensor.dim() == 0, (
                    f"{operation} gets {tuple(tensor.shape)} on the CPU beside the GPU's"
                )
        return operation(*args, **kwargs)

    def _copied(self, operation: Any, values: Tensor, options: dict[str, Any]) -> Tensor:
        """Between the devices, or on one of them."""
        device = torch.device(options.get("device") or values.device)
        if device == values.device:
            result: Tensor = operation(values, **options)
            return result
        dtype = options.get("dtype") or values.dtype
        if device == GPU:
            self._from_cpu(values, options.get("non_blocking", False))
            return torch.empty_like(values, dtype=dtype, device=GPU)
        if not options.get("non_blocking"):
            self._wait("a copy to the CPU is not queued")
        return torch.ones(values.shape, dtype=dtype)

    def _copied_over(self, into: Tensor, values: Tensor, non_blocking: bool = False) -> Tensor:
        if into.device == GPU:
            self._from_cpu(values, non_blocking)
        elif not non_blocking:
            self._wait("a copy to the CPU is not queued")
        return into

    def _from_cpu(self, values: Tensor, non_blocking: bool) -> None:
        if not non_blocking:
            self._wait("a copy to the GPU is not queued")
        elif values.numel() and values.data_ptr() not in self._pinned:
            self._wait("a copy to the GPU is from pageable memory")

    def _pin(self, values: Tensor) -> Tensor:
        copy = values.clone()
        self._pinned[copy.data_ptr()] = copy
        return copy

    def _wait(self, reason: str) -> None:
        """With the lines of this package that led there."""
        ours = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack() if "/asyncrl/" in f.filename]
        self.waits.append(f"{reason}: {' '.join(ours[-3:])}")


class EventOfGpu:
    """A mark that the GPU reaches when somebody waits for it."""

    def __init__(self, gpu: GpuWithoutValues) -> None:
        self._gpu = gpu

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._gpu._wait("an event")
