"""Context parallelism: the ranks of a group share every micro-batch, each computes a part of its packed tokens.

    documents                  a a a a a a a b b c c -      padded to equal slices by one that nobody trains on
    rank, ulysses              0 0 0 0 0 0 1 1 1 1 1 1
    rank, all_gather           0 0 0 1 1 1 1 1 1 0 0 0

Everything but attention knows of one token at a time. Attention looks back beyond the slice, in one of two ways:

    ulysses      all-to-all: each rank gets all tokens for its part of the heads, and gives the results back. No more
                 ranks than there are query heads; fewer key heads are repeated.
    all_gather   each rank gets the keys and values of all tokens, for its own queries. Any number of ranks; moves less
                 where key heads are few. The later a slice of a long document the more it looks back at, so each rank
                 has an early and a late one.

What the ranks say of their tokens is put together to all N (`whole`), so a loss sees what it sees on one rank.
Ulysses: Jacobs et al. 2023, arXiv:2309.14509.

Axes:  N packed tokens, padding included · n of them on this rank · H heads · h of them on this rank · E head size
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from asyncrl.learner.parallel.all_to_all import all_to_all
from asyncrl.learner.parallel.tp_collectives import gathered, summed


@dataclass(frozen=True)
class ContextParallel:
    """Who shares the sequences with this rank, and how attention looks beyond its slice."""

    group: ProcessGroup
    way: Literal["ulysses", "all_gather"]

    @property
    def multiple(self) -> int:
        """Slices of all ranks: what packed tokens are padded to a multiple of."""
        return self.group.size() * (1 if self.way == "ulysses" else 2)

    def spans(self, tokens: int) -> list[slice]:
        """This rank's slices of so many packed tokens, which divide equally."""
        rank, size = self.group.rank(), tokens // self.multiple
        places = [rank] if self.way == "ulysses" else [rank, self.multiple - 1 - rank]
        return [slice(size * place, size * (place + 1)) for place in places]

    def whole(self, part: Tensor) -> Tensor:
        """What the ranks have filled in, each some of it, 0 elsewhere. To be used alike on every rank."""
        return summed(part, self.group)

    def heads_of_all_tokens(self, x_nHE: Tensor) -> Tensor:
        """[N, h, E]: this rank's heads of all tokens. H is a multiple of the ranks, see `repeated`."""
        by_rank = x_nHE.unflatten(1, (self.group.size(), -1)).transpose(0, 1)
        return all_to_all(by_rank.flatten(0, 1), self.group)

    def tokens_of_all_heads(self, x_NhE: Tensor) -> Tensor:
        """[n, H, E]: the inverse of `heads_of_all_tokens`."""
        every = all_to_all(x_NhE, self.group)
        return every.unflatten(0, (self.group.size(), -1)).transpose(0, 1).flatten(1, 2)

    def repeated(self, x_nKE: Tensor) -> Tensor:
        """Key or value heads, each as often as it takes for every rank to get equally many."""
        return x_nKE.repeat_interleave(self.group.size() // math.gcd(x_nKE.shape[1], self.group.size()), 1)

    def all_tokens(self, x_nKE: Tensor) -> Tensor:
        """[N, K, E]. Every rank has an early and a late slice."""
        early, late = gathered(x_nKE[None], self.group)[0].unflatten(0, (self.group.size(), 2, -1)).unbind(1)
        return torch.cat([early.flatten(0, 1), late.flip(0).flatten(0, 1)])
