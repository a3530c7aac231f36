"""The ranks of one learner: their devices, their process group, and small values that they exchange.

They communicate by gloo on the CPU and by NCCL between GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

COLLECTIVE_DEADLINE = timedelta(minutes=10)


def own_device() -> torch.device:
    """This rank's GPU, which torchrun's LOCAL_RANK names; the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def rank_and_world() -> tuple[int, int]:
    """(this process, the number of processes) as torchrun sets them; (0, 1) if it does not."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def join_process_group(device: torch.device, alone: bool = False) -> None:
    """Join the process group of all ranks. Small values always travel on the CPU. alone: a group of this process."""
    if dist.is_initialized():
        return
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, timeout=COLLECTIVE_DEADLINE)


def exchange(value: Any) -> list[Any]:
    """Collective: a small value from every rank, in rank order, on every rank."""
    if not dist.is_initialized():
        return [value]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def gather(mine: Tensor, sources: Sequence[int]) -> list[Tensor]:
    """Collective: a tensor from each rank of `sources`, in this order, on the CPU of every rank."""
    here = mine.detach().cpu().clone()  # pickled with the whole storage of a view otherwise
    every = exchange(here if rank_and_world()[0] in sources else None)
    return [every[rank] for rank in sources]
