"""Tensors that say they lie on a GPU, with real values, so that code for GPUs runs where there is none.

    with PretendedGpu() as gpu:
        x = torch.zeros(4, device="cuda")   ──▸ x.device == cuda:0; its values lie in host memory
        int(x.sum())                        ──▸ gpu.waits == ["_local_scalar_dense at asyncrl/…:12"]
        x + torch.ones(4)                   ──▸ MixedDevicesError, as torch on a GPU
        torch.dot(x.long(), x.long())       ──▸ NotOnCudaError, see cuda_ops.py

A wait is a call by which the host waits for the GPU: a value, or a size that hangs on values. Autograd works, and so do
learners and engines of one process. FSDP over ranks does not: its mesh wants a real device.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cuda_ops import check
from fake_accelerator import FakeAccelerator
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

ROOT = str(Path(__file__).parents[3])

GPU = torch.device("cuda", 0)

WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
"""aten operators whose result, or its size, the host must know."""

INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""aten operators whose indices may lie on the CPU; torch copies them."""

COPIES = {"copy_", "_foreach_copy_"}
"""aten operators that may take tensors of two devices."""


class MixedDevicesError(AssertionError):
    """A CPU tensor meets one of the GPU."""


class GpuTensor(torch.Tensor):
    """A tensor on the pretended GPU. memory: its values, a tensor on the CPU"""

    memory: Tensor
    gpu: PretendedGpu
    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, real: Tensor, gpu: PretendedGpu, requires_grad: bool = False) -> GpuTensor:
        self: GpuTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            requires_grad=requires_grad,
        )
        self.memory, self.gpu = real.detach(), gpu
        return self

    def __tensor_flatten__(self) -> tuple[list[str], PretendedGpu]:
        return ["memory"], self.gpu

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], gpu: PretendedGpu, *_: Any) -> GpuTensor:
        return GpuTensor(inner["memory"], gpu)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GpuTensor({self.memory})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(type(t) not in (GpuTensor, Tensor, torch.nn.Parameter) for t in tensors):
            return NotImplemented
        gpu = next(t.gpu for t in tensors if isinstance(t, GpuTensor))
        if func is torch.ops.aten.index_put.default and torch._C._current_graph_task_id() != -1:
            # torch's C++ has made what lies on the CPU: a derivative of an index.
            args = tree_map(lambda leaf: _there(leaf, gpu), args)
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        gpu.called(func, args, kwargs, tensors)
        out = _computed(func, tree_map(_real, args), tree_map(_real, kwargs))
        if func is torch.ops.aten.copy_.default:
            return args[0]  # on whichever device it lies
        given = {id(t.memory): t for t in tensors if isinstance(t, GpuTensor)}

        def there(leaf: Any) -> Any:
            if id(leaf) in given:
                return given[id(leaf)]  # in place: itself
            return GpuTensor(leaf, gpu) if isinstance(leaf, Tensor) else leaf

        return tree_map(there, out)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of a call, also of one that CUDA has and the CPU has not."""
    if func is torch.ops.aten.histc.default and not args[0].is_floating_point():
        return func(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    if func is torch.ops.aten.mm.dtype:
        left, right, dtype = args
        return left.to(dtype) @ right.to(dtype)
    return func(*args, **kwargs)


def _there(leaf: Any, gpu: PretendedGpu) -> Any:
    return GpuTensor(leaf, gpu) if isinstance(leaf, Tensor) and not isinstance(leaf, GpuTensor) else leaf


def _real(leaf: Any) -> Any:
    return leaf.memory if isinstance(leaf, GpuTensor) else leaf


class PretendedGpu(TorchFunctionMode):
    """See above. waits: each call by which the host waited; uploads: each copy from host memory. accelerator: what was
    called on torch's module of the device"""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.uploads: list[str] = []
        self.accelerator = FakeAccelerator()
        self._installed = ExitStack()

    def __enter__(self) -> PretendedGpu:
        self._installed.enter_context(self.accelerator)
        capability = self.accelerator.get_device_capability
        self._installed.enter_context(mock.patch.object(torch.cuda, "get_device_capability", capability))
        self._installed.enter_context(mock.patch.object(torch, "Event", side_effect=lambda _: _Event(self)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._installed.close()

    def tensor(self, values: Tensor) -> GpuTensor:
        """The values on the pretended GPU: the same memory, so that a test sees what becomes of them."""
        return GpuTensor(values, self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        own = args[0] if args and isinstance(args[0], GpuTensor) else None
        if own is not None and name in OWN:
            return OWN[name](self, own)
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return self._to(func, args, kwargs)
        if func is Tensor.pin_memory:
            return args[0]  # host memory is host memory here
        if func is scaled_dot_product_attention and own is not None:
            return _Attention.apply(self, {**dict(zip(ATTENDS, args[3:], strict=False)), **kwargs}, *args[:3])
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is None or func in (torch.get_device_module,):
            return func(*args, **kwargs)
        if torch.device(device).type != "cuda":
            return func(*tree_map(_real, args), **kwargs)
        kwargs["device"] = "cpu"
        out = func(*args, **kwargs)
        if isinstance(out, GpuTensor):
            return out
        if name in ("tensor", "as_tensor"):
            self.uploads.append(_said(name))
        return GpuTensor(out, self, out.requires_grad)

    def called(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        """Check a call on the GPU's tensors, and note a wait."""
        name = func._schema.name.partition("::")[2]
        on_cpu = [tensor for tensor in tensors if not isinstance(tensor, GpuTensor)]
        if name in COPIES:
            into = args[0][0] if isinstance(args[0], list | tuple) else args[0]
            if on_cpu and isinstance(into, GpuTensor):
                self.uploads.append(_said(name))
            elif on_cpu and not kwargs.get("non_blocking", args[2:] == (True,)):
                self.waits.append(_said(name))
        elif on_cpu and name in INDEXED and not _other_than_indices(args, on_cpu):
            self.uploads.append(_said(name))
        elif any(tensor.dim() for tensor in on_cpu):
            raise MixedDevicesError(f"{func}: a CPU tensor meets one of the GPU at {_said(name)}")
        elif name in WAITING or _by_mask(name, args, kwargs) or _by_offsets(name, args):
            self.waits.append(_said(name))
        check(func, args, kwargs)

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, others = args[0], tree_map(lambda x: GPU if isinstance(x, GpuTensor) else x, args[1:])
        if func is Tensor.cpu:
            device, dtype = torch.device("cpu"), None
        elif func is Tensor.cuda:
            device, dtype = GPU, None
        else:
            kwargs.update({k: GPU for k, v in kwargs.items() if isinstance(v, GpuTensor)})
            device, dtype, *_ = torch._C._nn._parse_to(*others, **kwargs)
        here = isinstance(tensor, GpuTensor)
        if device is not None and (device.type == "cuda") != here:
            if here and not kwargs.get("non_blocking"):
                self.waits.append(_said("to the CPU"))
            elif not here:
                self.uploads.append(_said("to the GPU"))
            tensor = _Moved.apply(tensor, self)
        return tensor if dtype is None else tensor.to(dtype, copy=kwargs.get("copy", False))


class _Moved(torch.autograd.Function):
    """A copy on the other device."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gpu: PretendedGpu) -> Tensor:
        ctx.gpu = gpu
        if isinstance(tensor, GpuTensor):
            return tensor.memory.clone()
        return GpuTensor(tensor.detach().clone(), gpu)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Moved.apply(grad, ctx.gpu), None


class _Attention(torch.autograd.Function):
    """torch's, as one operator: its parts make tensors where torch's C++ believes that these lie."""

    @staticmethod
    def forward(ctx: Any, gpu: PretendedGpu, options: Any, *inputs: GpuTensor) -> GpuTensor:
        ctx.gpu = gpu
        ctx.inputs = [tensor.memory.detach().requires_grad_() for tensor in inputs]
        with torch.enable_grad():
            ctx.out = scaled_dot_product_attention(*ctx.inputs, **tree_map(_real, options))
        return GpuTensor(ctx.out.detach(), gpu)

    @staticmethod
    def backward(ctx: Any, grad: GpuTensor) -> tuple[Any, ...]:
        grads = torch.autograd.grad(ctx.out, ctx.inputs, grad.memory)
        return None, None, *(GpuTensor(one, ctx.gpu) for one in grads)


ATTENDS = ("attn_mask", "dropout_p", "is_causal")
"""The arguments of scaled_dot_product_attention after its three tensors."""


def _no_numpy(gpu: PretendedGpu, tensor: GpuTensor) -> Any:
    raise TypeError("can't convert cuda:0 device type tensor to numpy")


def _tolist(gpu: PretendedGpu, tensor: GpuTensor) -> Any:
    gpu.waits.append(_said("tolist"))
    return tensor.memory.tolist()


OWN = {
    "numpy": _no_numpy,
    "__array__": _no_numpy,
    "tolist": _tolist,
    "data_ptr": lambda gpu, tensor: tensor.memory.data_ptr(),
    "untyped_storage": lambda gpu, tensor: tensor.memory.untyped_storage(),
    "is_pinned": lambda gpu, tensor: False,
}
"""Methods that look at memory."""


class _Event:
    """torch.Event: reached by those who wait for it, who are counted."""

    def __init__(self, gpu: PretendedGpu) -> None:
        self._gpu = gpu

    def record(self) -> None: ...

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._gpu.waits.append(_said("event"))


def _by_mask(name: str, args: Any, kwargs: Any) -> bool:
    """Whether a call selects by a boolean mask, and must know how many are set; one value for all needs no count."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name not in INDEXED:
        return False
    masks = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return masks and not (len(args) > 2 and args[2].dim() == 0)


def _other_than_indices(args: Any, on_cpu: list[Tensor]) -> bool:
    """Whether anything but indices, or a single value, lies on the CPU."""
    indexed, _, *values = args[:3]
    return any(tensor is one for tensor in on_cpu for one in (indexed, *(v for v in values if v.dim())))


def _by_offsets(name: str, args: Any) -> bool:
    """Whether a product of groups reads their sizes on the host: GPUs multiply bfloat16 alone without that, and of
    NVIDIA's those with compute capability 9 or 10 (GroupedBlas.cpp)."""
    return name == "_grouped_mm" and args[0].dtype != torch.bfloat16


def _said(name: str) -> str:
    """The call and the line of the project that made it."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if (
            file.startswith(ROOT)
            and "/.venv/" not in file
            and not file.startswith(str(Path(__file__).parent))
        ):
            return f"{name} at {file.removeprefix(ROOT + '/')}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return name
