"""The device under this process: how fast it multiplies, and how much memory it has needed."""

from __future__ import annotations

import resource
import sys
import time

import torch

SIZES = {"cpu": 768, "cuda": 8192}
"""Sizes of the square matrices whose product is timed: about 20 ms of one core, 2 ms of an H100."""

ROUNDS = 5


def this_device() -> torch.device:
    """The GPU that is current, where there is one."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def measured_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of the best of a few products of large square matrices, with the threads of this process."""
    size = SIZES[device.type]
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(ROUNDS):
        _finish(device)
        begun = time.perf_counter()
        left @ right
        _finish(device)
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


def peak_memory_bytes(device: torch.device) -> int:
    """On a GPU the most that was allocated there since the last call; on the CPU the most of the process so far."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
