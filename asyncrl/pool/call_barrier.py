"""The calls of a learner that trains a model of this pool. Each is due once every rank of the learner has made it.

rank 0   batch · batch · learn 0 ──────── norm 1 ─▸ ┐
rank 1   batch · learn 0 ── norm 1 ───────────────▸ ├─▸ learn 0 (batches of rank 0, then of rank 1) ▸ norm 1
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from asyncrl.errors import RefusedError, WireError

Ticket = TypeVar("Ticket")
Frames = list[bytes]

MAX_RANKS = 1 << 16


@dataclass(slots=True)
class BarrierCall(Generic[Ticket]):
    """batches, tickets: of the ranks that have made the call"""

    kind: str
    arguments: Mapping[str, Any]
    batches: dict[int, list[Frames]] = field(default_factory=dict)
    tickets: dict[int, Ticket] = field(default_factory=dict)


class CallBarrier(Generic[Ticket]):
    """The calls of one learner of `world` ranks. A ticket is the address of the reply to one rank."""

    def __init__(self, world: int) -> None:
        if not 0 < world <= MAX_RANKS:
            raise WireError(f"a learner of {world} ranks")
        self._world = world
        self._next = [0] * world  # the number of each rank's next call
        self._batches: list[list[Frames]] = [[] for _ in range(world)]
        self._due: dict[int, BarrierCall[Ticket]] = {}

    def batch(self, rank: int, number: int, frames: Frames) -> None:
        """Add a batch to the rank's next call. Raises WireError for another call."""
        self._check(rank, number)
        self._batches[rank].append(frames)

    def call(
        self,
        rank: int,
        number: int,
        kind: str,
        arguments: Mapping[str, Any],
        ticket: Ticket,
        batches: int = 0,
    ) -> BarrierCall[Ticket] | None:
        """Note that a rank has made a call.

        Args:
            batches: number of batches that the rank has sent for it

        Returns:
            The call, if all ranks have made it now.

        Raises:
            WireError: it is out of order, or batches are missing
            RefusedError: ("disagree") another rank has made another call
        """
        self._check(rank, number)
        if len(self._batches[rank]) != batches:
            raise WireError(
                f"{kind} {number} of rank {rank}: {len(self._batches[rank])} of {batches} batches"
            )
        call = self._due.setdefault(number, BarrierCall(kind, arguments))
        if call.kind != kind or not _same(call.arguments, arguments):
            raise RefusedError(
                "disagree",
                f"call {number}: rank {rank} makes {kind} {arguments}, another {call.kind} {call.arguments}",
            )
        call.batches[rank], call.tickets[rank] = self._batches[rank], ticket
        self._batches[rank] = []
        self._next[rank] += 1
        return self._due.pop(number) if len(call.tickets) == self._world else None

    def _check(self, rank: int, number: int) -> None:
        if not 0 <= rank < self._world:
            raise WireError(f"rank {rank} of a learner of {self._world}")
        if number != self._next[rank]:
            raise WireError(f"call {number} of rank {rank}, whose next is {self._next[rank]}")


def _same(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Equal; NaN equals NaN, as a scale that ranks agree on."""
    return mine.keys() == theirs.keys() and all(
        mine[name] == theirs[name] or (mine[name] != mine[name] and theirs[name] != theirs[name])
        for name in mine
    )
