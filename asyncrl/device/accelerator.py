"""The accelerator that torch sees here, in the words of `torch.accelerator` (CUDA, ROCm, XPU, Ascend); else the CPU.

To count devices leaves the driver alone: on CUDA NVML answers. A process that has started CUDA cannot fork others that
use it, and vLLM forks.
"""

from __future__ import annotations

import resource
import subprocess
import sys

import msgpack
import torch
import torch.distributed as dist

from asyncrl.errors import WeightSyncError

CPU = torch.device("cpu")

CUDA = "cuda"
"""torch's type of NVIDIA's and AMD's GPUs: those that NCCL (RCCL) joins, and whose memory processes share."""


def count() -> int:
    """Accelerators that this process sees."""
    return torch.accelerator.device_count()


def kind() -> str:
    """torch's type of the accelerator: cuda, xpu, npu; "cpu" where there is none."""
    found = torch.accelerator.current_accelerator() if count() else None
    return CPU.type if found is None else found.type


def current_device() -> torch.device:
    """The accelerator that this thread uses, with its index; the CPU where there is none."""
    return torch.device(kind(), torch.accelerator.current_device_index()) if count() else CPU


def use_numbered(index: int) -> torch.device:
    """The accelerator of this index, from now on this thread's; the CPU where there is none."""
    if not count():
        return CPU
    device = torch.device(kind(), index)
    use(device)
    return device


def is_accelerator(device: torch.device) -> bool:
    """Whether work on it is queued: a call returns before it is done."""
    return device.type not in ("cpu", "meta")


def use(device: torch.device) -> None:
    """Make an accelerator this thread's; nothing for the CPU. Each new thread begins with the first one."""
    if is_accelerator(device):
        torch.get_device_module(device).set_device(device)


def wait_for_stream(device: torch.device) -> None:
    """Wait until the device has done all work of this thread's current stream."""
    if is_accelerator(device):
        torch.get_device_module(device).current_stream(device).synchronize()


def wait_for_device(device: torch.device) -> None:
    """Wait until the device has done all work of this process."""
    if is_accelerator(device):
        torch.get_device_module(device).synchronize(device)


def name(device: torch.device) -> str:
    """As its maker calls it; "CPU" for that."""
    if not is_accelerator(device):
        return "CPU"
    return str(torch.get_device_module(device).get_device_name(device))


def collective_backends(device: torch.device) -> str:
    """The backends of a process group whose ranks compute on such devices; small values travel on the CPU.

    >>> collective_backends(CPU)
    'gloo'
    """
    if not is_accelerator(device):
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def peak_memory_bytes(device: torch.device) -> int:
    """The most that was allocated on an accelerator since the last call; on the CPU the most of the process so far."""
    if is_accelerator(device):
        module = torch.get_device_module(device)
        peak = int(module.max_memory_allocated(device))
        module.reset_peak_memory_stats(device)
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of an accelerator, whoever uses it."""
    free, total = torch.get_device_module(device).mem_get_info(device)
    return int(free), int(total)


def free_cached(device: torch.device) -> None:
    """Let other processes have the memory that torch keeps for later; nothing for the CPU."""
    if is_accelerator(device):
        torch.get_device_module(device).empty_cache()


def limit_memory(device: torch.device, share: float) -> None:
    """Let this process allocate at most this share of an accelerator; nothing for the CPU."""
    if is_accelerator(device) and share < 1:
        torch.get_device_module(device).set_per_process_memory_fraction(share, device)


def total_bytes() -> int | None:
    """Memory of the first accelerator, read by another process, so that this one starts no driver; None without one."""
    if not count():
        return None
    code = "import torch; print(torch.accelerator.get_memory_info(0)[1])"
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)


# ---- memory that processes share


def pinned_memory(size: int) -> torch.Tensor:
    """[size] uint8, zeros: memory of this host that an accelerator copies to by itself. torch takes a power of two."""
    return torch.zeros(size, dtype=torch.uint8, pin_memory=True)


def shares_memory(device: torch.device) -> bool:
    """Whether other processes of this machine can open tensors on it by a handle."""
    return device.type == CUDA


def unique_name(device: torch.device) -> str:
    """The same in every process, whichever devices that sees. device: one that shares memory"""
    return str(torch.get_device_module(device).get_device_properties(device).uuid)


def unique_names() -> list[str]:
    """`unique_name` of each device, by index; none where they share no memory."""
    return [unique_name(torch.device(CUDA, index)) for index in range(count())] if kind() == CUDA else []


def memory_handle(data: torch.Tensor) -> bytes:
    """For `opened_memory`: the allocation that a view lies in, while that lives; b"" for memory that has no handle."""
    if not shares_memory(data.device):
        return b""
    _, *handle = data.untyped_storage()._share_cuda_()
    return bytes(msgpack.packb([unique_name(data.device), *handle]))


def opened_memory(handle: bytes, size: int) -> torch.Tensor:
    """[size] uint8: the allocation of another process. Raises WeightSyncError for a device that is not seen here."""
    name, *rest = msgpack.unpackb(handle)
    if name not in (names := unique_names()):
        raise WeightSyncError(f"GPU {name} cannot be seen from this process")
    index = names.index(name)
    storage = torch.UntypedStorage._new_shared_cuda(index, *rest)
    memory = torch.empty(0, dtype=torch.uint8, device=torch.device(CUDA, index))
    return memory.set_(storage, 0, (size,), (1,))
