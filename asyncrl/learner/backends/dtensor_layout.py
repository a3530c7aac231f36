"""The boxes of checkpoint parameters that this rank's DTensors hold, and views of them.

    placements on mesh (dp, tp)                                   boxes of this rank
    Shard(0), Replicate()                   FSDP2                 some rows
    _StridedShard(0, 2), Shard(0)           FSDP2 after tp 2      rows of its part of the rows
    Replicate(), _StridedShard(1, 2)        packed gate_up        two: of the gates, and of the ups

A strided shard is cut after those of later mesh dimensions, or block by block out of a packed parameter; its
`split_factor` is the product of both. torch's own `compute_local_shape_and_global_offset` gives a single box, which is
wrong for packed parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from asyncrl.errors import WeightSyncError
from asyncrl.learner.parallel.mesh import local_part
from asyncrl.sync.layout.layout import Box, ParamLayout
from asyncrl.sync.layout.names import Names, checkpoint_layout
from asyncrl.sync.layout.sharding import Local, chunk
from asyncrl.sync.tensors.shards import BoxTensors, dtype_name


def layout_of_dtensors(
    parameters: Mapping[str, Tensor], names: Names
) -> tuple[dict[str, ParamLayout], dict[str, BoxTensors]]:
    """(layout, live tensors) of this rank, in checkpoint names. Raises WeightSyncError for a placement that is neither
    a shard nor a replica.

    parameters: tied ones once. A plain tensor is whole; of one on the meta device this rank has nothing.
    """
    layout, tensors = {}, {}
    for name, parameter in parameters.items():
        local = _local(name, parameter)
        boxes = tuple(box for box in local.boxes if box.elements)
        layout[name] = ParamLayout(tuple(parameter.shape), dtype_name(parameter.dtype), boxes)
        tensors[name] = list(_views(parameter, local.dim, boxes))
    renamed, views = checkpoint_layout(layout, names)
    live: dict[str, BoxTensors] = {}
    for there, found in views.items():
        parts = [tensors[name][view.part][view.index] for name, view in found]
        live[there] = parts[0] if len(parts) == 1 else parts
    return renamed, live


def _local(name: str, parameter: Tensor) -> Local:
    if parameter.is_meta:  # on another pipeline stage
        return Local(())
    whole = Local((Box.whole(parameter.shape),))
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    at = mesh.get_coordinate()
    if at is None:  # on another pipeline stage
        return Local(())
    try:
        return placed(whole, parameter.placements, mesh.shape, at)
    except ValueError as error:
        raise WeightSyncError(f"parameter {name}: {parameter.placements} on {mesh}: {error}") from error


def placed(whole: Local, placements: Sequence[Any], sizes: Sequence[int], at: Sequence[int]) -> Local:
    """The part of `whole` that the rank at coordinates `at` of a mesh of these `sizes` holds. Raises ValueError."""
    for placement in placements:
        if not isinstance(placement, Shard | _StridedShard | Replicate):
            raise ValueError(f"{placement} is neither a shard nor a replica")
    local = whole
    # A packed parameter is cut into its blocks while it is still in one piece.
    for axis, blocks in sorted(
        _cuts(placements, sizes, len(whole.boxes[0].shape)), key=lambda cut: cut[1] == 1
    ):
        dim = placements[axis].dim % len(whole.boxes[0].shape)
        if blocks > 1:
            length = whole.boxes[0].shape[dim]
            rows = [chunk(length, blocks, block)[1] for block in range(blocks)]
            local = local.chunk_blocks(dim, rows, sizes[axis], at[axis])
        else:
            local = local.chunk(dim, sizes[axis], at[axis])
    return local


def _cuts(placements: Sequence[Any], sizes: Sequence[int], dims: int) -> Iterator[tuple[int, int]]:
    """(mesh dimension, blocks of the packed parameter that it cuts), in the order of the cuts."""
    for dim in range(dims):
        order: list[tuple[int, int]] = []
        for axis in reversed(range(len(placements))):
            if isinstance(placements[axis], Replicate) or placements[axis].dim % dims != dim:
                continue
            factor = getattr(placements[axis], "split_factor", 1)
            later = math.prod(sizes[other] for other, _ in order)
            if factor > 1 and factor % later == 0 and later > 1:
                order.append((axis, factor // later))
            else:
                order.insert(0, (axis, factor))
        yield from order


def _views(parameter: Tensor, dim: int, boxes: Sequence[Box]) -> Iterator[Tensor]:
    local = local_part(parameter.detach())
    start = 0
    for box in boxes:
        yield local.narrow(dim, start, box.shape[dim]) if local.dim() else local
        start += box.shape[dim] if local.dim() else 0
