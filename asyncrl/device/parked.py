"""Tensors whose memory is given up for a while: their contents wait in host memory, or in files.

    park   contents ──▸ elsewhere, storage freed        fetch   storage allocated, contents ◂── elsewhere

The tensors stay the same objects, so that views of them, and whoever holds one, see them again after `fetch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl.device import accelerator


def host_room(like: Tensor) -> Tensor:
    """Memory of the host for a copy of a tensor: pinned, if that is on an accelerator."""
    return torch.empty_like(like, device="cpu", pin_memory=accelerator.is_accelerator(like.device))


class ParkedTensors:
    """room: allocates the memory elsewhere for one tensor; it is used again at each parking of equal tensors"""

    def __init__(self, room: Callable[[Tensor], Tensor] = host_room) -> None:
        self._room = room
        self._elsewhere: list[Tensor] = []
        self._parked: list[tuple[Tensor, Tensor]] = []

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors away that share no memory with one another, unless some are parked already. Raises OSError for a
        full disk."""
        if self._parked:
            return
        every = list(tensors)
        if [(t.shape, t.dtype) for t in every] != [(e.shape, e.dtype) for e in self._elsewhere]:
            self._elsewhere = [self._room(tensor) for tensor in every]
        for tensor, elsewhere in zip(every, self._elsewhere, strict=True):
            elsewhere.copy_(tensor)
            tensor.untyped_storage().resize_(0)
        self._parked = list(zip(every, self._elsewhere, strict=True))

    def fetch(self) -> None:
        """Move what is parked back, bit for bit."""
        for tensor, elsewhere in self._parked:
            tensor.untyped_storage().resize_(elsewhere.untyped_storage().nbytes())
            tensor.copy_(elsewhere)
        self._parked = []


@torch.no_grad()
def storages_of(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The memory of tensors as bytes, once where several share it, a DTensor's of this rank. Mapped files and shared
    memory, which cannot be given up, are left out."""
    seen = set[int]()
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes() and storage.resizable() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage)
