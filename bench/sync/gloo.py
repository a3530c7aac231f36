"""One rank of what others do: python -m bench.sync.gloo, and its orders on stdin.

    raw          one buffer, one send: the limit of the wire
    per_tensor   each parameter broadcast by itself (TRL, OpenRLHF)
    packed       parameters packed into buckets, each bucket broadcast (verl, vLLM's packed broadcast)
    shm_file     safetensors written to and read from shared memory (a broadcast by the file system)

Rank 0 is the learner and holds the whole model, which costs it nothing here: gathering it from FSDP's shards is not
counted. The others are generator ranks; all of them receive everything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from asyncrl.sync.layout.layout import whole_layout
from bench.process import DEADLINE_S, Talk
from bench.sync.model import shapes
from bench.sync.tensors import check, empty_shards, shards_of

RAW_BYTES = 256 << 20
BUCKET_BYTES = 64 << 20

Tensors = Mapping[str, torch.Tensor]


class Rank:
    def __init__(self, rank: int, world: int, rendezvous: str, millions: int, folder: Path) -> None:
        dist.init_process_group(
            "gloo",
            init_method=rendezvous,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=DEADLINE_S),
        )
        self.rank, self.folder = rank, folder
        self.groups = {sinks: dist.new_group(list(range(sinks + 1))) for sinks in range(1, world)}
        self.layout = whole_layout({name: (shape, "bfloat16") for name, shape in shapes(millions).items()})
        self.tensors = shards_of(self.layout) if rank == 0 else empty_shards(self.layout)
        self.buffer = torch.ones(max(RAW_BYTES, BUCKET_BYTES), dtype=torch.uint8)

    def run(self, method: str, sinks: int) -> dict[str, float]:
        """One round: everybody ready ▸ everybody done."""
        group = self.groups[sinks]
        dist.barrier(group)
        begun = time.monotonic()
        METHODS[method](self, group)
        ended = time.monotonic()
        if self.rank and method != "raw":
            check(self.layout, self.tensors)
            for tensor in self.tensors.values():
                tensor.zero_()
        return {"begun": begun, "ended": ended}


def raw(self: Rank, group: dist.ProcessGroup) -> None:
    data = self.buffer[:RAW_BYTES]
    if self.rank:
        dist.recv(data, 0, group=group)
    else:
        dist.send(data, 1, group=group)


def per_tensor(self: Rank, group: dist.ProcessGroup) -> None:
    for tensor in self.tensors.values():
        dist.broadcast(tensor, 0, group=group)


def packed(self: Rank, group: dist.ProcessGroup) -> None:
    filling: list[torch.Tensor] = []
    size = 0
    for tensor in self.tensors.values():
        for part in tensor.view(-1).view(torch.uint8).split(BUCKET_BYTES):
            if size + part.numel() > BUCKET_BYTES:
                _broadcast_bucket(self, filling, size, group)
                filling, size = [], 0
            filling.append(part)
            size += part.numel()
    _broadcast_bucket(self, filling, size, group)


def _broadcast_bucket(self: Rank, parts: Sequence[torch.Tensor], size: int, group: dist.ProcessGroup) -> None:
    buffer = self.buffer[:size]
    slots = buffer.split([part.numel() for part in parts])
    if self.rank == 0:
        torch._foreach_copy_(list(slots), list(parts))
    dist.broadcast(buffer, 0, group=group)
    if self.rank:
        torch._foreach_copy_(list(parts), list(slots))


def shm_file(self: Rank, group: dist.ProcessGroup) -> None:
    file = self.folder / "weights.safetensors"
    if self.rank == 0:
        save_file(dict(self.tensors), file)
    dist.barrier(group)
    if self.rank:
        with safe_open(file, "pt") as opened:
            for name, tensor in self.tensors.items():
                tensor.copy_(opened.get_tensor(name))
    dist.barrier(group)


METHODS: Mapping[str, Callable[[Rank, dist.ProcessGroup], None]] = {
    "raw": raw,
    "per_tensor": per_tensor,
    "packed": packed,
    "shm_file": shm_file,
}


def main() -> None:
    torch.set_num_threads(1)
    talk = Talk()
    said = talk.hears()
    if interface := said.get("interface"):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    rank = Rank(said["rank"], said["world"], said["rendezvous"], said["millions"], Path(said["folder"]))
    talk.tell("ready")
    while (order := talk.hears()) is not None:
        talk.tell(rank.run(order["method"], order["sinks"]))


if __name__ == "__main__":
    main()
