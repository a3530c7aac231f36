"""The ledger of one stream: which task is where, and who may take it. Pure: no I/O, no clock, no torch.

                lease            commit           claim            trained / collect
    PENDING ──────────▸ LEASED ──────────▸ READY ──────────▸ CLAIMED ──────────▸ TRAINED(version)
       ▴                  │ expired,         │ ▴                │   ▴               ┊ kept until a checkpoint
       ├──────────────────┤ given back       └─┘ stages         │   └── RECORDED ◂┄┄┘ holds it: a rewind
       │                  ▾                                     ▾
       │                  └──────────────▸ DROPPED(reason) ◂────┘                  drain, finish: DROPPED
       └──────── lost, or too old after a rewind ◂── READY, CLAIMED, RECORDED

A claim of the step after the running one makes READY groups AHEAD, which that step claims as they are.

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
from collections.abc import Callable, Collection, Iterable
from typing import Any

from asyncrl.errors import RefusedError, RunClosedError
from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.events import Event
from asyncrl.queue.ledger.state.leases import TASK
from asyncrl.queue.ledger.state.ledger_state import LedgerState
from asyncrl.queue.ledger.transitions import apply
from asyncrl.queue.protocol.settings import Frontier, StreamSettings
from asyncrl.types import Version

MAX_PENDING = 1 << 16
"""Tasks submitted and not yet leased, per stream: a feeder that ignores `room` is refused beyond it."""

MAX_REASON = 64
"""Characters that are kept of the reason of a drop."""

LOST = "lost"
"""The reason of a step that begins anew because nobody can fetch some of its groups any more."""


class Ledger:
    """One stream. Here are the commands that begin, feed and end it; those of generators and stages are in
    generator_commands.py, those of the learner in learner_commands.py.

    journal: receives every event after it was applied.
    """

    def __init__(self, journal: Callable[[Event], None] | None = None) -> None:
        self.state = LedgerState()
        self._journal = journal

    def apply(self, event: Event) -> None:
        """The one way to change the state; replaying a journal goes through here."""
        apply(self.state, event)
        if self._journal is not None:
            self._journal(event)

    def require_running(self) -> None:
        if self.state.closed is not None:
            raise RunClosedError(self.state.closed)

    def require_open(self) -> StreamSettings:
        self.require_running()
        if self.state.settings is None:
            raise RefusedError("unopened", "no learner has opened this stream yet")
        return self.state.settings

    def has_lost(self, ordinals: Iterable[int]) -> bool:
        return any(self.state.tasks.records[ordinal].lost for ordinal in ordinals)

    # ------------------------------------------------------------------ opening and closing

    def open(
        self, settings: StreamSettings, frontier: Frontier | None, lineage: int = 0, opener: str = ""
    ) -> None:
        """Start the stream, or rewind it to `frontier` under a new lineage (at least `lineage`).

        If every step since the frontier is still kept, they are handed out again as they were; otherwise all later
        work is done again. Without a frontier a stream that has leased anything is 'occupied': another learner
        may be using it. Every opening gets a new learner epoch, which fences the learner before.

        opener: names this call. A repetition of the last call changes nothing.
        """
        state, epoch = self.state, self.state.learner_epoch + 1
        self.require_running()
        if opener and opener == state.opener:
            return
        if frontier is not None:
            # Lost groups cannot be handed out again; the rest of the running step can.
            if self.has_lost([*state.steps.claimed_ordinals(), *state.ahead]):
                self.apply(ev.StepAbandoned(state.steps.version, (), LOST))
            forked = max(max(state.lineage, frontier.lineage) + 1, lineage)
            rewind = ev.SteppedBack if self._kept_since(frontier, settings) else ev.Rewound
            self.apply(rewind(settings, epoch, forked, frontier, opener))
        elif state.leases.grants or state.steps.version:
            raise RefusedError(
                "occupied",
                "the stream is in use; rewind it to a snapshot, or begin with `asyncrl queue --anew`",
            )
        else:
            self.apply(ev.StreamOpened(settings, epoch, opener))
            self.fork(lineage)

    def fork(self, lineage: int) -> None:
        """Join a lineage that began on another stream."""
        if lineage > self.state.lineage:
            self.apply(ev.Forked(lineage))

    def recover(self, now: float, lost: Collection[int] = ()) -> None:
        """After a replay of the journal: leases begin anew. lost: ordinals without bytes (`Stream.needed`).

        Lost groups are made again. A learner goes on with the groups that it has received; if it requests more of the
        lost ones, the step begins anew.
        """
        settings = self.state.settings
        if settings is not None and self.state.closed is None:
            self.apply(ev.Recovered(now, now + settings.lease_s, tuple(sorted(lost))))

    def drain(self) -> int:
        """Begin no more: pending tasks are DROPPED(drained), leased ones are finished, by another worker where the
        first one is lost; then the stream is exhausted. Returns how many were dropped. Idempotent."""
        self.require_open()
        if self.state.draining:
            return 0
        pending = len(self.state.tasks.pending)
        self.apply(ev.Drained())
        return pending

    def finish(self, reason: str) -> None:
        """All tasks that have not ended are DROPPED(end). Idempotent."""
        if self.state.closed is None:
            self.apply(ev.Finished(reason))

    # ------------------------------------------------------------------ the task feeder

    def room(self) -> int:
        """Tasks wanted from the feeder; 0 until half of them are leased, so that it works in batches."""
        self.require_running()
        if self.state.settings is None:
            return 0
        depth, pending = min(self.state.settings.depth, MAX_PENDING), len(self.state.tasks.pending)
        return depth - pending if pending <= depth // 2 and not self.state.exhausted else 0

    def exhaust(self, at: int) -> None:
        """The feeder has no task at ordinal `at`, and none after it. Idempotent."""
        self.require_open()
        if at != self.state.tasks.next:
            raise RefusedError("gap", f"ordinal {self.state.tasks.next} is next, not {at}")
        if not self.state.exhausted:
            self.apply(ev.Exhausted())

    def submit(self, first: int, count: int, min_version: Version = 0) -> int:
        """Add `count` ordinals from `first` on; known ones are ignored. Returns how many were new: none while the
        stream drains."""
        self.require_open()
        if self.state.draining:
            return 0
        if first > self.state.tasks.next:
            raise RefusedError("gap", f"ordinal {self.state.tasks.next} is next, not {first}")
        fresh = first + count - self.state.tasks.next
        if fresh <= 0:
            return 0
        if len(self.state.tasks.pending) + fresh > MAX_PENDING:
            raise RefusedError("full", f"{len(self.state.tasks.pending)} tasks are pending already")
        self.apply(ev.Submitted(self.state.tasks.next, fresh, min_version))
        return fresh

    # ------------------------------------------------------------------ looking

    def counts(self, now: float) -> dict[str, Any]:
        """The number of tasks in each state, and their bytes."""
        state, tasks = self.state, self.state.tasks
        leases = [lease for lease in state.leases if lease.stage == TASK]
        staged = Counter(lease.stage for lease in state.leases)
        return {
            "pending": len(tasks.pending),
            "leased": len(tasks.leased),
            "ready": len(tasks.ready),
            **self._ages(),
            "lacking_columns": len(tasks.partial),
            "claimed": state.steps.claimed + len(state.ahead),
            "recorded": state.steps.recorded,
            "trained": tasks.ranks.trained_total,
            "dropped": sum(tasks.dropped.values()),
            "dropped_by_reason": dict(tasks.dropped),
            "bytes": state.usage.live,
            "reserved_bytes": state.reserved,
            "retained_bytes": state.usage.retained,
            "retained_steps": len(state.steps.retained.steps),
            "hedged": len(state.leases.hedged),
            "oldest_lease_s": max((now - lease.at for lease in leases), default=0.0),
            "leases_by_worker": dict(Counter(lease.worker for lease in leases)),
            "stages": {
                name: {"waiting": len(waiting), "leased": staged[name]}
                for name, waiting in state.stages.waiting.items()
            },
            "lead": None if state.lead is None else state.lead.groups,
            "draining": state.draining,
            "bias": state.bias.to_wire(),
        }

    def _ages(self) -> dict[str, float]:
        """Ages of groups that a claim may take: versions since their oldest token; empty without groups."""
        made = [self.state.tasks.records[ordinal].start_version for ordinal in self.state.tasks.ready]
        if not made:
            return {}
        version = self.state.steps.version
        return {"age/oldest": version - min(made), "age/mean": version - sum(made) / len(made)}

    def _kept_since(self, frontier: Frontier, settings: StreamSettings) -> bool:
        """Whether the steps since `frontier` can be handed out again under these settings."""
        state, before = self.state, self.state.settings
        if before is None or before.max_staleness is None or not settings.same_steps(before):
            return False
        trained = state.tasks.ranks.trained_total
        return state.steps.retained.covers(frontier, state.lineage, state.steps.version, trained)
