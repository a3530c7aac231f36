"""Memory that other processes of this host can map: a tensor in it is sent as the place where it lies.

    tensor = shared_memory(bytes)
        any views of it ─▸ described(views) = (segment, [byte of the first in the segment, its strides, byte of the …])
                              │   segment.fd or memory_handle(view), and the numbers, over a socket
                              └──▸ views(mapped(…), …) = the same tensors there; both sides know shapes and dtypes

On the CPU a segment is a memfd (Linux). It has no name, so that nothing is left behind however its owners end, and its
size is sealed, so that nobody can cut it short under a reader. On a GPU it is an allocation with a CUDA IPC handle, by
torch's own sharing of storages; this has not run on a GPU yet.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from asyncrl.device import accelerator
from asyncrl.errors import WeightSyncError


def _available() -> bool:
    try:
        os.close(os.memfd_create("asyncrl-probe"))
    except (AttributeError, OSError):
        return False
    return True


AVAILABLE = _available()
"""Whether this system has such memory. Elsewhere `shared_memory` gives plain memory, and `shm` channels are refused."""


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """`size` bytes of this process. fd: of the memfd; -1 on a GPU."""

    number: int
    start: int
    size: int
    fd: int


_segments: dict[int, SharedSegment] = {}
_numbers = itertools.count(1)


def shared_memory(size: int, device: torch.device = accelerator.CPU) -> torch.Tensor:
    """[size] uint8, zeros. It lives as long as any view of it, here or in a process that has mapped it.

    Raises OSError when there is not as much memory.
    """
    if size == 0 or not AVAILABLE:
        return torch.zeros(size, dtype=torch.uint8, device=device)
    if accelerator.is_accelerator(device):
        fd, memory = -1, torch.zeros(size, dtype=torch.uint8, device=device)
    else:
        fd = _sealed_memfd(size)
        memory = _map(fd, size)
    segment = SharedSegment(next(_numbers), memory.data_ptr(), size, fd)
    _segments[segment.number] = segment
    weakref.finalize(memory.untyped_storage(), _forget, segment).atexit = False
    return memory


def allocated_bytes() -> int:
    """Total of the memory that this process has from `shared_memory` now."""
    return sum(segment.size for segment in _segments.values())


def located(data: torch.Tensor) -> tuple[SharedSegment, int] | None:
    """The segment that a contiguous tensor lies in, and at which byte; None for plain memory."""
    at, size = data.data_ptr(), data.nbytes
    for segment in list(_segments.values()):
        if segment.start <= at and at + size <= segment.start + segment.size:
            return segment, at - segment.start
    return None


def mapped(size: int, fd: int, handle: bytes) -> torch.Tensor:
    """[size] uint8: a segment of another process. `fd` may be closed afterwards.

    Raises WeightSyncError for a file that is no such segment, or for a GPU that cannot be seen from here.
    """
    if fd < 0:
        return accelerator.opened_memory(handle, size)
    sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    if not sealed or os.fstat(fd).st_size < size:
        raise WeightSyncError(f"not a shared segment of {size} bytes")
    return _map(fd, size)


def described(parts: Sequence[torch.Tensor]) -> tuple[SharedSegment, list[int]] | None:
    """(the segment that all of them lie in, the numbers); None if one does not."""
    found = located(parts[0][(0,) * parts[0].dim()])
    if found is None:
        return None
    segment, numbers = found[0], []
    for part in parts:
        offset = part.data_ptr() - segment.start
        if not 0 <= offset <= segment.size - _span(part.shape, part.stride()) * part.element_size():
            return None
        numbers += [offset, *part.stride()]
    return segment, numbers


def shared_views(
    memory: torch.Tensor, like: Sequence[torch.Tensor], numbers: Sequence[int]
) -> list[torch.Tensor]:
    """Over `memory` [bytes] uint8, of the shapes and dtypes of `like`.

    Raises WeightSyncError for numbers that are not of as many tensors, or lead out of the memory.
    """
    if len(numbers) != sum(1 + tensor.dim() for tensor in like):
        raise WeightSyncError(f"{len(numbers)} numbers came for the places of {len(like)} tensors")
    elements = {dtype: _elements(memory, dtype) for dtype in {tensor.dtype for tensor in like}}
    found, at = [], 0
    for tensor in like:
        offset, *strides = numbers[at : at + 1 + tensor.dim()]
        at += 1 + tensor.dim()
        item, span = tensor.element_size(), _span(tensor.shape, strides)
        inside = min(offset, *strides, 0) >= 0 and max(0, *strides, offset + span * item) <= len(memory)
        if not inside or offset % item:
            raise WeightSyncError(
                f"a tensor at byte {offset} with strides {strides} of a segment of {len(memory)}"
            )
        found.append(elements[tensor.dtype].as_strided(tensor.shape, strides, offset // item))
    return found


def _elements(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _sealed_memfd(size: int) -> int:
    fd = os.memfd_create("asyncrl-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, size)  # an error here, rather than a signal at the first touch
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


def _map(fd: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)


def _forget(segment: SharedSegment) -> None:
    _segments.pop(segment.number, None)
    if segment.fd >= 0:
        os.close(segment.fd)
