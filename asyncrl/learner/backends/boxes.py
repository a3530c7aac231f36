"""A rank's boxes of checkpoint parameters, in the form that torch.distributed.checkpoint takes."""

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
from asyncrl.sync.tensors.shards import BoxTensors


class Boxes(Tensor):
    """This rank's boxes of one checkpoint parameter: live tensors, each with the shape of its box.

    torch.distributed.checkpoint saves and loads them in place. It needs a tensor of the whole shape with the three
    methods of these names; this one has no memory and supports no computation. Boxes that several ranks hold are
    written once.
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
        raise NotImplementedError(f"{function}: boxes can only be saved and loaded")

    def copied(self) -> Boxes:
        """A copy in host memory."""
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
            raise ValueError(f"{index.fqn}: one of several boxes is requested without its offset")
        return self._pieces[tuple(index.offset)][1]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.is_cpu else tensor.cpu()


def whole_bytes(layout: Layout) -> dict[str, int]:
    """The bytes of every whole parameter."""
    return {name: Box.whole(p.shape).elements * ITEM_BYTES[p.dtype] for name, p in layout.items()}


def as_one_box(param: ParamLayout, tensors: BoxTensors) -> Boxes:
    """A parameter's boxes as the single one that the writer of safetensors needs. They lie one below the other."""
    parts: Sequence[Tensor] = [tensors] if isinstance(tensors, Tensor) else tensors
    first = param.boxes[0]
    rows = sum(box.shape[0] for box in param.boxes) if first.shape else 0
    box = Box(first.offsets, (rows, *first.shape[1:])) if first.shape else first
    return Boxes(param.shape, [(box, torch.cat(list(parts)) if len(parts) > 1 else parts[0])])
