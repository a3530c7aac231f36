"""Megatron-core on a machine without a GPU: `install()` before it is used. For tests alone.

It calls torch.cuda throughout. Here its device is the CPU, its streams and events do nothing, and tensors that it wants
on "cuda" are made on the CPU; what it computes, and what it sends over gloo, is its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class Nothing:
    """A stream or an event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Nothing]:
        return lambda *_, **__: Nothing()


class CudaIsCpu(TorchFunctionMode):
    """device="cuda" means the CPU; Tensor.type() names CUDA's types, by which Megatron tells precisions apart."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        said = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(said, str):
            return said.replace("torch.", "torch.cuda.")
        return said


def install() -> None:
    """For the rest of this process."""
    # Small functions, each of which would be compiled for seconds.
    torch.compile = lambda function=None, **_: function or (lambda later: later)  # type: ignore[assignment]
    import megatron.core.tensor_parallel.random as random

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = cuda.Event = Nothing
    cuda.current_stream = Nothing
    cuda.stream = contextlib.nullcontext
    for name in ("synchronize", "empty_cache", "manual_seed", "set_rng_state"):
        setattr(
            cuda, name, lambda *_, **__: None
        )  # one each: torch's compiler tells functions apart by identity
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment]
    CudaIsCpu().__enter__()

    # These reach into CUDA's generators by themselves.
    random._set_cuda_rng_state = lambda *_, **__: None
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    # Gloo wants numbers where NCCL takes tensors.
    all_to_all = dist.all_to_all_single

    def with_numbers(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **given: Any
    ) -> Any:
        return all_to_all(output, input, _numbers(output_split_sizes), _numbers(input_split_sizes), **given)

    dist.all_to_all_single = with_numbers


def _numbers(sizes: Any) -> list[int] | None:
    return None if sizes is None else [int(size) for size in sizes]
