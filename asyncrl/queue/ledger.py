"""The ledger of one stream: which task is where, and who may take it. Pure: no I/O, no clock, no torch.

                lease            commit           claim            trained / collect
    PENDING ──────────▸ LEASED ──────────▸ READY ──────────▸ CLAIMED ──────────▸ TRAINED(version)
       ▴                  │ expired, given back                 │ rejected
       └──────────────────┤ drop                                ▾
                          └───────────────────────────────▸ DROPPED(reason)      finish: DROPPED(end)

Commands check a request and refuse it (RefusedError) or turn it into events; `apply` is the only thing that
mutates. Times are seconds of whatever clock the caller passes as `now`.

The staleness bound. rank(o) = ordinals below o that are not dropped; head = the lowest ordinal not claimed;
F(v) = groups trained when version v was published, where a version still to come counts B groups. The lowest
pending ordinal is leased first, to a worker that holds version h, only while rank(o) < F(h + S + 1); the
learner takes only rank(o) < rank(head) + W. Then at most rank(o) + W - 1 groups are trained before o, which
makes its step at most h + S + ceil((W - 1) / B) = h + η.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import RefusedError, RunClosedError
from asyncrl.queue import events as ev
from asyncrl.queue.book import Book, State
from asyncrl.queue.events import Event, Frontier, StreamSettings
from asyncrl.queue.shares import share_out
from asyncrl.types import NO_VERSION, Version

__all__ = ["Claimed", "Frontier", "Grant", "Ledger", "State", "StreamSettings"]

MAX_PENDING = 1 << 16
"""Tasks submitted and not yet leased, per stream: a feeder that ignores `room` is refused beyond it."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease: `epoch` must come with the commit."""

    ordinal: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """One rank's share of a claim. last: it completes the step. so_far: groups of the step up to here."""

    ordinals: tuple[int, ...]
    last: bool
    so_far: int


class Ledger:
    """Commands of one stream. `journal` sees every event after it was applied."""

    def __init__(self, journal: Callable[[Event], None] | None = None) -> None:
        self.book = Book()
        self._journal = journal

    def apply(self, event: Event) -> None:
        """The one way to change the state; replaying a journal goes through here."""
        self.book.apply(event)
        if self._journal is not None:
            self._journal(event)

    # ------------------------------------------------------------------ opening and closing

    def open(self, settings: StreamSettings, frontier: Frontier | None, lineage: int = 0) -> None:
        """Start the stream, or rewind it to `frontier` under a new lineage (at least `lineage`).

        Without a frontier a stream that has leased anything is 'occupied': another learner may be using it.
        Every opening gets a new learner epoch, which fences the learner before.
        """
        book, epoch = self.book, self.book.learner_epoch + 1
        self._require_running()
        if frontier is not None:
            forked = max(max(book.lineage, frontier.lineage) + 1, lineage)
            self.apply(ev.Rewound(settings, epoch, forked, frontier))
        elif book.grants or book.version:
            raise RefusedError(
                "occupied", "the stream is in use; rewind it to a snapshot, or start a new run"
            )
        else:
            self.apply(ev.StreamOpened(settings, epoch))
            self.fork(lineage)

    def fork(self, lineage: int) -> None:
        """Join a lineage that began on another stream."""
        if lineage > self.book.lineage:
            self.apply(ev.Forked(lineage))

    def finish(self, reason: str) -> None:
        """Whatever has not ended is DROPPED(end). Again: nothing."""
        if self.book.closed is None:
            self.apply(ev.Finished(reason))

    # ------------------------------------------------------------------ the task feeder

    def room(self) -> int:
        """Tasks wanted from the feeder; 0 until half of them are leased, so that it works in batches."""
        self._require_running()
        if self.book.settings is None:
            return 0
        depth, pending = self.book.settings.depth, len(self.book.pending)
        return depth - pending if pending <= depth // 2 and not self.book.exhausted else 0

    def exhaust(self, at: int) -> None:
        """The feeder has no task at ordinal `at`, and none after it. Again: nothing."""
        self._require_open()
        if at != self.book.next:
            raise RefusedError("gap", f"ordinal {self.book.next} is next, not {at}")
        if not self.book.exhausted:
            self.apply(ev.Exhausted())

    def submit(self, first: int, count: int, min_version: Version = 0) -> int:
        """Add `count` ordinals from `first` on; known ones are ignored. Returns how many were new."""
        self._require_open()
        if first > self.book.next:
            raise RefusedError("gap", f"ordinal {self.book.next} is next, not {first}")
        fresh = first + count - self.book.next
        if fresh <= 0:
            return 0
        if len(self.book.pending) + fresh > MAX_PENDING:
            raise RefusedError("full", f"{len(self.book.pending)} tasks are pending already")
        self.apply(ev.Submitted(self.book.next, fresh, min_version))
        return fresh

    # ------------------------------------------------------------------ generators

    def lease(self, worker: str, held: Version, lineage: int, most: int, now: float) -> list[Grant]:
        """Up to `most` of the lowest pending tasks that a worker holding version `held` may start now."""
        settings, book = self._require_open(), self.book
        if lineage != book.lineage:
            raise RefusedError("lineage", f"the stream is at lineage {book.lineage}, the worker at {lineage}")
        grants: list[Grant] = []
        while len(grants) < most and self._leasable(held):
            ordinal = book.pending[0]
            self.apply(ev.Leased(ordinal, worker, book.grants + 1, held, now, now + settings.lease_s))
            grants.append(Grant(ordinal, book.items[ordinal].epoch))
        return grants

    def renew(self, leases: Iterable[tuple[int, int]], now: float) -> list[tuple[int, int]]:
        """Extend the (ordinal, epoch) leases that still stand; return those that do not."""
        stands: list[int] = []
        lost: list[tuple[int, int]] = []
        for ordinal, epoch in leases:
            if self._leased(ordinal, epoch):
                stands.append(ordinal)
            else:
                lost.append((ordinal, epoch))
        if stands and self.book.settings is not None:
            self.apply(ev.Renewed(tuple(stands), now + self.book.settings.lease_s))
        return lost

    def expire(self, now: float) -> list[int]:
        """Leases past their deadline go back to pending."""
        expired = self.book.expired(now)
        for ordinal in expired:
            self.apply(ev.Requeued(ordinal, "expired"))
        return expired

    def commit(
        self, ordinal: int, epoch: int, tokens: int, nbytes: int, start_version: Version, digest: int
    ) -> bool:
        """LEASED to READY. False if this very commit was made before.

        RefusedError 'fenced': the lease is not the current one. 'stale': the group is older than its lease
        promised, so training on it could break the bound; the task goes back to pending.
        """
        settings = self._require_open()
        if tokens < 0 or nbytes < 0:
            raise RefusedError("malformed", f"{tokens} tokens, {nbytes} bytes")
        item = self.book.items.get(ordinal)
        if item is None or item.epoch != epoch:
            raise RefusedError("fenced", f"the lease of ordinal {ordinal} is over")
        if item.state is not State.LEASED:
            if item.digest != digest:
                raise RefusedError("fenced", f"ordinal {ordinal} was committed with other content")
            return False
        if settings.max_staleness is not None and NO_VERSION < start_version < item.held:
            held = item.held
            self.apply(ev.Requeued(ordinal, "stale"))
            raise RefusedError("stale", f"a token of version {start_version} under a lease for {held}")
        self.apply(ev.Committed(ordinal, tokens, nbytes, start_version, digest))
        return True

    def give_back(self, leases: Iterable[tuple[int, int]]) -> None:
        """Unfinished tasks go back to pending at once; leases that are over are ignored."""
        for ordinal, epoch in leases:
            if self._leased(ordinal, epoch):
                self.apply(ev.Requeued(ordinal, "given_back"))

    def leases_of(self, worker: str) -> list[tuple[int, int]]:
        items = self.book.items
        return [(o, items[o].epoch) for o in sorted(self.book.leased) if items[o].worker == worker]

    def drop(self, ordinal: int, epoch: int, reason: str) -> None:
        """A leased task that cannot be finished ends as DROPPED(reason)."""
        self._require_open()
        if not self._leased(ordinal, epoch):
            raise RefusedError("fenced", f"the lease of ordinal {ordinal} is over")
        self.apply(ev.Dropped(ordinal, reason))

    # ------------------------------------------------------------------ the learner

    def claim(
        self, learner_epoch: int, step: int, index: int, rank: int, max_tokens: int, whole: bool
    ) -> Claimed | None:
        """Rank `rank`'s share of the `index`-th claim of step `step`; None: not yet.

        The first rank that asks fixes the shares of all. whole=False takes what is ready inside the window;
        whole=True takes the longest prefix in ordinal order, once it cannot grow any more. The last step of an
        exhausted stream may be short, and its last claim empty; a step after that is refused as 'exhausted'.
        """
        settings, book = self._require_learner(learner_epoch), self.book
        if not 0 <= rank < settings.learners:
            raise RefusedError("malformed", f"rank {rank} of {settings.learners}")
        if step < book.version:
            raise RefusedError("trained", f"step {step} is over, the stream is at step {book.version}")
        if step > book.version or index > len(book.claims):
            return None
        if index == len(book.claims):
            if book.claims and book.claims[-1].last:
                raise RefusedError("complete", f"all {book.claimed} groups of step {step} are handed out")
            shares = self._shares(max_tokens, whole)
            if shares is None:
                return None
            self.apply(ev.StepClaimed(step, index, shares, self._completes(shares)))
        so_far = sum(len(share) for claim in book.claims[: index + 1] for share in claim.shares)
        return Claimed(book.claims[index].shares[rank], book.claims[index].last, so_far)

    def trained(self, learner_epoch: int, step: int) -> Version:
        """The step's groups are TRAINED(step + 1) and that version counts as published. Idempotent.

        A step may be short of B groups only after a drain: nothing pending, leased or ready.
        """
        settings, book = self._require_learner(learner_epoch), self.book
        if step == book.version - 1:
            return book.version
        self._require_step(step)
        if book.claimed < settings.groups_per_version and not (book.drained and book.claimed):
            raise RefusedError(
                "incomplete", f"step {step} has {book.claimed} of {settings.groups_per_version} groups"
            )
        self.apply(ev.StepTrained(step))
        return book.version

    def reject(self, learner_epoch: int, step: int, reason: str) -> int:
        """The step's groups are DROPPED(reason); other groups take their place. Returns how many."""
        self._require_learner(learner_epoch)
        self._require_step(step)
        rejected = self.book.claimed
        if rejected:
            self.apply(ev.StepRejected(step, reason))
        return rejected

    def collect(self, learner_epoch: int) -> tuple[int, ...]:
        """Take and end all ready groups of an unbounded stream."""
        settings = self._require_learner(learner_epoch)
        if settings.max_staleness is not None:
            raise RefusedError("bounded", "groups of a bounded stream are claimed by step")
        ordinals = tuple(self.book.ready)
        if ordinals:
            self.apply(ev.Collected(ordinals))
        return ordinals

    def frontier(self, learner_epoch: int) -> Frontier:
        """Where the stream stands after the last trained step; later claims count as not made."""
        self._require_learner(learner_epoch)
        return self.book.as_frontier()

    def counts(self, now: float) -> dict[str, Any]:
        """How many tasks are in each state, and what they weigh."""
        book = self.book
        return {
            "pending": len(book.pending),
            "leased": len(book.leased),
            "ready": len(book.ready),
            "claimed": book.claimed,
            "trained": book.ranks.trained_total,
            "dropped": sum(book.dropped.values()),
            "dropped_by_reason": dict(book.dropped),
            "bytes": book.nbytes,
            "oldest_lease_s": max((now - book.items[o].leased_at for o in book.leased), default=0.0),
            "leases_by_worker": dict(Counter(book.items[o].worker for o in book.leased)),
        }

    # ------------------------------------------------------------------ rules

    def _leasable(self, held: Version) -> bool:
        """Whether the lowest pending task may start: admission, then backpressure."""
        book, settings = self.book, self.book.settings
        assert settings is not None
        if not book.pending:
            return False
        ordinal = book.pending[0]
        item, rank = book.items[ordinal], book.ranks.rank(ordinal)
        limit = book.admitted_below(held)
        if item.min_version > held or (limit is not None and rank >= limit):
            return False
        # A lost lease frees its room, and only this task or an older one can take it: no head waits for room.
        if len(book.leased) + len(book.ready) >= settings.depth:
            return False
        # Bytes are not reserved, so what the learner may be waiting for must not wait for the learner.
        # A synchronous learner may wait for a whole batch at once.
        waited_for = settings.groups_per_version if settings.max_staleness == 0 else settings.window or 1
        inside = rank < book.ranks.rank(book.head) + waited_for
        return inside or book.nbytes < settings.max_bytes

    def _shares(self, max_tokens: int, whole: bool) -> tuple[tuple[int, ...], ...] | None:
        """What the next claim hands to each rank; None: nothing yet, or (whole) it may still grow."""
        if self.book.exhausted and self.book.drained:
            return self._empty_shares()
        settings, book = self.book.settings, self.book
        assert settings is not None
        left = settings.groups_per_version - book.claimed
        ordinals = book.ready_prefix(left) if whole else book.ready_in_window(left)
        homes = share_out((book.items[o].tokens for o in ordinals), settings.learners, max_tokens)
        grows = not self._nothing_beyond(len(ordinals)) and len(homes) == len(ordinals) < left
        if not homes or (whole and grows):
            return None
        shares: list[list[int]] = [[] for _ in range(settings.learners)]
        for ordinal, home in zip(ordinals, homes, strict=False):
            shares[home].append(ordinal)
        return tuple(map(tuple, shares))

    def _empty_shares(self) -> tuple[tuple[int, ...], ...]:
        """What is left when tasks that the step still hoped for were dropped."""
        settings, book = self._require_open(), self.book
        if not book.claimed:
            raise RefusedError("exhausted", f"there are no tasks for step {book.version}")
        return ((),) * settings.learners

    def _completes(self, shares: tuple[tuple[int, ...], ...]) -> bool:
        """Whether a claim of these is the step's last."""
        taken = sum(map(len, shares))
        full = self.book.claimed + taken == self._require_open().groups_per_version
        return full or self._nothing_beyond(taken)

    def _nothing_beyond(self, ready: int) -> bool:
        """Whether no group will come but that many ready ones."""
        book = self.book
        return book.exhausted and not book.pending and not book.leased and len(book.ready) == ready

    def _leased(self, ordinal: int, epoch: int) -> bool:
        item = self.book.items.get(ordinal)
        return item is not None and item.state is State.LEASED and item.epoch == epoch

    def _require_running(self) -> None:
        if self.book.closed is not None:
            raise RunClosedError(self.book.closed)

    def _require_open(self) -> StreamSettings:
        self._require_running()
        if self.book.settings is None:
            raise RefusedError("unopened", "no learner has opened this stream yet")
        return self.book.settings

    def _require_learner(self, learner_epoch: int) -> StreamSettings:
        settings = self._require_open()
        if learner_epoch != self.book.learner_epoch:
            raise RefusedError(
                "fenced", f"learner epoch {learner_epoch} is over, {self.book.learner_epoch} has the stream"
            )
        return settings

    def _require_step(self, step: int) -> None:
        if step != self.book.version:
            raise RefusedError("step", f"the stream is at step {self.book.version}, not {step}")
