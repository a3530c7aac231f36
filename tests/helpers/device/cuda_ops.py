"""Code on the CPU that may call only what CUDA has too.

    with CudaOps():
        code on CPU tensors        ──▸ an operator or a dtype that CUDA lacks: NotOnCudaError

The rules come from torch's own tests (`cuda_ops.json`, see `make_cuda_ops.py`). Operators without an entry there are
below, each with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, reduce
from typing import Any

import torch
from make_cuda_ops import table
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

ENTRY_OF = {
    "_log_softmax": "log_softmax",
    "_log_softmax_backward_data": "log_softmax",
    "_safe_softmax": "softmax",
    "_softmax": "softmax",
    "convolution": "conv1d",
    "convolution_backward": "conv1d",
    "embedding_dense_backward": "embedding",
    "gelu_backward": "gelu",
    "native_layer_norm_backward": "native_layer_norm",
    "nll_loss_backward": "nll_loss",
    "nll_loss_forward": "nll_loss",
    "sigmoid_backward": "sigmoid",
    "silu_backward": "silu",
    "slice_backward": "slice",
    "select_backward": "select",
    "softplus_backward": "softplus",
    "tanh_backward": "tanh",
    "threshold_backward": "relu",
    "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift",
    "__and__": "bitwise_and",
    "__iand__": "bitwise_and",
    "__ior__": "bitwise_or",
    "__or__": "bitwise_or",
    "_local_scalar_dense": "item",
    "index": "__getitem__",
    "is_nonzero": "item",
    "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "scaled_dot_product_attention",
}
"""Operators that torch's tests know by another name: parts of it, its derivative, or the CPU's kernel for it."""

ALWAYS = {
    "_to_copy": "Copy.cu moves every dtype",
    "_unsafe_view": "moves nothing",
    "clone": "Copy.cu moves every dtype",
    "detach_": "moves nothing",
    "type_as": "Copy.cu moves every dtype",
    "copy": "Copy.cu moves every dtype",
    "_fused_adamw": "native_functions.yaml lists a CUDA kernel",
    "_fused_adam": "native_functions.yaml lists a CUDA kernel",
    "_foreach_norm": "every float dtype: ForeachReduceOp.cu",
    "_has_same_storage_numel": "looks at sizes alone",
    "is_pinned": "looks at the address alone",
    "is_same_size": "looks at sizes alone",
    "lift_fresh": "moves nothing",
    "set_": "moves nothing",
    "resize_": "moves nothing",
}
"""Operators without an entry that CUDA has for every dtype in use here."""


class NotOnCudaError(AssertionError):
    """This operator does not run on CUDA with such tensors."""


class CudaOps(TorchDispatchMode):
    """See above. `called`: the names of the operators that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass(leaf) for leaf in tree_leaves((args, kwargs))):
            return NotImplemented  # a DTensor calls with its parts
        self.called.append(func._schema.name)
        check(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises NotOnCudaError for a call that CUDA would refuse."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "aten" or func.is_view:
        return
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return
    if name in BY_HAND:
        for broken in BY_HAND[name](*tensors):
            raise NotOnCudaError(f"{func}: {broken}")
        return
    dtype = _computed(func, tensors)
    listed = _listed(name)
    if listed is None:
        raise NotOnCudaError(f"{func} has no entry: name it in cuda_ops.py with a reason, if CUDA has it")
    if listed and str(dtype).removeprefix("torch.") not in listed:
        raise NotOnCudaError(f"{func} does not exist for {dtype} on CUDA, only for {sorted(listed)}")


def _computed(func: Any, tensors: list[torch.Tensor]) -> torch.dtype:
    """The dtype in which an operator computes: that of its first tensor, or the common one of all."""
    if func._schema.name in ("aten::cumsum", "aten::cumprod") and tensors[0].dtype == torch.bool:
        return torch.int64  # ReduceOps.cpp makes it one before a kernel sees it
    if torch.Tag.pointwise in func.tags:
        return reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    return tensors[0].dtype


@cache
def _listed(name: str) -> frozenset[str] | None:
    """The dtypes of an aten operator; empty: every one; None: it is unknown."""
    bare = name.removesuffix("_")
    for known in (name, bare, bare.removeprefix("_foreach_")):
        entry = ENTRY_OF.get(known, known)
        if known in ALWAYS:
            return frozenset()
        if entry in _table():
            return _table()[entry]
    return None


@cache
def _table() -> dict[str, frozenset[str]]:
    return table()


def _int_mm(left: torch.Tensor, right: torch.Tensor, *_: torch.Tensor) -> Iterator[str]:
    """The checks of `_int_mm_out_cuda`, and what cuBLAS has: a kernel for int8 exists only where the right matrix lies
    column by column (torch's own test of it skips the other layout from CUDA 13 on)."""
    (rows, inner), columns = left.shape, right.shape[1]
    if rows <= 16 or inner % 8 or columns % 8 or not inner or not columns:
        yield f"more than 16 rows, and columns in eights: {tuple(left.shape)} by {tuple(right.shape)}"
    if left.stride(1) != 1 or right.stride(0) != 1:
        yield f"rows of the left and columns of the right lie whole: strides {left.stride()}, {right.stride()}"
    for tensor in (left, right):
        if tensor.storage_offset() % 8 or max(tensor.stride()) % 8:
            yield f"each begins at a multiple of 8 bytes: {tensor.storage_offset()}, strides {tensor.stride()}"


def _grouped_mm(left: torch.Tensor, right: torch.Tensor, *_: torch.Tensor) -> Iterator[str]:
    """What GroupedBlas.cpp multiplies; its checks of shapes and strides are those of the CPU (GroupedMMUtils.h)."""
    if {left.dtype, right.dtype} - {torch.bfloat16, torch.float16, torch.float32}:
        yield f"bfloat16, float16 or float32: {left.dtype} by {right.dtype}"


BY_HAND: dict[str, Callable[..., Iterator[str]]] = {"_int_mm": _int_mm, "_grouped_mm": _grouped_mm}
"""Operators whose limits on CUDA no list has."""
