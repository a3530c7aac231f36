"""Moving pieces between a rank's tensors and flat byte buffers, and buckets over a channel.

      sender                                   receiver
      pack i+1 ║ send i   ─────bytes────▸      recv i+1 ║ unpack i

Two buffers at each end: while one is on its way the other is filled or emptied. A piece that travels alone
and lies in one stretch of memory at an end is sent from, or received into, the tensor itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.sync.layout import Box, Layout, ParamLayout
from asyncrl.sync.plan import Bucket, SourcePlan
from asyncrl.sync.transport import Channel, Transfer


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 → "bfloat16", as layouts spell it."""
    return str(dtype).removeprefix("torch.")


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as [bytes] uint8, no copy."""
    return tensor.view(-1).view(torch.uint8)


class Shards:
    """One rank's tensors, addressed by boxes in checkpoint coordinates (see `layout` for how boxes lie in
    them).

    Raises WeightSyncError, naming the parameter, when a tensor is missing or does not fit its layout.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
        self.layout = layout
        self.tensors: dict[str, torch.Tensor] = {}
        for name, param in layout.items():
            if param.elements:
                if name not in tensors:
                    raise WeightSyncError(f"parameter {name}: in the layout, but there is no tensor of it")
                self.tensors[name] = _checked(name, param, tensors[name].detach())

    @property
    def device(self) -> torch.device:
        return next((t.device for t in self.tensors.values()), torch.device("cpu"))

    def view(self, name: str, box: Box) -> torch.Tensor:
        """The elements of `box`, which one held box must contain, as a view of shape `box.shape`."""
        start = 0
        boxes = self.layout[name].boxes
        for held in boxes:
            if held.contains(box):
                local = self.tensors[name]
                if len(boxes) > 1:
                    local = local[start : start + held.elements].view(held.shape)
                return local[box.within(held).slices()]
            start += held.elements
        raise WeightSyncError(f"parameter {name}: {box} is not held here")


def _checked(name: str, param: ParamLayout, tensor: torch.Tensor) -> torch.Tensor:
    shape = param.boxes[0].shape if len(param.boxes) == 1 else (param.elements,)
    if tuple(tensor.shape) != shape or dtype_name(tensor.dtype) != param.dtype:
        raise WeightSyncError(
            f"parameter {name}: the tensor is {dtype_name(tensor.dtype)} {tuple(tensor.shape)}, "
            f"its layout says {param.dtype} {shape}"
        )
    return tensor


def pack(bucket: Bucket, shards: Shards, buffer: torch.Tensor) -> torch.Tensor:
    """Copy the bucket's pieces into `buffer` [bytes] uint8; returns the part that is to be sent."""
    for piece in bucket.pieces:
        source = shards.view(piece.name, piece.box)
        buffer[piece.at : piece.at + piece.bytes].view(source.dtype).view(source.shape).copy_(source)
    return buffer[: bucket.length]


def unpack(bucket: Bucket, shards: Shards, buffer: torch.Tensor) -> None:
    """The inverse of `pack`."""
    for piece in bucket.pieces:
        target = shards.view(piece.name, piece.box)
        target.copy_(buffer[piece.at : piece.at + piece.bytes].view(target.dtype).view(target.shape))


def in_place(bucket: Bucket, shards: Shards, device: torch.device) -> torch.Tensor | None:
    """The bucket's bytes where they lie in the tensor; None where they must be packed."""
    if len(bucket.pieces) > 1:
        return None
    tensor = shards.view(bucket.pieces[0].name, bucket.pieces[0].box)
    return flat_bytes(tensor) if tensor.is_contiguous() and tensor.device.type == device.type else None


class Buffers:
    """The two bucket buffers of one end, made on first use and kept from version to version."""

    def __init__(self, source: SourcePlan, shards: Shards, device: torch.device) -> None:
        self._device = device
        self._direct = [in_place(bucket, shards, device) is not None for bucket in source.buckets]
        packed = [b.length for b, direct in zip(source.buckets, self._direct, strict=True) if not direct]
        self._size = max(packed, default=0)
        self._buffers: dict[int, torch.Tensor] = {}

    def take(self, index: int) -> torch.Tensor:
        """The buffer for bucket `index`: free again once bucket index - 2 is done."""
        if index % 2 not in self._buffers:
            self._buffers[index % 2] = torch.empty(self._size, dtype=torch.uint8, device=self._device)
        return self._buffers[index % 2]


def send_buckets(
    source: SourcePlan,
    shards: Shards,
    channel: Channel,
    buffers: Buffers,
    seconds_left: Callable[[], float],
    moved: Callable[[], None],
) -> None:
    """Send all of a plan. `moved()` is called after each bucket and may raise to end the transfer.

    Raises DeadlineError and WeightSyncError of the channel.
    """
    flying: list[Transfer] = []
    for index, bucket in enumerate(source.buckets):
        if len(flying) == 2:
            flying.pop(0).wait(seconds_left())
            moved()
        data = in_place(bucket, shards, channel.device)
        if data is None:
            data = pack(bucket, shards, buffers.take(index))
        flying.append(channel.send(data))
    for transfer in flying:
        transfer.wait(seconds_left())
        moved()


def receive_buckets(
    source: SourcePlan,
    shards: Shards,
    channel: Channel,
    buffers: Buffers,
    seconds_left: Callable[[], float],
) -> None:
    """Receive all of a plan into `shards`. Raises DeadlineError and WeightSyncError of the channel."""

    def begin(index: int) -> tuple[torch.Tensor | None, Transfer]:
        bucket = source.buckets[index]
        direct = in_place(bucket, shards, channel.device)
        if direct is not None:
            return None, channel.recv(direct)
        packed = buffers.take(index)[: bucket.length]
        return packed, channel.recv(packed)

    flying = [begin(index) for index in range(min(2, len(source.buckets)))]
    for index, bucket in enumerate(source.buckets):
        packed, transfer = flying.pop(0)
        transfer.wait(seconds_left())
        if packed is not None:
            unpack(bucket, shards, packed)
        if index + 2 < len(source.buckets):
            flying.append(begin(index + 2))
