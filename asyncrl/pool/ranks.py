"""The ranks that one model of a pool is split over: rank 0 talks with the queue, the others follow it.

    rank 0   broadcast(message) ──▸ its share ──▸ total
    others   receive() ──────────▸ their share ──▸ total      until the last message

Between messages rank 0 sends heartbeats, so that the others need not know how long the queue may be empty.
"""

from __future__ import annotations

import os
import threading

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.learner.ranks import COLLECTIVE_DEADLINE, join_process_group, own_device

HEARTBEAT_S = COLLECTIVE_DEADLINE.total_seconds() / 10

CLOSE_S = 10.0
"""Longest wait, at the end, for a message that is still being worked on."""

LAST, HEARTBEAT = -1, 0
"""Sent in place of a message's length."""


class ModelRanks:
    """RANK and WORLD_SIZE as torchrun sets them (neither set: one process).

    turn    a thread of rank 0 holds it from its broadcast until the work on the message is done
    """

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.device = own_device()
        self.turn = threading.Lock()
        self._over = threading.Event()
        if self.world > 1:
            join_process_group(self.device)
            if self.rank == 0:
                threading.Thread(target=self._send_heartbeats, name="pool heartbeats", daemon=True).start()

    def broadcast(self, message: bytes) -> None:
        """Rank 0 of several, with the `turn`: send to all others."""
        dist.broadcast(torch.tensor([len(message)]), 0)
        dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0)

    def receive(self) -> bytes | None:
        """The others: the next message; None after the last one."""
        while True:
            length = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(length, 0)
            if int(length) == LAST:
                return None
            if int(length) != HEARTBEAT:
                message = torch.zeros(int(length), dtype=torch.uint8)
                dist.broadcast(message, 0)
                return message.numpy().tobytes()

    def total(self, mine: Tensor) -> Tensor:
        """Collective: the sum over ranks of tensors of one shape on the CPU."""
        if self.world > 1:
            dist.all_reduce(mine)
        return mine

    def close(self) -> None:
        """Rank 0: announce the end. While a message is still being worked on, the others end with this process."""
        self._over.set()
        if self.world > 1 and self.rank == 0 and self.turn.acquire(timeout=CLOSE_S):
            dist.broadcast(torch.tensor([LAST]), 0)

    def _send_heartbeats(self) -> None:
        while not self._over.wait(HEARTBEAT_S):
            with self.turn:
                if not self._over.is_set():
                    dist.broadcast(torch.tensor([HEARTBEAT]), 0)
