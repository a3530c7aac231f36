"""Where a checkpoint's parameters lie in the model of one vLLM worker, observed while the model loads them.

vLLM fuses (q, k, v; gate, up; experts), pads and shards, each model in its own `load_weights`. So that runs once on
meta tensors: parameters are swapped for twins of their shape at load time, every copy from a checkpoint tensor into a
twin is recorded and none is made. No byte moves and nothing live is touched.

    copy      q_proj[64:128, :] ──▸ qkv_proj[0:64, :]       a view of the one, a view of the other
    BoxView   Box((64, 0), (64, 512)) of q_proj  ◂──▸  a view of the live qkv_proj

Everything else is refused by name: a part of a parameter that is no box, a computed value, a parameter that vLLM has
packed.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.errors import WeightSyncError
from asyncrl.generator.engines.vllm.vllm_weights import BoxView
from asyncrl.sync.layout.layout import Box, ParamLayout
from asyncrl.sync.tensors.shards import dtype_name

Checkpoint = Mapping[str, Tensor]
"""The checkpoint's parameters on the meta device: names, full shapes, dtypes."""


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a checkpoint parameter, and the view `torch.as_strided(owner, box.shape, strides, offset)` of it.

    strides of axes of size 1 are 0, so that equal regions compare equal.
    """

    box: Box
    owner: str
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """One observed copy: a view of a checkpoint parameter into a view of a live one, both of `shape`."""

    name: str
    owner: str
    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


def region_of(copy: Copy, full: tuple[int, ...]) -> Region | None:
    """The copy in the coordinates of a contiguous parameter of shape `full`; None if its source is no box of it.

    >>> region_of(Copy("w", "fused", (2, 4), 4, (4, 1), 0, (4, 1)), (3, 4))
    Region(box=Box(offsets=(1, 0), shape=(2, 4)), owner='fused', offset=0, strides=(4, 1))
    """
    steps = [math.prod(full[axis + 1 :]) for axis in range(len(full))]
    offsets, rest = [], copy.source_offset
    for step in steps:
        offsets.append(rest // step)
        rest %= step
    sizes, strides = [1] * len(full), [0] * len(full)
    for size, source_stride, stride in zip(copy.shape, copy.source_strides, copy.strides, strict=True):
        if size == 1:
            continue
        axes = [a for a, step in enumerate(steps) if step == source_stride and full[a] > 1 and sizes[a] == 1]
        if len(axes) != 1 or offsets[axes[0]] + size > full[axes[0]]:
            return None
        sizes[axes[0]], strides[axes[0]] = size, stride
    return Region(Box(tuple(offsets), tuple(sizes)), copy.owner, copy.offset, tuple(strides))


def merge_regions(regions: Sequence[Region]) -> list[Region]:
    """The same memory in as few regions: neighbours that are also neighbours in memory become one."""
    found = list(regions)
    for axis in reversed(range(len(found[0].box.shape)) if found else range(0)):
        runs: dict[tuple[Any, ...], list[Region]] = defaultdict(list)
        for region in found:
            across = [
                v for part in (region.box.offsets, region.box.shape, region.strides) for v in _but(part, axis)
            ]
            runs[(region.owner, *across)].append(region)
        found = [merged for run in runs.values() for merged in _join_run(run, axis)]
    return sorted(found, key=lambda region: region.box)


def _but(values: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return values[:axis] + values[axis + 1 :]


def _join_run(run: list[Region], axis: int) -> Iterator[Region]:
    """Regions that differ along `axis` alone."""
    run.sort(key=lambda region: region.box.offsets[axis])
    last = run[0]
    for region in run[1:]:
        both = _joined_pair(last, region, axis)
        if both is None:
            yield last
        last = both or region
    yield last


def _joined_pair(first: Region, second: Region, axis: int) -> Region | None:
    size, more = first.box.shape[axis], second.box.shape[axis]
    if first.box.offsets[axis] + size != second.box.offsets[axis]:
        return None
    stride, remainder = divmod(second.offset - first.offset, size)
    fits = all(n == 1 or s == stride for n, s in ((size, first.strides[axis]), (more, second.strides[axis])))
    if remainder or stride <= 0 or not fits:
        return None
    shape = (*first.box.shape[:axis], size + more, *first.box.shape[axis + 1 :])
    strides = (*first.strides[:axis], stride, *first.strides[axis + 1 :])
    return Region(Box(first.box.offsets, shape), first.owner, first.offset, strides)


class _Watch(TorchDispatchMode):
    """Records copies from checkpoint tensors into twins, by their storages; makes no copy into a twin."""

    def __init__(self, sources: Mapping[int, str], owners: Mapping[int, str]) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.refused: dict[str, str] = {}
        self._sources, self._owners = sources, owners

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        into, of = args[0], args[1]
        owner, name = self._owners.get(_storage(into)), self._sources.get(_storage(of))
        if owner is None:
            return into
        if name is None or into.shape != of.shape:
            self.refused[owner] = "is not loaded by plain copies of checkpoint tensors"
            return into
        self.copies.append(
            Copy(
                name,
                owner,
                tuple(of.shape),
                of.storage_offset(),
                tuple(of.stride()),
                into.storage_offset(),
                tuple(into.stride()),
            )
        )
        return into


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def find_box_views(
    model: nn.Module, checkpoint: Checkpoint, live: Mapping[str, Tensor], derived: Collection[str] = ()
) -> dict[str, list[BoxView]]:
    """For each checkpoint parameter the boxes of it that this worker holds, each with the live view.

    live: by name, the tensors to write to for parameters of `model` whose memory is not as it was loaded · derived: the
    names of those that vLLM computes from others. Raises WeightSyncError, naming the parameter, if copies into such
    views cannot keep one up to date.
    """
    twins, owners = _twins(model)
    named = {name: live.get(name, parameter.data) for name, parameter in _parameters(model)}
    watch = _Watch(
        {_storage(tensor): name for name, tensor in checkpoint.items()},
        {_storage(twin): owners[at] for at, twin in reversed(list(twins.items()))},
    )
    with _swapped(twins), torch.no_grad(), watch:
        model.load_weights(_per_expert(checkpoint))  # type: ignore[operator]
    for owner, why in watch.refused.items():
        raise WeightSyncError(f"vLLM's parameter {owner} {why}")
    loaded = {at: twin for at, twin in twins.items() if owners[at] not in derived}
    _check_memory(loaded, owners, named, {copy.owner for copy in watch.copies})
    regions: dict[str, list[Region]] = {name: [] for name in checkpoint}
    for copy in watch.copies:
        region = region_of(copy, tuple(checkpoint[copy.name].shape))
        if region is None:
            raise WeightSyncError(f"vLLM loads a part of {copy.name} into {copy.owner} that is no box of it")
        regions[copy.name].append(region)
    return {
        name: [_box_view(region, named) for region in merge_regions(found)] for name, found in regions.items()
    }


def layout_of_views(checkpoint: Checkpoint, views: Mapping[str, Sequence[BoxView]]) -> dict[str, ParamLayout]:
    """The layout for the planner. Raises WeightSyncError for a part that is loaded twice."""
    layout = {}
    for name, found in views.items():
        boxes = tuple(box for box, _ in found)
        try:
            layout[name] = ParamLayout(
                tuple(checkpoint[name].shape), dtype_name(checkpoint[name].dtype), boxes
            )
        except ValueError as error:
            raise WeightSyncError(f"vLLM loads {name} in parts that cannot be followed: {error}") from None
    return layout


def _box_view(region: Region, named: Mapping[str, Tensor]) -> BoxView:
    live = named[region.owner]
    offset = live.storage_offset() + region.offset
    return region.box, torch.as_strided(live, region.box.shape, region.strides, offset)


def _check_memory(
    twins: Mapping[Any, Tensor], owners: Mapping[Any, str], named: Mapping[str, Tensor], written: set[str]
) -> None:
    """Every parameter is loaded, and lies in memory as it did then."""
    loaded = {id(twin) for at, twin in twins.items() if owners[at] in written}  # tied ones: once
    for at, twin in twins.items():
        owner = owners[at]
        if id(twin) not in loaded:
            raise WeightSyncError(f"vLLM's parameter {owner} is not in the learner's checkpoint")
        if (named[owner].shape, named[owner].stride()) != (twin.shape, twin.stride()):
            raise WeightSyncError(
                f"vLLM keeps {owner} in another form ({tuple(named[owner].shape)}) than it loads it "
                f"({tuple(twin.shape)}): an update in place would not reach it"
            )


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)


def _twins(model: nn.Module) -> tuple[dict[tuple[nn.Module, str], Tensor], dict[tuple[nn.Module, str], str]]:
    """For each parameter's (module, attribute) its meta twin, as at load time, and its name. Tied ones share one."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    twins: dict[tuple[nn.Module, str], Tensor] = {}
    owners: dict[tuple[nn.Module, str], str] = {}
    shared: dict[int, Tensor] = {}
    for prefix, module in model.named_modules():
        recorded, _ = get_layerwise_info(module).restore_metadata
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in shared:
                twin = to_meta_tensor(recorded.get(name, parameter))
                shared[id(parameter)] = restore_layer_refs(twin, module) if name in recorded else twin
            twins[module, name] = shared[id(parameter)]
            owners[module, name] = f"{prefix}.{name}" if prefix else name
    return twins, owners


@contextlib.contextmanager
def _swapped(twins: Mapping[tuple[nn.Module, str], Tensor]) -> Iterator[None]:
    live = {(module, name): module._parameters[name] for module, name in twins}
    try:
        for (module, name), twin in twins.items():
            module._parameters[name] = twin  # type: ignore[assignment]
        yield
    finally:
        for (module, name), parameter in live.items():
            module._parameters[name] = parameter


EXPERTS = ".mlp.experts."


def _per_expert(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Transformers holds the experts of a layer in one tensor; the models of vLLM load them one by one, from views."""
    for name, tensor in checkpoint.items():
        prefix, experts, kind = name.rpartition(EXPERTS)
        if experts and kind == "gate_up_proj" and tensor.dim() == 3:
            for index, (gate, up) in enumerate(zip(*tensor.chunk(2, dim=1), strict=True)):
                yield f"{prefix}{EXPERTS}{index}.gate_proj.weight", gate
                yield f"{prefix}{EXPERTS}{index}.up_proj.weight", up
        elif experts and kind == "down_proj" and tensor.dim() == 3:
            for index, down in enumerate(tensor):
                yield f"{prefix}{EXPERTS}{index}.down_proj.weight", down
        else:
            yield name, tensor
