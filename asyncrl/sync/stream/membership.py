"""The generators that follow a learner: which version each holds, and which one it takes the next version from. Rank 0
keeps this; pure.

      join ─▸ member ── route? ─▸ its parent in the tree, or the learner
               │  ▴ held v         (an acknowledgement: flipped and verified)
      leave ◂──┘  └─ report: its parent failed ─▸ the parent gets no children until it holds a later version
      fenced: silent for too long; it must join anew

Generators request a route for each version, so nobody need be notified when the members change.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.errors import RefusedError
from asyncrl.sync.plan.tree import Links, Member, assign, leave
from asyncrl.types import NO_VERSION, Version

MOST_MEMBERS = 1 << 14


@dataclass(frozen=True, slots=True)
class Joined:
    """bytes: of one version · endpoint: of its relay; None: it has none"""

    member: Member
    bytes: int
    endpoint: str | None

    def __post_init__(self) -> None:
        if self.bytes < 0:
            raise ValueError(f"{self.member.who} takes {self.bytes} bytes")


@dataclass(slots=True)
class _Entry:
    joined: Joined
    seen_at: float
    held: Version = NO_VERSION
    reported_at: Version | None = None  # what the member held when a child reported that it failed


class Membership:
    """The members of one publisher. host: the learner's; members there take from it directly unless `fanout` is set."""

    def __init__(
        self,
        host: str,
        bucket_bytes: int,
        links: Links,
        fanout: int | None,
        silence_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host, self._bucket_bytes, self._links, self._fanout = host, bucket_bytes, links, fanout
        self._silence_s, self._clock = silence_s, clock
        self._entries: dict[str, _Entry] = {}
        self._order: list[Member] = []  # places in the tree
        self._parents: dict[str, str | None] | None = None  # None: members changed since
        self._fenced = self._reports = 0

    def join(self, joined: Joined) -> None:
        """A new member, or an old one anew: what it held before is forgotten. Raises RefusedError("full")."""
        self.leave(joined.member.who)
        if len(self._entries) >= MOST_MEMBERS:
            raise RefusedError("full", f"there are {MOST_MEMBERS} members already")
        self._entries[joined.member.who] = _Entry(joined, self._clock())
        self._order.append(joined.member)
        self._parents = None

    def leave(self, who: str) -> None:
        if self._entries.pop(who, None) is not None:
            self._order = leave(self._order, who)
            self._parents = None

    def seen(self, who: str) -> bool:
        """Whether `who` is a member, which by this is not silent."""
        entry = self._entries.get(who)
        if entry is not None:
            entry.seen_at = self._clock()
        return entry is not None

    def fence(self) -> list[str]:
        """Those silent for too long are members no longer."""
        since = self._clock() - self._silence_s
        silent = [who for who, entry in self._entries.items() if entry.seen_at < since]
        for who in silent:
            self.leave(who)
        self._fenced += len(silent)
        return silent

    def held(self, who: str, version: Version) -> None:
        """`who` has flipped to a version and verified it."""
        entry = self._entries[who]
        entry.held = version
        if entry.reported_at is not None and version > entry.reported_at:
            entry.reported_at, self._parents = None, None

    def report(self, parent: str) -> None:
        """A child waited for `parent` in vain."""
        self._reports += 1
        entry = self._entries.get(parent)
        if entry is not None and entry.reported_at is None:
            entry.reported_at, self._parents = entry.held, None

    def parent(self, who: str) -> Joined | None:
        """The member that `who` takes versions from; None: the learner."""
        if self._parents is None:
            self._parents = self._assigned()
        above = self._parents.get(who)
        return None if above is None else self._entries[above].joined

    def versions(self) -> dict[str, Version]:
        """The version that each member has acknowledged; NO_VERSION before the first."""
        return {who: entry.held for who, entry in list(self._entries.items())}

    def stats(self) -> dict[str, float]:
        """Now: members. Since the start: fenced ones, reports of parents that failed."""
        return {"members": len(self._entries), "fenced": self._fenced, "reports": self._reports}

    def _assigned(self) -> dict[str, str | None]:
        """The parents of the members in the tree; the others take from the learner."""
        if self._fanout == 0:
            return {}
        in_tree = [member for member in self._order if self._relayed(self._entries[member.who])]
        sizes = {member.layout: self._entries[member.who].joined.bytes for member in in_tree}
        return assign(in_tree, sizes, self._bucket_bytes, self._links, self._fanout)

    def _relayed(self, entry: _Entry) -> bool:
        joined = entry.joined
        if entry.reported_at is not None or joined.endpoint is None:
            return False
        # A version that fits a bucket cannot be pipelined; on its own host the learner is as near as any member.
        return self._fanout is not None or (
            joined.bytes > self._bucket_bytes and joined.member.host != self._host
        )
