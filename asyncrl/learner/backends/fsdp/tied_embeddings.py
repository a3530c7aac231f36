"""A token table that is also the head, on two pipeline stages: the first looks tokens up in it, the last computes
logits with it. Each has a copy and accumulates its own part of the gradient.

    first stage   a ──┐                       ┌── a + b ─▸ optimizer step
                      ├─ once a step, `join` ─┤                            equal on both, so the copies stay equal
    last stage    b ──┘                       └── a + b ─▸ optimizer step
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.learner.parallel.mesh import local_part


class TiedEmbedding:
    """One of the two copies.

    Args:
        master: this stage's copy, sharded as on the other stage.
        group: the pipeline's ranks, first to last.
    """

    def __init__(self, master: Tensor, group: dist.ProcessGroup) -> None:
        self._master, self._group = master, group
        self._first = dist.get_rank(group) == 0
        self._other = dist.get_world_size(group) - 1 if self._first else 0
        self._joined = False

    @property
    def repeated(self) -> Tensor | None:
        """The gradient that the first stage has too and that is counted there; None on the first stage."""
        return None if self._first else self._master.grad

    def begin(self) -> None:
        """To be called before more gradient is added: a joined gradient remains on the first stage alone."""
        if self._joined and not self._first:
            self._master.grad = None
        self._joined = False

    @torch.no_grad()
    def join(self) -> None:
        """Collective: give both stages the sum of their gradients. Further calls do nothing."""
        if self._joined or self._master.grad is None:  # then the other stage has no gradient either
            return
        self._joined = True
        mine = local_part(self._master.grad)
        if mine.numel() == 0:
            return
        theirs = torch.empty_like(mine)
        for sends in (self._first, not self._first):
            if sends:
                dist.send(mine, group=self._group, group_dst=self._other)
            else:
                dist.recv(theirs, group=self._group, group_src=self._other)
        mine += theirs
