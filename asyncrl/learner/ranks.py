"""The ranks of one learner: their devices, their process group, and small values that they exchange.

They communicate by gloo on the CPU and by NCCL between GPUs. Values travel in msgpack, never in pickles, which could
run code of a stranger on the network of the ranks; torch.distributed.checkpoint alone sends pickles among them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor, nn

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
    """Collective: a small msgpack-able value from every rank, in rank order, on every rank."""
    if _alone():
        return [value]
    packed = torch.frombuffer(bytearray(msgpack.packb(value)), dtype=torch.uint8)
    return [msgpack.unpackb(message.numpy().tobytes()) for message in _gather_bytes(packed)]


def gather(mine: Tensor, sources: Sequence[int]) -> list[Tensor]:
    """Collective: a tensor from each rank of `sources`, in this order, on the CPU of every rank. All have one dtype;
    sizes of dimension 0 may differ."""
    here = mine.detach().cpu().contiguous()
    if _alone():
        return [here]
    sent = here if dist.get_rank() in sources else here[:0]
    every = _gather_bytes(sent.reshape(-1).view(torch.uint8))
    return [every[rank].view(here.dtype).reshape(-1, *here.shape[1:]) for rank in sources]


def broadcast(message: bytes | None) -> bytes:
    """Collective: the message of rank 0, on every rank. The others give None."""
    length = torch.tensor([0 if message is None else len(message)])
    dist.broadcast(length, 0)
    content = bytearray(int(length)) if message is None else bytearray(message)
    dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), 0)
    return bytes(content)


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _gather_bytes(mine: Tensor) -> list[Tensor]:
    """uint8 of any length from every rank, in rank order."""
    world = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    longest = max(int(size) for size in sizes)
    every = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(every, nn.functional.pad(mine, (0, longest - len(mine))))
    return [padded[: int(size)] for padded, size in zip(every, sizes, strict=True)]
