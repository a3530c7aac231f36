"""The state behind the ledger, and the effect of each event on it. No rules: what is applied was allowed.

Memory follows the live tasks: an ordinal that has ended is forgotten once all below it have ended too.
"""

from __future__ import annotations

import enum
import heapq
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from asyncrl.queue import events as ev
from asyncrl.queue.events import Event, Frontier, StreamSettings
from asyncrl.queue.ranks import Ranks
from asyncrl.types import NO_VERSION, Version

END = "end"
"""The reason of tasks that the end of the run cut off."""

MAX_REASONS = 64
"""Distinct drop reasons that are counted apart; reasons come from outside, and memory must stay bounded."""


class State(enum.Enum):
    """Where a task is. The last two are ends; a task that has ended is not kept."""

    PENDING = "pending"
    LEASED = "leased"
    READY = "ready"
    CLAIMED = "claimed"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(slots=True)
class Item:
    """One task that has not ended. epoch -1: no lease stands."""

    state: State
    min_version: Version = 0
    worker: str = ""
    epoch: int = -1
    held: Version = NO_VERSION
    leased_at: float = 0.0
    deadline: float = 0.0
    tokens: int = 0
    nbytes: int = 0
    start_version: Version = NO_VERSION
    digest: int = 0


class Book:
    def __init__(self) -> None:
        self.settings: StreamSettings | None = None
        self.learner_epoch = 0
        self.closed: str | None = None
        self._earliest: float
        self._reset(Frontier(), lineage=0)
        self._effects: dict[type, Callable[[Any], None]] = {
            ev.StreamOpened: self._opened,
            ev.Rewound: self._rewound,
            ev.Forked: self._forked,
            ev.Submitted: self._submitted,
            ev.Exhausted: self._exhausted,
            ev.Leased: self._leased,
            ev.Renewed: self._renewed,
            ev.Requeued: self._requeued,
            ev.Committed: self._committed,
            ev.Dropped: self._dropped,
            ev.StepClaimed: self._step_claimed,
            ev.StepTrained: self._step_trained,
            ev.StepRejected: self._step_rejected,
            ev.Collected: self._collected,
            ev.Finished: self._finished,
        }

    def apply(self, event: Event) -> None:
        self._effects[type(event)](event)

    # ------------------------------------------------------------------ reading

    @property
    def drained(self) -> bool:
        """Nothing that could still be claimed."""
        return not (self.pending or self.leased or self.ready)

    def admitted_below(self, held: Version) -> int | None:
        """F(held + S + 1): the rank below which a worker holding `held` may start. None: no bound.

        A version that is still to come counts B groups; a worker ahead of the ledger counts as being level.
        """
        assert self.settings is not None
        if self.settings.max_staleness is None:
            return None
        target = min(held, self.version) + self.settings.spare_versions + 1
        if target <= self.version:
            # Forgotten versions were published at or before the frontier, where nothing is pending.
            return self.published.get(target, 0)
        return self.published[self.version] + (target - self.version) * self.settings.groups_per_version

    def ready_prefix(self, most: int) -> list[int]:
        """Ready ordinals in strict order from the head, up to the first that is not ready."""
        prefix: list[int] = []
        ordinal = self.head
        for ready in self.ready[:most]:
            if ready != ordinal:
                break
            prefix.append(ready)
            ordinal = self._unclaimed_from(ready + 1)
        return prefix

    def ready_in_window(self, most: int) -> list[int]:
        """Ready ordinals that may be taken one after another; taking the head slides the window."""
        assert self.settings is not None
        if self.settings.window is None:
            return self.ready[:most]
        taken: list[int] = []
        head = self.head
        for ordinal in self.ready[:most]:
            if self.ranks.rank(ordinal) >= self.ranks.rank(head) + self.settings.window:
                break
            taken.append(ordinal)
            if ordinal == head:
                head = self._unclaimed_from(ordinal + 1)
        return taken

    def expired(self, now: float) -> list[int]:
        """Leased ordinals past their deadline; the leases are looked at only when one may be."""
        if now <= self._earliest:
            return []
        deadlines = {o: self.items[o].deadline for o in sorted(self.leased)}
        self._earliest = min((d for d in deadlines.values() if d >= now), default=math.inf)
        return [o for o, deadline in deadlines.items() if deadline < now]

    def as_frontier(self) -> Frontier:
        return Frontier(
            lineage=self.lineage,
            version=self.version,
            frontier=self.ranks.frontier,
            kept=self.ranks.kept,
            trained=tuple(sorted(self.ranks.trained)),
            dropped_ordinals=tuple(self.ranks.dropped),
            dropped=dict(self.dropped),
            published=dict(self.published),
            grants=self.grants,
        )

    def state(self) -> dict[str, Any]:
        """Everything, in a form that compares: two books that took the same events are equal."""
        return {
            "settings": self.settings,
            "learner_epoch": self.learner_epoch,
            "closed": self.closed,
            "frontier": self.as_frontier(),
            "items": {o: asdict(item) for o, item in sorted(self.items.items())},
            "next": self.next,
            "head": self.head,
            "pending": sorted(self.pending),
            "leased": sorted(self.leased),
            "ready": list(self.ready),
            "claims": list(self.claims),
            "exhausted": self.exhausted,
            "nbytes": self.nbytes,
        }

    # ------------------------------------------------------------------ effects

    def _reset(self, frontier: Frontier, lineage: int) -> None:
        self.lineage = lineage
        self.version = frontier.version
        self.ranks = Ranks(frontier.frontier, frontier.kept, frontier.trained, frontier.dropped_ordinals)
        self.dropped: Counter[str] = Counter(frontier.dropped)
        self.published: dict[Version, int] = dict(frontier.published)
        self.grants = frontier.grants
        self.items: dict[int, Item] = {}
        self.next = frontier.frontier  # the ordinal to be submitted next
        self.head = frontier.frontier  # the lowest ordinal neither claimed nor ended
        self.pending: list[int] = []  # heap
        self.leased: set[int] = set()
        self.ready: list[int] = []  # sorted
        self.claims: list[ev.StepClaimed] = []  # of the running step, by index
        self.claimed = 0
        self.exhausted = False  # the feeder has no more tasks
        self.nbytes = 0
        self._earliest = math.inf  # no lease ends before

    def _opened(self, e: ev.StreamOpened) -> None:
        self.settings, self.learner_epoch = e.settings, e.learner_epoch

    def _rewound(self, e: ev.Rewound) -> None:
        self.settings, self.learner_epoch = e.settings, e.learner_epoch
        grants = self.grants
        self._reset(e.frontier, e.lineage)
        self.grants = max(grants, e.frontier.grants)

    def _forked(self, e: ev.Forked) -> None:
        self.lineage = e.lineage
        for ordinal in sorted(self.leased):
            self._to_pending(ordinal)

    def _submitted(self, e: ev.Submitted) -> None:
        self.next = e.first + e.count
        for ordinal in range(e.first, self.next):
            if not self.ranks.ended(ordinal):
                self.items[ordinal] = Item(State.PENDING, e.min_version)
                heapq.heappush(self.pending, ordinal)
        self._move_head()

    def _exhausted(self, e: ev.Exhausted) -> None:
        self.exhausted = True

    def _leased(self, e: ev.Leased) -> None:
        heapq.heappop(self.pending)
        item = self.items[e.ordinal]
        item.state, item.worker, item.held = State.LEASED, e.worker, e.held
        item.leased_at, item.deadline = e.at, e.deadline
        # The lineage in the high bits: a lease of an abandoned lineage can never pass for a current one.
        item.epoch = (self.lineage << 40) + e.grant
        self.grants = e.grant
        self.leased.add(e.ordinal)
        self._earliest = min(self._earliest, e.deadline)

    def _renewed(self, e: ev.Renewed) -> None:
        for ordinal in e.ordinals:
            self.items[ordinal].deadline = e.deadline

    def _requeued(self, e: ev.Requeued) -> None:
        self._to_pending(e.ordinal)

    def _committed(self, e: ev.Committed) -> None:
        item = self.items[e.ordinal]
        item.state, item.tokens, item.nbytes = State.READY, e.tokens, e.nbytes
        item.start_version, item.digest = e.start_version, e.digest
        self.leased.remove(e.ordinal)
        insort(self.ready, e.ordinal)
        self.nbytes += e.nbytes

    def _dropped(self, e: ev.Dropped) -> None:
        self.leased.remove(e.ordinal)
        self._end(e.ordinal, e.reason)
        self._move_head()

    def _step_claimed(self, e: ev.StepClaimed) -> None:
        self.claims.append(e)
        for share in e.shares:
            self.claimed += len(share)
            for ordinal in share:
                self.items[ordinal].state = State.CLAIMED
                self._unready(ordinal)
        self._move_head()

    def _step_trained(self, e: ev.StepTrained) -> None:
        self._end_step(None)
        self.version = e.step + 1
        self.published[self.version] = self.ranks.trained_total
        # F(v) admits ranks below it, and no pending rank is below the frontier's.
        self.published = {
            v: groups for v, groups in self.published.items() if groups > self.ranks.kept or v == self.version
        }

    def _step_rejected(self, e: ev.StepRejected) -> None:
        self._end_step(e.reason)

    def _collected(self, e: ev.Collected) -> None:
        for ordinal in e.ordinals:
            self._unready(ordinal)
            self._end(ordinal, None)
        self._move_head()

    def _finished(self, e: ev.Finished) -> None:
        self.closed = e.reason
        for ordinal in sorted(self.items):
            self._end(ordinal, END)
        self.pending, self.leased, self.ready, self.claims, self.claimed = [], set(), [], [], 0
        self._move_head()

    # ------------------------------------------------------------------ moves that several effects share

    def _to_pending(self, ordinal: int) -> None:
        item = self.items[ordinal]
        item.state, item.worker, item.epoch = State.PENDING, "", -1
        self.leased.remove(ordinal)
        heapq.heappush(self.pending, ordinal)

    def _unready(self, ordinal: int) -> None:
        del self.ready[bisect_left(self.ready, ordinal)]

    def _end_step(self, dropped: str | None) -> None:
        for claim in self.claims:
            for share in claim.shares:
                for ordinal in share:
                    self._end(ordinal, dropped)
        self.claims, self.claimed = [], 0
        self._move_head()

    def _end(self, ordinal: int, dropped: str | None) -> None:
        self.nbytes -= self.items.pop(ordinal).nbytes
        if dropped is None:
            self.ranks.train(ordinal)
            return
        self.ranks.drop(ordinal)
        known = dropped in self.dropped or len(self.dropped) < MAX_REASONS
        self.dropped[dropped if known else "other"] += 1

    def _move_head(self) -> None:
        self.head = self._unclaimed_from(max(self.head, self.ranks.frontier))

    def _unclaimed_from(self, ordinal: int) -> int:
        """The lowest ordinal from `ordinal` on that is neither claimed nor ended."""
        while ordinal < self.next:
            item = self.items.get(ordinal)
            if item is not None and item.state is not State.CLAIMED:
                break
            ordinal += 1
        return ordinal
