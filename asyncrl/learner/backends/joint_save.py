"""A collective save by one of torch's writers. The ranks exchange their plans in msgpack, where torch sends pickles.

every rank   what it holds ──┐                     ┌─▸ write ─▸ where it lies ──┐
rank 0                       └─▸ who writes what ──┘                            └─▸ metadata
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from asyncrl.learner.backends.checkpoint_reader import DTYPES
from asyncrl.learner.ranks import process_group

Wire = list[Any]


def save_jointly(
    state: Mapping[str, Any], writer: FileSystemWriter, group: ProcessGroup | None = None
) -> None:
    """Collective: write the tensors of all ranks' states; those that several ranks hold once. Raises what this rank's
    disk raises, OSError where only another rank could not write."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    planner, metadata = DefaultSavePlanner(), list[Metadata]()

    def plan() -> list[Wire]:
        planner.set_up_planner(dict(state), writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        return [_item_to_wire(item) for item in writer.prepare_local_plan(planner.create_local_plan()).items]

    def share(every: Sequence[Sequence[Wire]]) -> list[list[Wire]]:
        plans, found = planner.create_global_plan([_plan(items) for items in every])
        metadata.append(found)
        return [[_item_to_wire(item) for item in each.items] for each in plans]

    def write(items: Sequence[Wire]) -> list[Wire]:
        plans = [SavePlan([])] * rank + [_plan(items)] + [SavePlan([])] * (world - rank - 1)
        mine = planner.finish_plan(writer.prepare_global_plan(plans)[rank])
        with _archive_errors():
            return [_result_to_wire(result) for result in writer.write_data(mine, planner).wait()]

    held = _on_all(plan, group)
    shares = _on_all(lambda: share(held) if rank == 0 else [], group)[0]
    written = _on_all(lambda: write(shares[rank]), group)
    results = [[_result(wire) for wire in theirs] for theirs in written]
    _on_all(lambda: writer.finish(metadata[0], results) if rank == 0 else None, group)


@contextmanager
def _archive_errors() -> Iterator[None]:
    """A disk that is full as OSError: torch's archive raises a RuntimeError of its own while it handles that."""
    try:
        yield
    except RuntimeError as error:
        cause = error.__context__
        raise (cause if isinstance(cause, OSError) else OSError(errno.EIO, str(error))) from error


def _on_all(work: Callable[[], Any], group: ProcessGroup | None) -> list[Any]:
    """Collective: what the work returns on each rank. Raises its error; OSError where only another rank had one."""
    value, failure = None, None
    try:
        value = work()
    except Exception as error:
        failure = error
    every = process_group.exchange([failure is None, value], group)
    if failure is not None:
        raise failure
    if not all(done for done, _ in every):
        raise OSError(errno.EIO, "another rank could not write its part")
    return [theirs for _, theirs in every]


def _plan(items: Sequence[Wire]) -> SavePlan:
    made = [_item(item) for item in items]
    return SavePlan(made, planner_data={item.index.fqn: (item.index.fqn,) for item in made})


def _item_to_wire(item: WriteItem) -> Wire:
    data = item.tensor_data
    if data is None:
        raise TypeError(f"{item.index.fqn} is no tensor")
    dtype = str(data.properties.dtype).removeprefix("torch.")
    box = [list(data.chunk.offsets), list(data.chunk.sizes), list(data.size)]
    return [_index_to_wire(item.index), item.type.name, dtype, *box]


def _item(wire: Wire) -> WriteItem:
    index, kind, dtype, offsets, sizes, whole = wire
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=DTYPES[dtype]), torch.Size(whole))
    return WriteItem(MetadataIndex(*index), WriteItemType[kind], tensor_data=data)


def _index_to_wire(index: MetadataIndex) -> Wire:
    return [index.fqn, None if index.offset is None else list(index.offset), index.index]


def _result_to_wire(result: WriteResult) -> Wire:
    place = result.storage_data
    return [
        _index_to_wire(result.index),
        result.size_in_bytes,
        place.relative_path,
        place.offset,
        place.length,
    ]


def _result(wire: Wire) -> WriteResult:
    index, size, *place = wire
    return WriteResult(MetadataIndex(*index), size, _StorageInfo(*place))
