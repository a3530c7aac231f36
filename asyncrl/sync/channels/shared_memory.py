"""Memory that other processes of this host can map: what lies in it is sent by telling where it lies.

    tensor = shared_memory(bytes)
        any view of it ─▸ located(view) = (segment, offset)
                             └── segment.fd or cuda_handle(view), over a socket ─▸ mapped(…) = the same bytes there

On the CPU a segment is a memfd (Linux). It has no name, so that nothing is left behind however its owners end, and its
size is sealed, so that nobody can cut it short under a reader. On a GPU it is an allocation with a CUDA IPC handle, by
torch's own sharing of storages; that part has not been run.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import weakref
from dataclasses import dataclass

import msgpack
import torch

from asyncrl.errors import WeightSyncError


def _available() -> bool:
    try:
        os.close(os.memfd_create("asyncrl-probe"))
    except (AttributeError, OSError):
        return False
    return True


AVAILABLE = _available()
"""Whether this system has such memory. Elsewhere `shared_memory` gives plain memory, and `shm` channels are refused."""

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class SharedSegment:
    """`size` bytes of this process. fd: of the memfd, -1 on a GPU."""

    number: int
    start: int
    size: int
    fd: int


_segments: dict[int, SharedSegment] = {}
_numbers = itertools.count(1)


def shared_memory(size: int, device: torch.device = CPU) -> torch.Tensor:
    """[size] uint8, zeros. It lives as long as any view of it, here or in a process that has mapped it.

    Raises OSError when there is not as much memory.
    """
    if size == 0 or not AVAILABLE:
        return torch.zeros(size, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        fd, memory = -1, torch.zeros(size, dtype=torch.uint8, device=device)
    else:
        fd = _sealed_memfd(size)
        memory = _map(fd, size)
    segment = SharedSegment(next(_numbers), memory.data_ptr(), size, fd)
    _segments[segment.number] = segment
    weakref.finalize(memory.untyped_storage(), _forget, segment).atexit = False
    return memory


def allocated_bytes() -> int:
    """Of all the memory that this process has from `shared_memory` now."""
    return sum(segment.size for segment in _segments.values())


def located(data: torch.Tensor) -> tuple[SharedSegment, int] | None:
    """The segment that a contiguous tensor lies in, and at which byte; None for plain memory."""
    at, size = data.data_ptr(), data.numel() * data.element_size()
    for segment in list(_segments.values()):
        if segment.start <= at and at + size <= segment.start + segment.size:
            return segment, at - segment.start
    return None


def mapped(size: int, fd: int, handle: bytes) -> torch.Tensor:
    """[size] uint8: a segment of another process. `fd` may be closed afterwards.

    Raises WeightSyncError for a file that is no such segment, or for a GPU that cannot be seen from here.
    """
    if fd < 0:
        return _mapped_cuda(size, handle)
    sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    if not sealed or os.fstat(fd).st_size < size:
        raise WeightSyncError(f"not a shared segment of {size} bytes")
    return _map(fd, size)


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


def gpu_name(index: int) -> str:
    """The same for every process, whatever CUDA_VISIBLE_DEVICES says."""
    return str(torch.cuda.get_device_properties(index).uuid)


def visible_gpus() -> list[str]:
    """`gpu_name` of each device, by index."""
    return [gpu_name(index) for index in range(torch.cuda.device_count())]


def cuda_handle(data: torch.Tensor) -> bytes:
    """For `mapped`: opens the allocation that a view lies in, while that lives; b"" on the CPU."""
    if data.device.type != "cuda":
        return b""
    index, *handle = data.untyped_storage()._share_cuda_()
    return bytes(msgpack.packb([gpu_name(index), *handle]))


def _mapped_cuda(size: int, handle: bytes) -> torch.Tensor:
    name, *rest = msgpack.unpackb(handle)
    if name not in (names := visible_gpus()):
        raise WeightSyncError(f"GPU {name} cannot be seen from this process")
    index = names.index(name)
    storage = torch.UntypedStorage._new_shared_cuda(index, *rest)
    memory = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index))
    return memory.set_(storage, 0, (size,), (1,))
