"""A ledger, its workers and its learner under random schedules, and an observer that knows everything by brute force.

Workers lag in applying versions, lose leases, finish parts of tasks, drop tasks and die; stages come and go; the
learner claims in both modes, rejects and abandons steps, and comes back at checkpoints; the broker restarts and has
lost bytes. The observer follows the events alone and checks every claim against the bound and the window.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from hypothesis import strategies as st

from asyncrl.errors import RefusedError
from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.learner_commands import Claimed
from asyncrl.queue.ledger.state.ledger_state import LedgerState
from asyncrl.queue.protocol.settings import Frontier, StageSettings, StreamSettings
from tests.helpers.queue.ledger_driver import DrivenLedger as Ledger

LEASE_S = 10.0
MAX_TOKENS = 8
NBYTES = 10

Lease = tuple[int, int]
"""(ordinal, epoch)"""


@contextmanager
def may_refuse(*reasons: str) -> Iterator[None]:
    try:
        yield
    except RefusedError as refusal:
        if refusal.reason not in reasons:
            raise


@dataclass
class Worker:
    name: str
    held: int = 0


class Observer:
    """What has happened to every ordinal, from the events.

    ends     of the surviving history · start: the oldest version that its tokens count as
    steps    the claims of every trained step · record: claims that a rewind has left to be made again
    """

    def __init__(self, stream: StreamSettings) -> None:
        self.stream = stream
        self.log: list[ev.Event] = []
        self.known = 0
        self.ends: dict[int, str] = {}
        self.start: dict[int, int] = {}
        self.claims: list[ev.StepClaimed] = []
        self.steps: dict[int, list[ev.StepClaimed]] = {}
        self.record: dict[int, list[ev.StepClaimed]] = {}
        self.early: ev.StepClaimed | None = None  # the claim that came ahead, until its step makes it
        self.disturbed = False

    def observe(self, event: ev.Event) -> None:
        self.log.append(event)
        match event:
            case ev.Submitted(first=first, tasks=count):
                self.known = first + count
            case ev.Committed(ordinal=ordinal, start_version=start_version):
                self.start[ordinal] = start_version
            case ev.Dropped(ordinal=ordinal):
                self.end(ordinal, "dropped")
            case ev.StepClaimed():
                self.check_claim(event)
            case ev.ClaimedAhead(step=step, shares=shares, last=last):
                self.check_ahead(ev.StepClaimed(step, 0, shares, last))
            case ev.StepTrained(step=step):
                self.end_all(of(self.claims), "trained")
                self.steps[step], self.claims = self.claims, []
                self.record.pop(step, None)
            case ev.StepRejected():
                self.end_all(of(self.claims), "dropped")
                self.begin_anew()
            case ev.StepAbandoned(dropped=dropped):
                self.end_all(dropped, "dropped")
                self.begin_anew()
            case ev.Recovered(lost=lost):
                if {*lost} & (self.recorded - {*of(self.claims)}):
                    self.forget_record()
            case ev.SteppedBack(frontier=frontier):
                self.step_back(frontier.version)

    def end(self, ordinal: int, how: str) -> None:
        assert ordinal not in self.ends
        self.ends[ordinal] = how

    def end_all(self, ordinals: Iterable[int], how: str) -> None:
        for ordinal in ordinals:
            self.end(ordinal, how)

    def begin_anew(self) -> None:
        self.claims, self.record, self.early, self.disturbed = [], {}, None, True

    def forget_record(self) -> None:
        """Of later steps. The running one goes on if the learner may have all of it."""
        if self.claims and self.claims[-1].last:
            self.record = {
                step: claims for step, claims in self.record.items() if step == self.claims[-1].step
            }
            self.disturbed = True
        else:
            self.begin_anew()

    def step_back(self, version: int) -> None:
        """Every step since is to be repeated, and no token is of a newer version than this."""
        current = max(self.steps, default=-1) + 1
        again = {step: self.steps.pop(step) for step in range(version, current)}
        for claims in again.values():
            for ordinal in of(claims):
                del self.ends[ordinal]
        running = self.record.pop(current, [])
        self.record |= again
        self.record[current] = max(running, self.claims, key=len)
        if self.early is not None:
            self.record[self.early.step] = [self.early]
        self.start = {ordinal: min(start, version) for ordinal, start in self.start.items()}
        self.claims, self.early, self.disturbed = [], None, True

    @property
    def recorded(self) -> set[int]:
        return {ordinal for claims in self.record.values() for ordinal in of(claims)}

    def rank(self, ordinal: int) -> int:
        return sum(self.ends.get(below) != "dropped" for below in range(ordinal))

    def head(self, taken: Sequence[int] = ()) -> int:
        """The lowest ordinal that nobody has claimed, nor is `taken` by the claim under way."""
        early = [] if self.early is None else [self.early]
        gone = {*of(self.claims), *of(early), *self.recorded, *self.ends, *taken}
        return next(o for o in range(self.known + 1) if o not in gone)

    def check_claim(self, event: ev.StepClaimed) -> None:
        """As it was recorded; else by the staleness bound and the window, one group after another."""
        recorded = self.record.get(event.step, [])
        if self.early is not None and self.early.step == event.step:
            recorded, self.early = [self.early], None
        if event.number < len(recorded):
            assert event == recorded[event.number]
            self.claims.append(event)
            return
        self.check_bounds(event)
        self.claims.append(event)
        assert len([*of(self.claims)]) <= self.stream.groups_per_version

    def check_ahead(self, event: ev.StepClaimed) -> None:
        """Of the step after one that has all its claims, and by the same bounds."""
        assert self.claims[-1].last
        assert event.step == self.claims[-1].step + 1
        assert self.early is None
        assert not self.record.get(event.step)
        self.check_bounds(event)
        assert event.last == (len([*of([event])]) == self.stream.groups_per_version)
        self.early = event

    def check_bounds(self, event: ev.StepClaimed) -> None:
        taken = sorted(of([event]))
        for at, ordinal in enumerate(taken):
            assert event.step - self.start[ordinal] <= self.stream.max_staleness
            assert self.rank(ordinal) < self.rank(self.head(taken[:at])) + self.stream.window


def of(claims: list[ev.StepClaimed]) -> Iterator[int]:
    for claim in claims:
        for share in claim.shares:
            yield from share


def comparable(state: LedgerState) -> dict[str, Any]:
    """All that counts, in a form that compares: two states that took the same events are equal."""
    parts = asdict(state)
    parts["tasks"]["pending"].sort()
    parts["grants"], parts["hedged"] = parts["leases"]["grants"], parts["leases"]["hedged"]
    parts["leases"] = sorted(parts["leases"]["by_epoch"].values(), key=lambda lease: lease["epoch"])
    del parts["usage"]["unmade"], parts["usage"]["gone"]
    return parts


def holding(state: LedgerState) -> set[int]:
    """Ordinals of which bytes beside the task are kept."""
    kept = {ordinal for step in state.steps.retained.steps.values() for ordinal in step.records}
    return kept | {ordinal for ordinal, item in state.tasks.records.items() if item.nbytes}


class Run(Observer):
    """A ledger under test and those who work with it. Every method with a number is an action of a schedule."""

    def __init__(self, stream: StreamSettings) -> None:
        super().__init__(stream)
        self.ledger = Ledger(self.observe)
        self.workers = [Worker(f"w{i}") for i in range(3)]
        self.now = 0.0
        self.under: dict[int, int] = {}  # the version of the worker that has the task
        self.reused: dict[int, int] = {}  # the oldest version of what is kept of an unfinished task
        self.snapshots: list[Frontier] = []
        self.aheads: dict[tuple[int, int], Claimed] = {}  # by step and rank, of this learner
        self.ledger.open(stream, None)

    def observe(self, event: ev.Event) -> None:
        super().observe(event)
        match event:
            case ev.Leased(ordinal=ordinal, held=held):
                self.under[ordinal] = held
                if not self.ledger.state.tasks.records[ordinal].progress:
                    self.reused.pop(ordinal, None)
                self.check_room(ordinal)
            case ev.Hedged(ordinal=ordinal, held=held):
                self.under[ordinal] = min(self.under[ordinal], held)
            case ev.StepTrained():
                # Steps whose bytes were lost are not kept: nobody goes back to before them.
                floor = self.ledger.state.steps.retained.floor
                self.snapshots = [snapshot for snapshot in self.snapshots if snapshot.version >= floor]
            case ev.Progressed(ordinal=ordinal):
                self.reused[ordinal] = self.oldest(ordinal)
            case ev.SteppedBack(frontier=frontier):
                self.reused = {o: min(v, frontier.version) for o, v in self.reused.items()}

    def check_room(self, ordinal: int) -> None:
        """Depth and bytes hold, except for what the learner may be waiting for."""
        state, stream = self.ledger.state, self.stream
        waited_for = max(stream.window, stream.groups_per_version if stream.max_staleness == 0 else 1)
        inside = self.rank(ordinal) < self.rank(self.head()) + waited_for
        assert state.tasks.in_stock <= stream.depth or (inside and self.disturbed)
        assert state.tasks.in_stock + len(state.ahead) <= stream.depth or inside
        assert state.usage.live + state.reserved <= stream.max_bytes or inside

    def oldest(self, ordinal: int) -> int:
        """What a worker may make of a lease: tokens as old as it and what it reuses."""
        return min(self.under[ordinal], self.reused.get(ordinal, self.under[ordinal]))

    @property
    def step(self) -> int:
        return self.ledger.state.steps.version

    @property
    def learner(self) -> int:
        return self.ledger.state.learner_epoch

    def leases(self, stage: str = "") -> list[Lease]:
        standing = [lease for lease in self.ledger.state.leases if lease.stage == stage]
        return sorted((lease.ordinal, lease.epoch) for lease in standing)

    # ------------------------------------------------------------------ generators

    def submit(self, n: int) -> None:
        if room := self.ledger.room():
            self.ledger.submit(self.ledger.state.tasks.next, min(room, n + 1))

    def lease(self, n: int) -> None:
        worker = self.workers[n % len(self.workers)]
        self.ledger.lease(worker.name, worker.held, self.ledger.state.lineage, 1 + n % 4, self.now)

    def flip(self, n: int) -> None:
        worker = self.workers[n % len(self.workers)]
        worker.held = min(worker.held + 1 + n % 2, self.step)

    def commit(self, n: int) -> None:
        """As old as the lease allows."""
        if leases := self.leases():
            ordinal, epoch = leases[n % len(leases)]
            columns = ("length",) if n % 2 else ()
            self.ledger.commit(
                ordinal, epoch, 1 + n % 5, NBYTES + n % 3, self.oldest(ordinal), ordinal, columns
            )

    def progress(self, n: int) -> None:
        if leases := self.leases():
            self.ledger.progress(*leases[n % len(leases)], n % 4)

    def drop(self, n: int) -> None:
        if leases := self.leases():
            self.ledger.drop(*leases[n % len(leases)], "reward")

    def give_back(self, n: int) -> None:
        self.ledger.give_back(self.leases()[n % 3 :: 2])

    def expire(self, n: int) -> None:
        """Some workers renew, the others' leases run out."""
        self.now += LEASE_S * 0.6
        standing = sorted((lease.ordinal, lease.epoch) for lease in self.ledger.state.leases)
        self.ledger.renew(standing[n % 2 :: 2], self.now)
        self.now += LEASE_S * 0.6
        self.ledger.expire(self.now)

    # ------------------------------------------------------------------ stages

    def stage_lease(self, n: int) -> None:
        for stage in self.stream.stages:
            self.ledger.stage_lease(stage.name, "s", 1 + n % 4, self.now)

    def stage_commit(self, n: int) -> None:
        for stage in self.stream.stages:
            for ordinal, epoch in self.leases(stage.name)[n % 2 :: 2]:
                self.ledger.stage_commit(stage.name, ordinal, epoch, 2, self.step, n)

    def stage_drop(self, n: int) -> None:
        for stage in self.stream.stages:
            for ordinal, epoch in self.leases(stage.name)[n % 4 : n % 4 + 1]:
                self.ledger.stage_drop(stage.name, ordinal, epoch, "unscored")

    # ------------------------------------------------------------------ the learner

    def claim(self, n: int) -> None:
        with may_refuse("complete", "abandoned"):
            index = len(self.ledger.state.steps.claims)
            self.ledger.claim(self.learner, self.step, index, 0, MAX_TOKENS, n % 2 == 0)

    def ahead(self, n: int) -> None:
        """Some rank wants the first claim of the next step; rank 0 more often."""
        rank = max(0, n % 6 - 3) % self.stream.learners
        claimed = self.ledger.claim(self.learner, self.step + 1, 0, rank, MAX_TOKENS, False, ahead=True)
        if claimed is not None:
            self.aheads[self.step + 1, rank] = claimed

    def confirm(self, n: int) -> None:
        """A rank that got the first claim ahead repeats it, mostly without its bytes. It stands, or is refused."""
        rank = n % self.stream.learners
        if (held := self.aheads.get((self.step, rank))) is None:
            return
        with may_refuse("abandoned"):
            at = (self.learner, self.step, 0, rank, MAX_TOKENS, False, held.attempt)
            now = self.ledger.claim(*at, received=len(held.ordinals) if n % 4 else 0)
            assert now is not None
            assert now == held._replace(ahead=False)

    def fetch(self, n: int) -> None:
        """Some rank asks for what it may have got already; if its bytes are lost, the step begins anew."""
        if self.claims:
            with may_refuse("abandoned"):
                index, rank = n % len(self.claims), n % self.stream.learners
                self.ledger.claim(self.learner, self.step, index, rank, MAX_TOKENS, n % 2 == 0)

    def trained(self, n: int) -> None:
        """Whenever the step is complete, or short of groups after a drain."""
        with may_refuse("incomplete"):
            self.ledger.trained(self.learner, self.step, n / 100)

    def reject(self, n: int) -> None:
        if n % 4 == 0:
            self.ledger.reject(self.learner, self.step, "loss")

    def abandon(self, n: int) -> None:
        if n % 4 == 0:
            bad = tuple(of(self.claims))[n % 3 :: 3]
            self.ledger.abandon(self.learner, self.step, self.ledger.state.steps.attempt, bad, "corrupt")

    # ------------------------------------------------------------------ rewinds and restarts

    def snapshot(self, n: int) -> None:
        self.snapshots.append(Frontier.from_wire(self.ledger.frontier(self.learner).to_wire()))

    def checkpointed(self, n: int) -> None:
        """The newest snapshot is part of a checkpoint that is committed; nobody goes back to an older one."""
        if self.snapshots:
            del self.snapshots[:-1]
            self.ledger.checkpointed(self.learner, self.snapshots[-1].version)

    def rewind(self, n: int) -> None:
        """A new learner at one of the snapshots; those after it are of a branch that nobody knows any more."""
        if self.snapshots:
            at = n % len(self.snapshots)
            del self.snapshots[at + 1 :]
            self.ledger.open(self.stream, self.snapshots[at])
            self.aheads.clear()
            for worker in self.workers:
                worker.held = min(worker.held, self.step)

    def recover(self, n: int) -> None:
        """The broker comes back, with the bytes of some groups lost."""
        held = sorted(holding(self.ledger.state))
        self.now = float(n)
        self.ledger.recover(self.now, held[n::7] if n % 4 else ())
        floor = self.ledger.state.steps.retained.floor
        self.snapshots = [snapshot for snapshot in self.snapshots if snapshot.version >= floor]

    # ------------------------------------------------------------------ everybody cooperates

    def round(self, n: int) -> None:
        """One turn of everybody but the learner."""
        self.submit(self.stream.depth)
        self.lease(n)
        for _ in self.leases():
            self.commit(0)
        for _ in self.stream.stages:
            self.stage_lease(3)
            self.stage_commit(0)
            self.stage_commit(1)

    def complete_step(self) -> None:
        """The step must come to its end within a bounded number of rounds."""
        start, self.now = self.step, self.now + 2 * LEASE_S
        self.ledger.expire(self.now)
        for worker in self.workers:
            worker.held = self.step
        for _ in range(8 * self.stream.depth):
            self.round(3)
            self.claim(1)
            self.trained(0)
            if self.step > start:
                return
        raise AssertionError(f"step {start} cannot be completed: {self.ledger.counts(self.now)}")


WORK = ("submit", "lease", "commit", "claim", "trained", "flip", "round", "stage_lease", "stage_commit")
AHEAD = ("ahead", "confirm")
FAULTS = ("drop", "give_back", "expire", "progress", "reject", "abandon", "stage_drop", "fetch")
RETURNS = ("snapshot", "checkpointed", "rewind", "recover")


@st.composite
def schedules(draw: st.DrawFn, rare: tuple[str, ...] = ()) -> list[tuple[str, int]]:
    """A long random schedule in which some actions are frequent, some rare and some faults never happen.

    Drawn from one seed: hypothesis would make long lists mostly of zeros.
    """
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    weights = [rng.choice((4, 8, 16)) for _ in WORK] + [rng.choice((0, 8)) for _ in AHEAD]
    weights += [rng.choice((0, 0, 1, 4)) for _ in FAULTS]
    weights += [rng.choice((0, 1, 3)) for _ in rare]
    return [
        (action, rng.randrange(12)) for action in rng.choices(WORK + AHEAD + FAULTS + rare, weights, k=400)
    ]


STAGES = (
    StageSettings("reward", adds=("rewards",)),
    StageSettings("critic", needs=("rewards",), adds=("values",)),
)


@st.composite
def streams(draw: st.DrawFn) -> StreamSettings:
    groups, staleness = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    window = draw(st.integers(1, staleness * groups + 1))
    depth = groups + window - 1 + draw(st.integers(0, 6))
    columns = draw(st.sampled_from([(), ("rewards",), ("rewards", "values")]))
    return StreamSettings(
        groups,
        staleness,
        window,
        depth,
        max_bytes=draw(st.sampled_from([1, 25, 100, 10_000])),
        lease_s=LEASE_S,
        learners=draw(st.integers(1, 3)),
        columns=columns,
        stages=STAGES,
        wait_share=draw(st.sampled_from([None, 0.05])),
        hedge_s=draw(st.sampled_from([None, 0.5 * LEASE_S])),
    )


def play(run: Run, schedule: list[tuple[str, int]]) -> None:
    for action, n in schedule:
        getattr(run, action)(n)
