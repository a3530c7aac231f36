"""The ledger of one stream: which task is where, and who may take it. Pure: no I/O, no clock, no torch.

                lease            commit           claim            trained / collect
    PENDING ──────────▸ LEASED ──────────▸ READY ──────────▸ CLAIMED ──────────▸ TRAINED(version)
       ▴                  │ expired,         │ ▴                │   ▴               ┊ kept until a checkpoint
       ├──────────────────┤ given back       └─┘ stages         │   └── RECORDED ◂┄┄┘ holds it: a rewind
       │                  ▾                                     ▾
       │                  └──────────────▸ DROPPED(reason) ◂────┘                  drain, finish: DROPPED
       └──────── lost, or too old after a rewind ◂── READY, CLAIMED, RECORDED

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
from collections.abc import Collection
from typing import Any

from asyncrl.errors import RefusedError
from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.generator_commands import GeneratorCommands, Grant
from asyncrl.queue.ledger.learner_commands import LOST, Claimed, LearnerCommands
from asyncrl.queue.ledger.rules.leases import TASK
from asyncrl.queue.ledger.settings import Frontier, StreamSettings
from asyncrl.queue.ledger.task_record import State
from asyncrl.types import Version

__all__ = ["Claimed", "Frontier", "Grant", "Ledger", "State", "StreamSettings"]

MAX_PENDING = 1 << 16
"""Tasks submitted and not yet leased, per stream: a feeder that ignores `room` is refused beyond it."""


class Ledger(GeneratorCommands, LearnerCommands):
    """One stream. Generators and learner ask in their own files; here is what begins, feeds and ends it."""

    # ------------------------------------------------------------------ opening and closing

    def open(
        self, settings: StreamSettings, frontier: Frontier | None, lineage: int = 0, opener: str = ""
    ) -> None:
        """Start the stream, or rewind it to `frontier` under a new lineage (at least `lineage`).

        If every step since the frontier is still kept, they are handed out again as they were; otherwise what came
        after it is done again. Without a frontier a stream that has leased anything is 'occupied': another learner
        may be using it. Every opening gets a new learner epoch, which fences the learner before.

        opener: names this call. The last call again, by its name: nothing.
        """
        book, epoch = self.book, self.book.learner_epoch + 1
        self.require_running()
        if opener and opener == book.opener:
            return
        if frontier is not None:
            # What is lost cannot be handed out again; the rest of the running step can.
            if self.has_lost(ordinal for claim in book.claims for share in claim.shares for ordinal in share):
                self.apply(ev.StepAbandoned(book.version, (), LOST))
            forked = max(max(book.lineage, frontier.lineage) + 1, lineage)
            rewind = ev.SteppedBack if self._kept_since(frontier, settings) else ev.Rewound
            self.apply(rewind(settings, epoch, forked, frontier, opener))
        elif book.grants or book.version:
            raise RefusedError(
                "occupied",
                "the stream is in use; rewind it to a snapshot, or begin with `asyncrl queue --anew`",
            )
        else:
            self.apply(ev.StreamOpened(settings, epoch, opener))
            self.fork(lineage)

    def fork(self, lineage: int) -> None:
        """Join a lineage that began on another stream."""
        if lineage > self.book.lineage:
            self.apply(ev.Forked(lineage))

    def recover(self, now: float, lost: Collection[int] = ()) -> None:
        """After a replay of the journal: leases begin anew. lost: ordinals without bytes (`LedgerState.holding`).

        What is lost is made again. A learner goes on with what it has claimed and got; if it asks for more of that, the
        step begins anew.
        """
        settings = self.book.settings
        if settings is not None and self.book.closed is None:
            self.apply(ev.Recovered(now, now + settings.lease_s, tuple(sorted(lost))))

    def drain(self) -> int:
        """Lease no more: what is pending is DROPPED(drained), what is under way is finished, then the stream is
        exhausted. Returns how many were pending. Again: nothing."""
        self.require_open()
        pending = len(self.book.pending)
        if not self.book.draining:
            self.apply(ev.Drained())
        return pending

    def finish(self, reason: str) -> None:
        """Whatever has not ended is DROPPED(end). Again: nothing."""
        if self.book.closed is None:
            self.apply(ev.Finished(reason))

    # ------------------------------------------------------------------ the task feeder

    def room(self) -> int:
        """Tasks wanted from the feeder; 0 until half of them are leased, so that it works in batches."""
        self.require_running()
        if self.book.settings is None:
            return 0
        depth, pending = self.book.settings.depth, len(self.book.pending)
        return depth - pending if pending <= depth // 2 and not self.book.exhausted else 0

    def exhaust(self, at: int) -> None:
        """The feeder has no task at ordinal `at`, and none after it. Again: nothing."""
        self.require_open()
        if at != self.book.next:
            raise RefusedError("gap", f"ordinal {self.book.next} is next, not {at}")
        if not self.book.exhausted:
            self.apply(ev.Exhausted())

    def submit(self, first: int, count: int, min_version: Version = 0) -> int:
        """Add `count` ordinals from `first` on; known ones are ignored. Returns how many were new: none while the
        stream drains."""
        self.require_open()
        if self.book.draining:
            return 0
        if first > self.book.next:
            raise RefusedError("gap", f"ordinal {self.book.next} is next, not {first}")
        fresh = first + count - self.book.next
        if fresh <= 0:
            return 0
        if len(self.book.pending) + fresh > MAX_PENDING:
            raise RefusedError("full", f"{len(self.book.pending)} tasks are pending already")
        self.apply(ev.Submitted(self.book.next, fresh, min_version))
        return fresh

    # ------------------------------------------------------------------ looking

    def counts(self, now: float) -> dict[str, Any]:
        """How many tasks are in each state, and what they weigh."""
        book = self.book
        tasks = [lease for lease in book.leases if lease.stage == TASK]
        staged = Counter(lease.stage for lease in book.leases)
        return {
            "pending": len(book.pending),
            "leased": len(book.leased),
            "ready": len(book.ready),
            "lacking_columns": len(book.partial),
            "claimed": book.claimed,
            "recorded": book.recorded,
            "trained": book.ranks.trained_total,
            "dropped": sum(book.dropped.values()),
            "dropped_by_reason": dict(book.dropped),
            "bytes": book.nbytes,
            "reserved_bytes": book.reserved,
            "retained_bytes": book.kept_bytes,
            "retained_steps": len(book.retention.steps),
            "oldest_lease_s": max((now - lease.at for lease in tasks), default=0.0),
            "leases_by_worker": dict(Counter(lease.worker for lease in tasks)),
            "stages": {
                name: {"waiting": len(waiting), "leased": staged[name]}
                for name, waiting in book.stages.waiting.items()
            },
            "lead": None if book.lead is None else book.lead.groups,
            "draining": book.draining,
            "bias": book.bias.to_wire(),
        }

    def _kept_since(self, frontier: Frontier, settings: StreamSettings) -> bool:
        """Whether the steps since `frontier` can be handed out again under these settings."""
        book, before = self.book, self.book.settings
        if before is None or before.max_staleness is None or not settings.same_steps(before):
            return False
        return book.retention.covers(frontier, book.lineage, book.version, book.ranks.trained_total)
