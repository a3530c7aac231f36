"""The state of one stream, in parts, and the moves that concern several of them.

No rules: the ledger has checked each event (ledger.py) before it is applied (transitions.py). Memory follows the live
tasks and the steps that are kept for a rewind.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.lookahead import Lookahead, first_lead
from asyncrl.queue.ledger.state.leases import LeaseRecord, Leases
from asyncrl.queue.ledger.state.sizes import ByteUsage, LengthBias
from asyncrl.queue.ledger.state.stages import Stages
from asyncrl.queue.ledger.state.steps import Steps
from asyncrl.queue.ledger.state.tasks import DRAINED, State, TaskRecord, Tasks
from asyncrl.queue.protocol.settings import Frontier, StreamSettings
from asyncrl.types import Version


@dataclass(slots=True)
class LedgerState:
    """The parts of the state, and the fields of the stream as a whole.

    opener     who opened the stream last, and by which of its calls
    exhausted  the feeder has no more tasks
    lead       None: as far as the bound allows
    """

    settings: StreamSettings | None = None
    learner_epoch: int = 0
    opener: str = ""
    closed: str | None = None
    draining: bool = False
    exhausted: bool = False
    lineage: int = 0
    lead: Lookahead | None = None
    tasks: Tasks = field(default_factory=Tasks)
    steps: Steps = field(default_factory=Steps)
    leases: Leases = field(default_factory=Leases)
    stages: Stages = field(default_factory=Stages)
    usage: ByteUsage = field(default_factory=ByteUsage)
    bias: LengthBias = field(default_factory=LengthBias)

    @property
    def dry(self) -> bool:
        """Nothing that could still be claimed."""
        return not (self.tasks.to_come or self.tasks.ready or self.steps.recorded or self.ahead)

    @property
    def ahead(self) -> list[int]:
        """Groups that were claimed ahead: for the next step or, until that is claimed, for the running one."""
        for later in (0, 1):
            step = self.steps.replay.get(self.steps.version + later)
            first = None if step is None else next(step.ordinals(), None)
            if step is not None and first is not None and self.tasks.records[first].state is State.AHEAD:
                return list(step.ordinals())  # all of them are
        return []

    @property
    def reserved(self) -> int:
        """Bytes expected of what is leased, and of columns that ready groups will get."""
        return self.usage.reserved(len(self.tasks.leased), self.stages.lacking)

    def as_frontier(self) -> Frontier:
        ranks = self.tasks.ranks
        return Frontier(
            lineage=self.lineage,
            version=self.steps.version,
            frontier=ranks.frontier,
            kept=ranks.kept,
            trained=tuple(sorted(ranks.trained)),
            dropped_ordinals=tuple(ranks.dropped),
            dropped=dict(self.tasks.dropped),
            published=dict(self.steps.published),
            grants=self.leases.grants,
        )

    def open(self, settings: StreamSettings, learner_epoch: int, opener: str) -> None:
        self.settings, self.learner_epoch, self.opener = settings, learner_epoch, opener
        self.lead = None if settings.wait_share is None else first_lead(settings)

    # ------------------------------------------------------------------ leases

    def grant(self, e: ev.Leased | ev.Hedged | ev.StageLeased, stage: str) -> int:
        """One more lease; returns its fencing epoch."""
        # The lineage in the high bits: a lease of an abandoned lineage can never pass for a current one.
        epoch = (self.lineage << 40) + e.grant
        self.leases.grants = e.grant
        self.leases.grant(LeaseRecord(e.ordinal, stage, e.worker, epoch, e.at, e.deadline))
        return epoch

    def end_task_lease(self, ordinal: int, task: TaskRecord) -> None:
        self.leases.end_all(ordinal, task.epoch)
        self.tasks.leased.remove(ordinal)

    def end_stage_lease(self, ordinal: int, stage: str) -> None:
        task = self.tasks.records[ordinal]
        self.leases.end(task.staging.pop(stage))
        self.stages.offer(ordinal, task)

    def return_leases(self) -> None:
        """All of them: tasks go back to pending, groups wait for their stages again."""
        for ordinal in sorted(self.tasks.leased):
            self.to_pending(ordinal)
        for lease in list(self.leases):
            self.end_stage_lease(lease.ordinal, lease.stage)
        self.tasks.move_head()

    # ------------------------------------------------------------------ from state to state

    def to_pending(self, ordinal: int, wanted: bool = False) -> None:
        """The lease of a task is over. wanted: the task is leased again though the stream drains."""
        task = self.tasks.records[ordinal]
        self.end_task_lease(ordinal, task)
        task.state, task.epoch = State.PENDING, -1
        if wanted:
            heapq.heappush(self.tasks.pending, ordinal)
            return
        if self.draining:
            self.bias.lost()
        self.push_pending(ordinal)

    def push_pending(self, ordinal: int) -> None:
        if self.draining:
            self.end(ordinal, DRAINED)
        else:
            heapq.heappush(self.tasks.pending, ordinal)

    def enter_ready(self, ordinal: int, task: TaskRecord) -> None:
        """READY, for claims or for the stages that it still has to pass."""
        assert self.settings is not None
        self.tasks.enter_ready(ordinal, task, self.settings.columns)
        if self.stages.by_name:
            self.stages.enter(ordinal, task)

    def leave_ready(self, ordinal: int, task: TaskRecord) -> None:
        """Its stages' leases are over with it."""
        for epoch in task.staging.values():
            self.leases.end(epoch)
        task.staging.clear()
        self.remove_ready(ordinal, task)

    def remove_ready(self, ordinal: int, task: TaskRecord) -> None:
        self.tasks.leave_ready(ordinal, task)
        if self.stages.by_name:
            self.stages.leave(ordinal, task)

    def use_again(self, task: TaskRecord) -> None:
        """A recorded group is back in use: its bytes count."""
        self.steps.recorded -= 1
        self.usage.retain(-task.nbytes)

    def end(self, ordinal: int, dropped: str | None) -> None:
        """The task is trained, or dropped for that reason."""
        task = self.tasks.end(ordinal, dropped)
        if task.state is State.RECORDED:
            self.use_again(task)
        self.usage.live -= task.nbytes
        self.usage.gone.append(ordinal)

    # ------------------------------------------------------------------ what is forgotten

    def unmake(self, ordinal: int) -> None:
        """The result of the task is void: it is pending as if it had never been leased."""
        task = self.tasks.records[ordinal]
        self.usage.weigh(task, 0)
        self.bias.finished(task.tokens, -1)
        self.tasks.records[ordinal] = TaskRecord(State.PENDING, task.min_version)
        self.usage.unmade.append(ordinal)
        self.push_pending(ordinal)

    def forget_progress(self, ordinal: int) -> None:
        task = self.tasks.records[ordinal]
        if task.progress:
            task.progress = False
            self.usage.weigh(task, 0)
            self.usage.unmade.append(ordinal)

    def forget_steps(self, below: Version) -> None:
        """Trained steps are not needed for a rewind any more."""
        for ordinal, task in self.steps.retained.release(below):
            self.usage.retained -= task.nbytes
            self.usage.gone.append(ordinal)
