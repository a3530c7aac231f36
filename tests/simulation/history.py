"""The judge of a simulated run: the surviving history of the training stream, and what must be true of it.

It sees events once they are kept, as they were flushed, so that what a broker decided and lost has not happened. The
age of a token is counted by brute force: a policy (lineage, version) counts as the lowest version that any rewind
since its lineage went back to.
"""

from __future__ import annotations

from asyncrl.queue.ledger import events as ev
from asyncrl.queue.protocol.replies import Lease
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.types import Group
from tests.helpers.queue.ledger_cases import Observer, of

from .scenario import Scenario

Policy = tuple[int, int]

LINEAGE_BITS = 40


class History(Observer):
    """made: (ordinal, epoch) -> the policies that made the tokens of what was handed in under that lease; what is not
    there (in a journal of real processes) is taken to be as old as it was said to be."""

    def __init__(self, stream: StreamSettings) -> None:
        super().__init__(stream)
        self.made: dict[tuple[int, int], list[Policy]] = {}
        self.content: dict[int, list[Policy]] = {}
        self.finished: str | None = None
        self.drained = False
        self._lineage = 0
        self._forks: list[Policy] = []
        self._epochs: dict[int, int] = {}
        self._hedged: dict[int, int] = {}  # ordinal -> epoch of the earlier of two leases
        self._progress: dict[int, int] = {}  # ordinal -> bytes of what is finished of it
        self._handed_on: dict[tuple[int, int], int] = {}  # (ordinal, epoch) -> the same, when it was leased

    def effective(self, policy: Policy) -> int:
        lineage, version = policy
        return min([version, *(at for fork, at in self._forks if fork > lineage)])

    def observe(self, event: ev.Event) -> None:
        super().observe(event)
        match event:
            case ev.Leased(ordinal=ordinal, grant=grant):
                assert ordinal not in self.ends
                self._epochs[ordinal] = (self._lineage << LINEAGE_BITS) + grant
                if ordinal in self._progress:
                    self._handed_on[ordinal, self._epochs[ordinal]] = self._progress[ordinal]
            case ev.Hedged(ordinal=ordinal, grant=grant):
                epoch = (self._lineage << LINEAGE_BITS) + grant
                assert ordinal not in self.ends
                assert ordinal not in self._hedged
                self._hedged[ordinal], self._epochs[ordinal] = self._epochs[ordinal], epoch
                if ordinal in self._progress:
                    self._handed_on[ordinal, epoch] = self._progress[ordinal]
            case ev.HedgeEnded(ordinal=ordinal, epoch=epoch):
                earlier = self._hedged.pop(ordinal)
                assert epoch in (earlier, self._epochs[ordinal])
                if epoch == self._epochs[ordinal]:
                    self._epochs[ordinal] = earlier
            case ev.Requeued(ordinal=ordinal) | ev.Dropped(ordinal=ordinal):
                self._hedged.pop(ordinal, None)
            case ev.Progressed(ordinal=ordinal, nbytes=nbytes):
                self._progress[ordinal] = nbytes
            case ev.Committed(ordinal=ordinal, start_version=version):
                assert ordinal not in self.ends
                self._hedged.pop(ordinal, None)
                self._progress.pop(ordinal, None)
                said = [(self._lineage, version)]
                self.content[ordinal] = self.made.get((ordinal, self._epochs[ordinal]), said)
                self.start[ordinal] = min(map(self.effective, self.content[ordinal]))
            case ev.Recovered(lost=lost):
                for ordinal in lost:
                    self._progress.pop(ordinal, None)
            case ev.Forked(lineage=lineage):
                self._lineage, self._hedged = lineage, {}
            case ev.SteppedBack(lineage=lineage, frontier=frontier):
                self._fork(lineage, frontier.version)
            case ev.Rewound(lineage=lineage):
                self._reset(event)
                self._fork(lineage, event.frontier.version)
            case ev.Drained():
                self.drained = True
            case ev.Finished(reason=reason):
                self.finished = reason

    def _fork(self, lineage: int, version: int) -> None:
        assert lineage > self._lineage
        self._lineage = lineage
        self._forks.append((lineage, version))
        self._hedged = {}  # all leases are over
        self._progress = {}  # it may be too old now, and done again

    def _reset(self, event: ev.Rewound) -> None:
        """All that came after the frontier is done again; what it says has ended must have ended that way."""
        frontier = event.frontier
        self.steps = {step: claims for step, claims in self.steps.items() if step < frontier.version}
        trained = {ordinal for claims in self.steps.values() for ordinal in of(claims)}
        assert len(trained) == frontier.trained_total
        assert trained >= set(frontier.trained)
        dropped = (set(range(frontier.frontier)) - trained) | set(frontier.dropped_ordinals)
        # A drain names no ordinals.
        assert self.drained or all(self.ends[ordinal] == "dropped" for ordinal in dropped)
        assert not dropped & trained
        self.ends = {**dict.fromkeys(trained, "trained"), **dict.fromkeys(dropped, "dropped")}
        self.known = frontier.frontier
        self.claims, self.record, self.early, self.disturbed = [], {}, None, True

    def check_claim(self, event: ev.StepClaimed) -> None:
        if not self.drained:
            super().check_claim(event)
            return
        # Which tasks a drain has dropped is not known here, and so no rank.
        recorded = self.record.get(event.step, [])
        if event.number >= len(recorded):
            for ordinal in of([event]):
                assert event.step - self.start[ordinal] <= self.stream.max_staleness
        self.claims.append(event)

    def check_handed_on(self, lease: Lease) -> None:
        """Whoever leases a task gets what is finished of it."""
        nbytes = sum(map(len, lease.progress))
        expected = self._handed_on.get((lease.task.ordinal, lease.epoch), nbytes)
        assert nbytes == expected, f"{lease} without what was finished"

    def check_received(self, group: Group) -> None:
        """The learner has got what was handed in."""
        ordinal = group.task.ordinal
        policies = list(zip(group.token_ids.tolist(), group.versions.tolist(), strict=True))
        assert policies == self.content[ordinal], f"ordinal {ordinal} is not what was committed"
        assert set(group.columns) >= set(self.stream.columns)
        for column in group.columns.values():
            assert (column == ordinal).all()

    def check_end(self, plan: Scenario, learned: dict[int, list[int]]) -> None:
        """Every ordinal ended once (`end` refuses a second time), and the learner trained on exactly the trained."""
        trained = {step: sorted(of(claims)) for step, claims in self.steps.items()}
        assert trained == {step: sorted(ordinals) for step, ordinals in learned.items()}
        assert sorted(trained) == list(range(len(trained)))
        ended = {ordinal for ordinal, how in self.ends.items() if how == "trained"}
        assert ended == {ordinal for ordinals in trained.values() for ordinal in ordinals}
        dropped = self.ends.keys() - ended
        if not (plan.refused or plan.stream.stages):
            assert dropped <= plan.bad | plan.corrupt, "dropped without a cause"
        if not (self.drained or len(learned) >= plan.versions):
            assert self.known == plan.tasks
            assert set(self.ends) == set(range(plan.tasks))
