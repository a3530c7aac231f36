"""The ledger's guarantees over random schedules, checked by brute force on its event log.

Workers lag in applying versions, lose leases, drop tasks and die; the learner claims in both modes, rejects
steps and rewinds. Whatever happens: no group trains too old, every ordinal ends once, and the step can be
completed.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import RefusedError
from asyncrl.queue import events as ev
from asyncrl.queue.ledger import Frontier, Ledger, StreamSettings

LEASE_S = 10.0
MAX_TOKENS = 8


@contextmanager
def may_refuse(reason: str) -> Iterator[None]:
    try:
        yield
    except RefusedError as refusal:
        if refusal.reason != reason:
            raise


@dataclass
class Worker:
    name: str
    held: int = 0


class Run:
    """A ledger under test, its workers, and what an observer of the events knows."""

    def __init__(self, stream: StreamSettings) -> None:
        self.stream = stream
        self.log: list[ev.Event] = []
        self.ledger = Ledger(self.observe)
        self.workers = [Worker(f"w{i}") for i in range(3)]
        self.now = 0.0
        # What brute force knows: every ordinal's end, who was leased what, and what came of it.
        self.ends: dict[int, str] = {}
        self.claimed: set[int] = set()
        self.start: dict[int, int] = {}
        self.known = 0
        self.ledger.open(stream, None)

    # ------------------------------------------------------------------ the observer

    def observe(self, event: ev.Event) -> None:
        self.log.append(event)
        match event:
            case ev.Submitted(first=first, count=count):
                self.known = first + count
            case ev.Leased():
                self.check_depth()
            case ev.Committed(ordinal=ordinal, start_version=start_version):
                self.start[ordinal] = start_version
            case ev.Dropped(ordinal=ordinal):
                self.end(ordinal, "dropped")
            case ev.StepClaimed():
                self.check_claim(event)
            case ev.StepTrained() | ev.StepRejected():
                for ordinal in sorted(self.claimed):
                    self.end(ordinal, "trained" if isinstance(event, ev.StepTrained) else "dropped")
                self.claimed = set()

    def end(self, ordinal: int, how: str) -> None:
        assert ordinal not in self.ends
        self.ends[ordinal] = how

    def rank(self, ordinal: int) -> int:
        return sum(self.ends.get(below) != "dropped" for below in range(ordinal))

    def head(self) -> int:
        taken = self.claimed | set(self.ends)
        return next(o for o in range(self.known + 1) if o not in taken)

    def check_claim(self, event: ev.StepClaimed) -> None:
        """The staleness bound, and the window, one group after another."""
        for ordinal in sorted(o for share in event.shares for o in share):
            assert event.step - self.start[ordinal] <= self.stream.max_staleness
            assert self.rank(ordinal) < self.rank(self.head()) + self.stream.window
            self.claimed.add(ordinal)
        assert len(self.claimed) <= self.stream.groups_per_version

    def check_depth(self) -> None:
        counts = self.ledger.counts(self.now)
        assert counts["leased"] + counts["ready"] <= self.stream.depth

    # ------------------------------------------------------------------ what can happen

    @property
    def step(self) -> int:
        return self.ledger.book.version

    def leases(self) -> list[tuple[int, int]]:
        book = self.ledger.book
        return [(o, book.items[o].epoch) for o in sorted(book.leased)]

    def submit(self, n: int) -> None:
        if room := self.ledger.room():
            self.ledger.submit(self.ledger.book.next, min(room, n + 1))

    def lease(self, n: int) -> None:
        worker = self.workers[n % len(self.workers)]
        self.ledger.lease(worker.name, worker.held, self.ledger.book.lineage, 1 + n % 4, self.now)

    def flip(self, n: int) -> None:
        worker = self.workers[n % len(self.workers)]
        worker.held = min(worker.held + 1 + n % 2, self.step)

    def commit(self, n: int) -> None:
        """As old as the lease allows."""
        if leases := self.leases():
            ordinal, epoch = leases[n % len(leases)]
            held = self.ledger.book.items[ordinal].held
            self.ledger.commit(ordinal, epoch, 1 + n % 5, 10, held, ordinal)

    def drop(self, n: int) -> None:
        if leases := self.leases():
            self.ledger.drop(*leases[n % len(leases)], "reward")

    def give_back(self, n: int) -> None:
        self.ledger.give_back(self.leases()[n % 3 :: 2])

    def expire(self, n: int) -> None:
        """Some workers renew, the others' leases run out."""
        self.now += LEASE_S * 0.6
        self.ledger.renew(self.leases()[n % 2 :: 2], self.now)
        self.now += LEASE_S * 0.6
        self.ledger.expire(self.now)

    def claim(self, n: int) -> None:
        with may_refuse("complete"):
            index = len(self.ledger.book.claims)
            self.ledger.claim(self.ledger.book.learner_epoch, self.step, index, 0, MAX_TOKENS, n % 2 == 0)

    def trained(self, n: int) -> None:
        """Whenever the step is complete, or short of groups after a drain."""
        with may_refuse("incomplete"):
            self.ledger.trained(self.ledger.book.learner_epoch, self.step)

    def reject(self, n: int) -> None:
        if n % 4 == 0:
            self.ledger.reject(self.ledger.book.learner_epoch, self.step, "loss")

    def complete_step(self) -> None:
        """Everybody cooperates: the step must come to its end within a bounded number of rounds."""
        start, self.now = self.step, self.now + 2 * LEASE_S
        self.ledger.expire(self.now)
        for worker in self.workers:
            worker.held = self.step
        for _ in range(8 * self.stream.depth):
            self.submit(self.stream.depth)
            self.lease(3)
            for _ in self.leases():
                self.commit(0)
            self.claim(1)
            self.trained(0)
            if self.step > start:
                return
        raise AssertionError(f"step {start} cannot be completed: {self.ledger.counts(self.now)}")


WORK = ("submit", "lease", "commit", "claim", "trained", "flip")
FAULTS = ("drop", "give_back", "expire", "reject")


@st.composite
def schedules(draw: st.DrawFn) -> list[tuple[str, int]]:
    """A long random schedule in which some actions are frequent, some rare and some faults never happen.

    Drawn from one seed: hypothesis would make long lists mostly of zeros.
    """
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    weights = [rng.choice((4, 8, 16)) for _ in WORK] + [rng.choice((0, 0, 1, 4)) for _ in FAULTS]
    return [(action, rng.randrange(12)) for action in rng.choices(WORK + FAULTS, weights, k=300)]


@st.composite
def streams(draw: st.DrawFn) -> StreamSettings:
    groups, staleness = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    window = draw(st.integers(1, staleness * groups + 1))
    depth = groups + window - 1 + draw(st.integers(0, 6))
    max_bytes = draw(st.sampled_from([1, 25, 10_000]))
    learners = draw(st.integers(1, 3))
    return StreamSettings(groups, staleness, window, depth, max_bytes, LEASE_S, learners)


def play(run: Run, schedule: list[tuple[str, int]]) -> None:
    for action, n in schedule:
        getattr(run, action)(n)


@given(streams(), schedules())
@settings(max_examples=400, deadline=None)
def test_no_schedule_breaks_the_bound_or_starves_the_learner(
    stream: StreamSettings, schedule: list[tuple[str, int]]
) -> None:
    run = Run(stream)
    play(run, schedule)
    run.complete_step()
    counts = run.ledger.counts(run.now)
    assert {"trained": counts["trained"], "dropped": counts["dropped"]} == {
        how: Counter(run.ends.values())[how] for how in ("trained", "dropped")
    }
    live = counts["pending"] + counts["leased"] + counts["ready"] + counts["claimed"]
    assert live + len(run.ends) == run.known
    run.ledger.finish("done")
    assert run.ledger.counts(run.now)["trained"] + run.ledger.counts(run.now)["dropped"] == run.known


@given(streams(), schedules())
@settings(max_examples=50, deadline=None)
def test_replaying_the_events_gives_the_same_ledger(
    stream: StreamSettings, schedule: list[tuple[str, int]]
) -> None:
    run = Run(stream)
    play(run, schedule)
    replayed = Ledger()
    for event in run.log:
        replayed.apply(event)
    assert replayed.book.state() == run.ledger.book.state()


@given(streams(), schedules(), schedules())
@settings(max_examples=50, deadline=None)
def test_after_a_rewind_every_unfinished_ordinal_is_done_again(
    stream: StreamSettings, before: list[tuple[str, int]], after: list[tuple[str, int]]
) -> None:
    run = Run(stream)
    play(run, before)
    frontier = run.ledger.frontier(1)
    ends = dict(run.ends)
    stale = run.leases()
    play(run, after)
    run.ledger.open(stream, Frontier.from_wire(frontier.to_wire()))
    # The surviving history is that of the snapshot.
    run.ends, run.claimed, run.known = ends, set(), run.ledger.book.next
    for worker in run.workers:
        worker.held = run.step
    assert (run.ledger.book.lineage, run.step) == (1, frontier.version)
    assert run.ledger.counts(run.now)["trained"] == Counter(ends.values())["trained"]
    run.complete_step()
    play(run, after)
    run.complete_step()
    for ordinal, epoch in stale:
        with pytest.raises(RefusedError, match="fenced"):
            run.ledger.commit(ordinal, epoch, 1, 1, 0, 0)


@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 21))
def test_spare_versions_leave_room_for_the_window(groups: int, staleness: int, window: int) -> None:
    """η = S + the versions that the window can add, and a window that leaves no S is refused."""
    spare = staleness - math.ceil((window - 1) / groups)
    try:
        stream = StreamSettings(groups, staleness, window, groups + window, 1, 1.0)
        assert stream.spare_versions == spare >= 0
    except ValueError:
        assert spare < 0
