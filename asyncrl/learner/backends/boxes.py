"""What a rank has of checkpoint parameters, box by box, as torch.distributed.checkpoint takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from asyncrl.sync.layout.layout import ITEM_BYTES, Box, Layout, ParamLayout
from asyncrl.sync.tensors.bucket import BoxTensors


class Boxes(Tensor):
    """What this rank has of one checkpoint parameter: live tensors, each of the shape of its box.

    Saved and loaded in place by torch.distributed.checkpoint, which wants a tensor of the whole shape and asks it for
    the three methods by these names. It has no memory of its own, and nothing can be computed with it. Boxes that
    several ranks have alike are written once.
    """

    _pieces: dict[tuple[int, ...], tuple[Box, Tensor]]

    @staticmethod
    def __new__(cls, shape: Sequence[int], pieces: Sequence[tuple[Box, Tensor]]) -> Boxes:
        first = pieces[0][1]
        whole = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=first.dtype, device=first.device)
        whole._pieces = {box.offsets: (box, tensor) for box, tensor in pieces}
        return whole

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{function}: boxes are saved and loaded, no more")

    def copied(self) -> Boxes:
        """What it holds now, in the memory of the CPU."""
        return Boxes(self.size(), [(box, _copied(tensor)) for box, tensor in self._pieces.values()])

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(next(iter(self._pieces.values()))[1])
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for offsets, chunk in zip(self._pieces, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        boxes = (box for box, _ in self._pieces.values())
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape)) for box in boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if index.offset is None:
            raise ValueError(f"{index.fqn}: one of several boxes is asked for without its offset")
        return self._pieces[tuple(index.offset)][1]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_cpu else tensor.cpu()


def whole_bytes(layout: Layout) -> dict[str, int]:
    """Of every parameter, whoever has it."""
    return {name: Box.whole(p.shape).elements * ITEM_BYTES[p.dtype] for name, p in layout.items()}


def joined(param: ParamLayout, tensors: BoxTensors) -> Boxes:
    """The boxes of a parameter lie one below the other: as a single one, as the writer of safetensors wants them."""
    parts: Sequence[Tensor] = [tensors] if isinstance(tensors, Tensor) else tensors
    first = param.boxes[0]
    rows = sum(box.shape[0] for box in param.boxes) if first.shape else 0
    box = Box(first.offsets, (rows, *first.shape[1:])) if first.shape else first
    return Boxes(param.shape, [(box, torch.cat(list(parts)) if len(parts) > 1 else parts[0])])
