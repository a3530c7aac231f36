"""The ranks of one learner: their devices, their process group, and small values that they exchange.

They communicate by gloo on the CPU and by NCCL between GPUs. Values travel in msgpack, never in pickles, which could
run code of a stranger on the network of the ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from asyncrl.config.schema import Config
from asyncrl.device import accelerator
from asyncrl.errors import ConfigError
from asyncrl.learner.ranks.machine_watch import MachineWatch, begin_watch
from asyncrl.learner.ranks.queue_store import QueueRegistry, QueueStore, meet
from asyncrl.sync.channels.addresses import LOOPBACK, own_host
from asyncrl.system.rank_process import FOLDER, before_leaving, meeting, rank_and_world

log = logging.getLogger(__name__)

COLLECTIVE_DEADLINE = timedelta(minutes=10)

_kept: list[dist.Store] = []

TORCHRUN_RISK = (
    "the ranks were started by torchrun: its store listens on all interfaces without a password, and torchrun "
    "unpickles what it finds there, so whoever reaches the port can run code here; without torchrun `asyncrl learner` "
    "and `asyncrl pool` start their ranks themselves (learner.processes, placement.*.ranks; docs/security.md)"
)


def own_device() -> torch.device:
    """This rank's GPU, which LOCAL_RANK names; the CPU where there is none."""
    return accelerator.use_numbered(int(os.environ.get("LOCAL_RANK", "0")))


def join_process_group(device: torch.device, config: Config, alone: bool = False) -> None:
    """Join the process group of all ranks, where the variables of this process have them meet.

    Small values always travel on the CPU. alone: a group of this process.
    """
    if dist.is_initialized():
        return
    rank, world = rank_and_world()
    backend = accelerator.collective_backends(device)
    kind, place = meeting()
    if alone:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    elif kind:
        store = _store(kind, place, config)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=COLLECTIVE_DEADLINE
        )
        if isinstance(store, QueueStore):
            exchange(None)  # all are there
            _watch_machines(store, place, config)
    else:
        if rank == 0:
            log.warning(TORCHRUN_RISK)
        dist.init_process_group(backend, timeout=COLLECTIVE_DEADLINE)


def _store(kind: str, place: str, config: Config) -> dist.Store:
    """The store in which the ranks of one machine, or of several, exchange their addresses."""
    rank, world = rank_and_world()
    if kind == FOLDER:
        bind_gloo(LOOPBACK)
        return dist.FileStore(str(Path(place, "store")), world)
    bind_gloo(config.sync.host or own_host(config.queue.address))
    registry = QueueRegistry(config, f"{place} rank {rank}'s meeting")
    store = meet(registry, place, rank, world, COLLECTIVE_DEADLINE.total_seconds())
    # torch keeps the part in C++ alone, which needs the Python object when groups are made later.
    _kept.append(store)
    return store


def _watch_machines(store: QueueStore, name: str, config: Config) -> None:
    """The first rank of each machine watches another machine, which may wait for the queue for queue.deadline_s."""
    rank, world = rank_and_world()
    deadline_s = max(config.launch.rank_deadline_s, config.queue.deadline_s)
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    if rank % here == 0:
        before_leaving(begin_watch(MachineWatch(store, name, rank // here, world // here, deadline_s)))


def bind_gloo(address: str) -> None:
    """Make gloo listen on the interface of this address alone. GLOO_SOCKET_IFNAME, where it is set, names another."""
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in found):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            return
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        rule = "no interface of this machine has this address, so that gloo cannot listen there"
        raise ConfigError("sync.host", address, rule, "set GLOO_SOCKET_IFNAME to the interface's name")


def exchange(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Collective: a small msgpack-able value from every rank, in rank order, on every rank. group: joins all ranks, for
    a thread that exchanges values while another one does."""
    if _alone():
        return [value]
    packed = torch.frombuffer(bytearray(msgpack.packb(value)), dtype=torch.uint8)
    return [msgpack.unpackb(message.numpy().tobytes()) for message in _gather_bytes(packed, group)]


def gather(mine: Tensor, sources: Sequence[int]) -> list[Tensor]:
    """Collective: a tensor from each rank of `sources`, in this order, on the CPU of every rank. All have one dtype;
    sizes of dimension 0 may differ."""
    here = mine.detach().cpu().contiguous()
    if _alone():
        return [here]
    sent = here if dist.get_rank() in sources else here[:0]
    every = _gather_bytes(sent.reshape(-1).view(torch.uint8))
    return [every[rank].view(here.dtype).reshape(-1, *here.shape[1:]) for rank in sources]


def all_max(tensor: Tensor) -> None:
    """Collective: the largest of all ranks, element by element, in place."""
    if not _alone():
        dist.all_reduce(tensor, dist.ReduceOp.MAX)


def broadcast(message: bytes | None) -> bytes:
    """Collective: the message of rank 0, on every rank. The others give None."""
    length = torch.tensor([0 if message is None else len(message)])
    dist.broadcast(length, 0)
    content = bytearray(int(length)) if message is None else bytearray(message)
    dist.broadcast(torch.frombuffer(content, dtype=torch.uint8), 0)
    return bytes(content)


def _alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _gather_bytes(mine: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """uint8 of any length from every rank, in rank order."""
    world = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
    longest = max(int(size) for size in sizes)
    every = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(every, nn.functional.pad(mine, (0, longest - len(mine))), group=group)
    return [padded[: int(size)] for padded, size in zip(every, sizes, strict=True)]
