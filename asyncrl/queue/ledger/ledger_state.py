"""The state of one stream, and the moves that its changes are made of.

No rules: the ledger has checked each event (ledger.py) before it is applied (transitions.py). Memory follows the live
tasks and the steps that are kept for a rewind: an ordinal that has ended is forgotten once all below it have ended too.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from dataclasses import asdict
from typing import Any

from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.rules.group_sizes import GroupSizes
from asyncrl.queue.ledger.rules.leases import Leases
from asyncrl.queue.ledger.rules.length_bias import LengthBias
from asyncrl.queue.ledger.rules.lookahead import Lookahead, first_lead
from asyncrl.queue.ledger.rules.ordinal_index import OrdinalIndex
from asyncrl.queue.ledger.rules.retained_steps import RetainedStep, RetainedSteps
from asyncrl.queue.ledger.rules.stages import Stages
from asyncrl.queue.ledger.task_record import State, TaskRecord
from asyncrl.queue.protocol.settings import Frontier, StreamSettings
from asyncrl.types import Version

CORRUPT = "corrupt"
"""The reason of groups that nobody who got them could read."""

DRAINED = "drained"
"""The reason of tasks that a drain kept from being leased."""

MAX_REASONS = 64
"""Distinct drop reasons that are counted apart; reasons come from outside, and memory must stay bounded."""

PLAIN = (
    *(
        "settings",
        "learner_epoch",
        "opener",
        "closed",
        "draining",
        "attempt",
        "next",
        "head",
        "leased",
        "ready",
        "partial",
    ),
    *("claims", "claimed", "recorded", "exhausted", "lead", "nbytes", "kept_bytes"),
)
"""Attributes that `comparable` copies as they are."""


class LedgerState:
    """unmade, gone: ordinals whose bytes the last event made useless, for whoever keeps the bytes. An unmade
    task stays, to be done again."""

    def __init__(self) -> None:
        self.settings: StreamSettings | None = None
        self.learner_epoch = 0
        self.opener = ""  # who opened the stream last, and by which of its calls
        self.closed: str | None = None
        self.draining = False
        self.attempt = 0  # how often claims of this stream were taken back
        self.unmade: list[int] = []
        self.gone: list[int] = []
        self.reset(Frontier(), lineage=0)

    def reset(self, frontier: Frontier, lineage: int) -> None:
        """Forget all tasks; those in `frontier` have ended."""
        self.lineage = lineage
        self.version = frontier.version
        self.ranks = OrdinalIndex(
            frontier.frontier, frontier.kept, frontier.trained, frontier.dropped_ordinals
        )
        self.dropped: Counter[str] = Counter(frontier.dropped)
        self.published: dict[Version, int] = dict(frontier.published)
        self.grants = frontier.grants
        self.items: dict[int, TaskRecord] = {}
        self.next = frontier.frontier  # the ordinal to be submitted next
        self.head = frontier.frontier  # the lowest ordinal that nobody has claimed and that has not ended
        self.pending: list[int] = []  # heap
        self.leased: set[int] = set()
        self.ready: list[int] = []  # sorted; those that a claim may take
        self.ready_tokens = 0
        self.partial: set[int] = set()  # ready, but for columns that a claim needs
        self.leases = Leases()
        self.stages = Stages(() if self.settings is None else self.settings.stages)
        self.claims: list[ev.StepClaimed] = []  # of the running step, by index
        self.claimed = 0
        self.recorded = 0  # groups that steps to come will claim as they were recorded
        self.replay: dict[Version, RetainedStep] = {}  # those steps, the running one among them
        self.retention = RetainedSteps(frontier.version)
        self.retention.fork(lineage, frontier.version)
        self.exhausted = self.draining  # the feeder has no more tasks
        self.lead: Lookahead | None = None  # None: as far as the bound allows
        self.bias = LengthBias()
        self.sizes = GroupSizes()
        self.nbytes = 0  # of what is pending, leased, ready or claimed
        self.kept_bytes = 0  # of what is kept for a rewind only

    # ------------------------------------------------------------------ reading

    @property
    def dry(self) -> bool:
        """Nothing that could still be claimed."""
        return not (self.pending or self.leased or self.ready or self.partial or self.recorded)

    @property
    def in_stock(self) -> int:
        """Groups leased or ready: what `depth` is about."""
        return len(self.leased) + len(self.ready) + len(self.partial)

    @property
    def reserved(self) -> int:
        """Bytes expected of what is leased, and of columns that ready groups will get."""
        return self.sizes.reserved(len(self.leased), self.stages.lacking)

    def trained_by(self, version: Version) -> int:
        """F: groups trained when `version` is published. A step to come counts as it is recorded, or B groups."""
        assert self.settings is not None
        if version <= self.version:
            # Forgotten versions were published at or before the frontier, where nothing is pending.
            return self.published.get(version, 0)
        groups, total = self.settings.groups_per_version, self.published[self.version]
        if not self.replay:
            return total + (version - self.version) * groups
        for step in range(self.version, version):
            recorded = self.replay.get(step)
            total += recorded.size if recorded is not None and recorded.whole else groups
        return total

    def admitted_below(self, held: Version) -> int | None:
        """F(held + S + 1): the rank below which a worker holding `held` may start. None: no bound.

        A worker ahead of the ledger counts as being level.
        """
        assert self.settings is not None
        if self.settings.max_staleness is None:
            return None
        return self.trained_by(min(held, self.version) + self.settings.spare_versions + 1)

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
            far = ordinal - head >= self.settings.window  # only then to be counted without the dropped ones
            if far and self.ranks.rank(ordinal) >= self.ranks.rank(head) + self.settings.window:
                break
            taken.append(ordinal)
            if ordinal == head:
                head = self._unclaimed_from(ordinal + 1)
        return taken

    def recorded_claim(self, index: int) -> ev.StepClaimed | None:
        """The `index`-th claim of the running step, if a rewind has left it to be made again."""
        step = self.replay.get(self.version)
        return step.claims[index] if step is not None and index < len(step.claims) else None

    @property
    def repeated(self) -> int:
        """Steps from the running one on that were trained before and are only repeated."""
        return sum(step.whole for step in self.replay.values())

    @property
    def replayed(self) -> bool:
        """Whether the running step is a recorded one and has been claimed as it was."""
        step = self.replay.get(self.version)
        return step is not None and step.whole and len(self.claims) == len(step.claims)

    def holding(self) -> set[int]:
        """Ordinals of which bytes beside the task are kept."""
        kept = {ordinal for step in self.retention.steps.values() for ordinal in step.items}
        return kept | {ordinal for ordinal, item in self.items.items() if item.nbytes}

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

    def comparable(self) -> dict[str, Any]:
        """Everything, in a form that compares: two states that took the same events are equal."""
        return {
            **{name: getattr(self, name) for name in PLAIN},
            "frontier": self.as_frontier(),
            "items": {o: asdict(item) for o, item in sorted(self.items.items())},
            "pending": sorted(self.pending),
            "leases": sorted((asdict(lease) for lease in self.leases), key=lambda lease: lease["epoch"]),
            "waiting": {name: waiting.members() for name, waiting in self.stages.waiting.items()},
            "lacking": self.stages.lacking,
            "replay": {version: asdict(step) for version, step in self.replay.items()},
            "retained": {version: asdict(step) for version, step in self.retention.steps.items()},
            "retained_from": self.retention.floor,
            "sizes": self.sizes.means,
            "bias": self.bias.to_wire(),
        }

    # ------------------------------------------------------------------ moves that effects are made of

    def open(self, settings: StreamSettings, learner_epoch: int, opener: str) -> None:
        self.settings, self.learner_epoch, self.opener = settings, learner_epoch, opener
        self.lead = None if settings.wait_share is None else first_lead(settings)

    def enter_ready(self, ordinal: int, item: TaskRecord) -> None:
        """READY, for claims or for the stages that it still has to pass."""
        assert self.settings is not None
        item.state = State.READY
        if item.has(self.settings.columns):
            insort(self.ready, ordinal)
            self.ready_tokens += item.tokens
        else:
            self.partial.add(ordinal)
        if self.stages.by_name:
            self.stages.enter(ordinal, item)

    def leave_ready(self, ordinal: int, item: TaskRecord) -> None:
        """Its stages' leases are over with it."""
        for epoch in item.staging.values():
            self.leases.end(epoch)
        item.staging.clear()
        self.remove_ready(ordinal, item)

    def remove_ready(self, ordinal: int, item: TaskRecord) -> None:
        if ordinal in self.partial:
            self.partial.remove(ordinal)
        else:
            del self.ready[bisect_left(self.ready, ordinal)]
            self.ready_tokens -= item.tokens
        if self.stages.by_name:
            self.stages.leave(ordinal, item)

    def return_leases(self) -> None:
        """All of them: tasks go back to pending, groups wait for their stages again."""
        for ordinal in sorted(self.leased):
            self.to_pending(ordinal)
        for lease in list(self.leases):
            self.end_stage_lease(lease.ordinal, lease.stage)
        self.move_head()

    def unmake(self, ordinal: int) -> None:
        """The result of the task is void: it is pending as if it had never been leased."""
        item = self.items[ordinal]
        self.weigh(item, 0)
        self.bias.finished(item.tokens, -1)
        self.items[ordinal] = TaskRecord(State.PENDING, item.min_version)
        self.unmade.append(ordinal)
        self.push_pending(ordinal)

    def forget_progress(self, ordinal: int) -> None:
        item = self.items[ordinal]
        if item.progress:
            item.progress = False
            self.weigh(item, 0)
            self.unmade.append(ordinal)

    def forget_steps(self, below: Version) -> None:
        """Trained steps are not needed for a rewind any more."""
        for ordinal, item in self.retention.release(below):
            self.kept_bytes -= item.nbytes
            self.gone.append(ordinal)

    def take_trained(self, ordinal: int) -> TaskRecord:
        """It has ended; what was known of it is kept for a rewind."""
        item = self.items.pop(ordinal)
        self.nbytes -= item.nbytes
        self.kept_bytes += item.nbytes
        self.ranks.train(ordinal)
        self.bias.trained(item.tokens)
        return item

    def count_again(self, item: TaskRecord) -> None:
        """A recorded group is back in use: its bytes count."""
        self.recorded -= 1
        self.kept_bytes -= item.nbytes
        self.nbytes += item.nbytes

    def end(self, ordinal: int, dropped: str | None) -> None:
        item = self.items.pop(ordinal)
        if item.state is State.RECORDED:
            self.count_again(item)
        self.nbytes -= item.nbytes
        self.gone.append(ordinal)
        if dropped is None:
            self.ranks.train(ordinal)
            return
        self.ranks.drop(ordinal)
        known = dropped in self.dropped or len(self.dropped) < MAX_REASONS
        self.dropped[dropped if known else "other"] += 1

    def move_head(self) -> None:
        self.head = self._unclaimed_from(max(self.head, self.ranks.frontier))

    def granted(self, grant: int) -> int:
        """One more lease; returns its fencing epoch."""
        # The lineage in the high bits: a lease of an abandoned lineage can never pass for a current one.
        self.grants = grant
        return (self.lineage << 40) + grant

    def end_task_lease(self, ordinal: int, item: TaskRecord) -> None:
        self.leases.end(item.epoch)
        self.leased.remove(ordinal)

    def end_stage_lease(self, ordinal: int, stage: str) -> None:
        item = self.items[ordinal]
        self.leases.end(item.staging.pop(stage))
        self.stages.offer(ordinal, item)

    def to_pending(self, ordinal: int) -> None:
        item = self.items[ordinal]
        self.end_task_lease(ordinal, item)
        item.state, item.epoch = State.PENDING, -1
        if self.draining:
            self.bias.lost()
        self.push_pending(ordinal)

    def push_pending(self, ordinal: int) -> None:
        if self.draining:
            self.end(ordinal, DRAINED)
        else:
            heapq.heappush(self.pending, ordinal)

    def weigh(self, item: TaskRecord, nbytes: int) -> None:
        self.nbytes += nbytes - item.nbytes
        item.nbytes = nbytes

    def _unclaimed_from(self, ordinal: int) -> int:
        """The lowest ordinal from `ordinal` on that is pending, leased or ready."""
        while ordinal < self.next:
            item = self.items.get(ordinal)
            if item is not None and item.state is not State.CLAIMED and item.state is not State.RECORDED:
                break
            ordinal += 1
        return ordinal
