"""Moving pieces between a rank's tensors and flat byte buffers, and buckets over a channel.

      sender                                   receiver
      pack i+1 ║ send i   ─────bytes────▸      recv i+1 ║ unpack i

Two buffers at each end: while one is on its way the other is filled or emptied. If a bucket has a
single piece and the piece is contiguous at an end, that end sends from, or receives into, the tensor itself. Ends that
can read each other's memory need no buffers: every piece is copied once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrl.device import accelerator
from asyncrl.sync.channels.channel import Channel, SharingChannel, Transfer
from asyncrl.sync.channels.shared_memory import shared_memory
from asyncrl.sync.plan.plan import Bucket, SourcePlan
from asyncrl.sync.tensors.shards import Shards, flat_bytes


def bucket_views(bucket: Bucket, shards: Shards) -> list[torch.Tensor]:
    """The bucket's pieces where they lie."""
    return [shards.view(piece.name, piece.box) for piece in bucket.pieces]


def pack_bucket(bucket: Bucket, shards: Shards, buffer: torch.Tensor) -> torch.Tensor:
    """Copy the bucket's pieces into `buffer` [bytes] uint8; returns the part that is to be sent."""
    queued = accelerator.is_accelerator(buffer.device)  # also from pinned memory of the host
    for piece, source in zip(bucket.pieces, bucket_views(bucket, shards), strict=True):
        room = buffer[piece.at : piece.at + piece.bytes].view(source.dtype).view(source.shape)
        room.copy_(source, non_blocking=queued)
    return buffer[: bucket.length]


def unpack_bucket(bucket: Bucket, shards: Shards, buffer: torch.Tensor) -> None:
    """The inverse of `pack_bucket`."""
    for piece, target in zip(bucket.pieces, bucket_views(bucket, shards), strict=True):
        target.copy_(buffer[piece.at : piece.at + piece.bytes].view(target.dtype).view(target.shape))


def in_place(bucket: Bucket, shards: Shards, device: torch.device) -> torch.Tensor | None:
    """The bucket's bytes where they lie in the tensor; None where they must be packed."""
    if len(bucket.pieces) > 1:
        return None
    (tensor,) = bucket_views(bucket, shards)
    return flat_bytes(tensor) if tensor.is_contiguous() and tensor.device.type == device.type else None


class Buffers:
    """The two bucket buffers of one end, made on first use and kept from version to version."""

    def __init__(self, source: SourcePlan, shards: Shards, device: torch.device) -> None:
        self._device = device
        packed = [b.length for b in source.buckets if in_place(b, shards, device) is None]
        self._size = max(packed, default=0)
        self._buffers: dict[int, torch.Tensor] = {}

    def take(self, index: int, bytes_: int = 0) -> torch.Tensor:
        """The buffer for message `index`, of at least `bytes_`: free again once message index - 2 is done."""
        buffer = self._buffers.get(index % 2)
        if buffer is None or len(buffer) < bytes_:
            size = max(self._size, bytes_)
            buffer = self._buffers[index % 2] = shared_memory(size, self._device)
        return buffer


def send_buckets(
    source: SourcePlan,
    shards: Shards,
    channel: Channel,
    buffers: Buffers,
    seconds_left: Callable[[], float],
    moved: Callable[[], None],
    ready: Callable[[int], None] = lambda index: None,
) -> None:
    """Send all of a plan. `ready(index)` is called before a bucket is read and may wait, `moved()` after it has left;
    both may raise to end the transfer.

    Raises DeadlineError and WeightSyncError of the channel.
    """
    flying: list[Transfer] = []
    for index, bucket in enumerate(source.buckets):
        if len(flying) == _ahead(channel):
            flying.pop(0).wait(seconds_left())
            moved()
        ready(index)
        if isinstance(channel, SharingChannel):
            flying.append(channel.send_parts(bucket_views(bucket, shards)))
            continue
        data = in_place(bucket, shards, channel.device)
        if data is None:
            data = pack_bucket(bucket, shards, buffers.take(index))
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
    arrived: Callable[[int], None] = lambda index: None,
) -> None:
    """Receive all of a plan into `shards`; `arrived(index)` is called when a bucket lies there.

    Raises DeadlineError and WeightSyncError of the channel.
    """

    def begin(index: int) -> tuple[torch.Tensor | None, Transfer]:
        bucket = source.buckets[index]
        if isinstance(channel, SharingChannel):
            return None, channel.recv_parts(bucket_views(bucket, shards))
        direct = in_place(bucket, shards, channel.device)
        if direct is not None:
            return None, channel.recv(direct)
        packed = buffers.take(index)[: bucket.length]
        return packed, channel.recv(packed)

    ahead = _ahead(channel)
    flying = [begin(index) for index in range(min(ahead, len(source.buckets)))]
    for index, bucket in enumerate(source.buckets):
        packed, transfer = flying.pop(0)
        transfer.wait(seconds_left())
        if packed is not None:
            unpack_bucket(bucket, shards, packed)
        arrived(index)
        if index + ahead < len(source.buckets):
            flying.append(begin(index + ahead))


def _ahead(channel: Channel) -> int:
    """The most buckets on their way: as many as there are buffers or, where none are needed, enough that the receiver
    need not wait until the sender gets a processor."""
    return 4 if isinstance(channel, SharingChannel) else 2
