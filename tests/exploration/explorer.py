"""Every interleaving of a small run, with crashes at every point: the real ledger, two workers and a learner.

    point ──move──▸ point      a move is one command to the ledger, or something that happens beside it
      │                        (a worker flips to new weights, forgets what it had, the learner dies)
      └── key: what a further move can depend on; a point whose key was seen is not explored again

Each move begins with a ledger that has replayed the events so far, so every point is also a crash of the broker that
loses nothing. `Observer` checks each claim against the staleness bound and the window, and that no task ends twice.
A point without a move that is no fault must be the end of the run, with every task trained or dropped: no deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from asyncrl.errors import RefusedError
from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.state.tasks import State
from asyncrl.queue.protocol.settings import Frontier, StreamSettings
from tests.helpers.queue.ledger_cases import Observer
from tests.helpers.queue.ledger_driver import DrivenLedger as Ledger

MAX_TOKENS = 1 << 20
LEASE_S, HEDGE_S = 10.0, 1.0
NO_WEIGHTS = -1


@dataclass(frozen=True, slots=True)
class Scope:
    """The run that is explored. faults: most of them in one run · hedges: whether a task may have two leases"""

    tasks: int
    batch: int
    staleness: int
    window: int
    faults: int
    hedges: bool = False

    @property
    def settings(self) -> StreamSettings:
        return StreamSettings(
            groups_per_version=self.batch,
            max_staleness=self.staleness,
            window=self.window,
            depth=self.batch * (self.staleness + 1) + self.window,
            max_bytes=1 << 30,
            lease_s=LEASE_S,
            hedge_s=HEDGE_S if self.hedges else None,
        )


class Lease(NamedTuple):
    """As its worker knows it; it may be over. held: the oldest version that its tokens may be of"""

    ordinal: int
    epoch: int
    held: int


class Worker(NamedTuple):
    """lineage, held: of its weights"""

    lineage: int = 0
    held: int = NO_WEIGHTS
    leases: tuple[Lease, ...] = ()


class Checked(Observer):
    """A ledger, and the observer of all its events."""

    def __init__(self, scope: Scope, before: Checked | None = None) -> None:
        """before: what has happened so far, which is replayed."""
        super().__init__(scope.settings)
        self.ledger = Ledger()
        if before is not None:
            for event in before.log:
                self.ledger.apply(event)
            self.log, self.claims = [*before.log], [*before.claims]
            self.ends, self.start = {**before.ends}, {**before.start}
            self.steps, self.record = {**before.steps}, {**before.record}
            self.known, self.disturbed = before.known, before.disturbed
        self.ledger._journal = self.observe

    def observe(self, event: ev.Event) -> None:
        super().observe(event)
        if isinstance(event, ev.Rewound):
            self.rewind(event.frontier)

    def rewind(self, frontier: Frontier) -> None:
        """Nothing of the steps since is kept."""
        ended = {*range(frontier.frontier), *frontier.trained, *frontier.dropped_ordinals}
        self.ends = {ordinal: how for ordinal, how in self.ends.items() if ordinal in ended}
        self.steps = {step: claims for step, claims in self.steps.items() if step < frontier.version}
        self.start, self.claims, self.record, self.disturbed = {}, [], {}, True


@dataclass(frozen=True, slots=True)
class Point:
    """run: is read only · faults: still to come, at most · index, attempt: of the learner's next claim · saved: its
    last checkpoint · over: the learner was told that there is nothing more"""

    run: Checked
    workers: tuple[Worker, ...] = (Worker(), Worker())
    index: int = 0
    attempt: int | None = None
    saved: Frontier | None = None
    faults: int = 0
    over: bool = False


Move = tuple[str, Point]


@dataclass
class Explorer:
    """seen: key → (key of the point before, the move from there), for the way to a failure"""

    scope: Scope
    seen: dict[Any, tuple[Any, str]] = field(default_factory=dict)
    ends: int = 0
    moves: int = 0

    def explore(self) -> None:
        """All points. AssertionError with the way to the first one at which something does not hold."""
        first = self._begin()
        self.seen[key_of(first)] = (None, "begin")
        stack = [first]
        while stack:
            point = stack.pop()
            key = key_of(point)
            live = False
            try:
                for move, after in self._moves(point):
                    live |= not move.startswith("fault")
                    self.moves += 1
                    reached = key_of(after)
                    if reached not in self.seen:
                        self.seen[reached] = (key, move)
                        stack.append(after)
                if not live:
                    self._check_end(point)
            except AssertionError as error:
                raise AssertionError(f"{error}\nafter {'; '.join(self.way_to(key))}") from error

    def way_to(self, key: Any) -> list[str]:
        moves: list[str] = []
        while key is not None:
            key, move = self.seen[key]
            moves.append(move)
        return moves[::-1]

    def _begin(self) -> Point:
        run = Checked(self.scope)
        run.ledger.open(self.scope.settings, None)
        run.ledger.submit(0, self.scope.tasks)
        run.ledger.exhaust(self.scope.tasks)
        return Point(run, faults=self.scope.faults)

    def _check_end(self, point: Point) -> None:
        self.ends += 1
        ends = point.run.ends
        assert point.over, f"nobody can do anything, and {self.scope.tasks - len(ends)} tasks have not ended"
        assert sorted(ends) == list(range(self.scope.tasks))
        assert not point.run.ledger.state.tasks.records

    # ------------------------------------------------------------------ moves

    def _moves(self, point: Point) -> Iterator[Move]:
        yield from self._of_learner(point)
        for at, worker in enumerate(point.workers):
            yield from self._of_worker(point, at, worker)
        if point.faults:
            for name, after in self._faults(point):
                yield f"fault: {name}", replace(after, faults=point.faults - 1)

    def _of_learner(self, point: Point) -> Iterator[Move]:
        run = Checked(self.scope, point.run)
        ledger, state = run.ledger, run.ledger.state
        step, epoch = state.steps.version, state.learner_epoch
        if point.over:
            return
        if (
            point.index
            and state.steps.claims
            and point.index == len(state.steps.claims)
            and state.steps.complete
        ):
            ledger.trained(epoch, step)
            yield f"trained {step}", replace(point, run=run, index=0, attempt=None)
            return
        try:
            claim = ledger.claim(epoch, step, point.index, 0, MAX_TOKENS, False, point.attempt)
        except RefusedError as refusal:
            self._expect(refusal, "exhausted", "abandoned")
            over = refusal.reason == "exhausted"
            yield refusal.reason, replace(point, run=run, index=0, attempt=None, over=over)
            return
        if claim is not None:
            after = replace(point, run=run, index=point.index + 1, attempt=claim.attempt)
            yield f"claim {claim.ordinals}", after
        saved = point.saved is not None and (point.saved.lineage, point.saved.version) == (
            state.lineage,
            step,
        )
        if point.index == 0 and step and not saved:
            run = Checked(self.scope, point.run)
            frontier = run.ledger.frontier(epoch)
            run.ledger.checkpointed(epoch, step)
            yield f"checkpoint {step}", replace(point, run=run, saved=frontier)

    def _of_worker(self, point: Point, at: int, worker: Worker) -> Iterator[Move]:
        state = point.run.ledger.state
        newest = Worker(state.lineage, state.steps.version, worker.leases)
        if worker != newest and not point.over:
            yield f"worker {at} holds {newest.held}", self._with(point, at, newest)
        if worker.held != NO_WEIGHTS and worker.lineage == state.lineage and state.closed is None:
            yield from self._lease(point, at, worker)
        for lease in worker.leases:
            yield self._commit(point, at, worker, lease)

    def _lease(self, point: Point, at: int, worker: Worker) -> Iterator[Move]:
        run = Checked(self.scope, point.run)
        now = 2 * HEDGE_S if self.scope.hedges else 0.0
        # All leases count as granted at 0: with hedges, each is old enough for a second one.
        grants = run.ledger.lease(f"w{at}", worker.held, worker.lineage, 1, 0.0)
        if not grants and self.scope.hedges:
            grants = run.ledger.lease(f"w{at}", worker.held, worker.lineage, 1, now)
        for grant in grants:
            held = run.ledger.state.tasks.records[grant.ordinal].held
            lease = Lease(grant.ordinal, grant.epoch, held)
            after = worker._replace(leases=(*worker.leases, lease))
            yield f"worker {at} leases {grant.ordinal}", self._with(replace(point, run=run), at, after)

    def _commit(self, point: Point, at: int, worker: Worker, lease: Lease) -> Move:
        run = Checked(self.scope, point.run)
        left = worker._replace(leases=tuple(one for one in worker.leases if one != lease))
        try:
            run.ledger.commit(lease.ordinal, lease.epoch, 1, 1, lease.held, lease.epoch)
        except RefusedError as refusal:
            self._expect(refusal, "fenced", "stale")
        return f"worker {at} commits {lease.ordinal}", self._with(replace(point, run=run), at, left)

    @staticmethod
    def _expect(refusal: RefusedError, *reasons: str) -> None:
        assert refusal.reason in reasons, refusal

    @staticmethod
    def _with(point: Point, at: int, worker: Worker) -> Point:
        workers = [*point.workers]
        workers[at] = worker
        return replace(point, workers=tuple(workers))

    # ------------------------------------------------------------------ faults

    def _faults(self, point: Point) -> Iterator[Move]:
        state = point.run.ledger.state
        for lease in sorted(state.leases, key=lambda lease: lease.epoch):
            yield self._commanded(
                point,
                f"lease of {lease.ordinal} expires",
                lambda ledger: ledger.give_back([key(lease)], "expired"),  # noqa: B023
            )
            if lease.epoch == state.tasks.records[lease.ordinal].epoch:
                yield self._commanded(
                    point,
                    f"{lease.ordinal} is dropped",
                    lambda ledger: ledger.drop(*key(lease), "reward"),  # noqa: B023
                )
        for at, worker in enumerate(point.workers):
            if worker.leases:
                yield f"worker {at} dies", self._with(self._expired(point, worker), at, Worker())
        if not point.over:
            committed = (State.READY, State.CLAIMED, State.RECORDED)
            records = state.tasks.records
            for lost in [o for o in sorted(records) if records[o].state in committed]:
                yield self._commanded(
                    point,
                    f"the broker dies and loses {lost}",
                    lambda ledger: ledger.recover(0.0, [lost]),  # noqa: B023
                )
            if point.index:
                yield self._commanded(
                    replace(point, index=0, attempt=None),
                    "the step is rejected",
                    lambda ledger: ledger.reject(state.learner_epoch, state.steps.version, "loss"),
                )
            if point.saved is not None:
                yield self._rewound(point, point.saved)

    def _commanded(self, point: Point, name: str, command: Callable[[Ledger], Any]) -> Move:
        run = Checked(self.scope, point.run)
        command(run.ledger)
        return name, replace(point, run=run)

    def _expired(self, point: Point, worker: Worker) -> Point:
        pairs = [(lease.ordinal, lease.epoch) for lease in worker.leases]
        return self._commanded(point, "", lambda ledger: ledger.give_back(pairs, "expired"))[1]

    def _rewound(self, point: Point, saved: Frontier) -> Move:
        """The learner dies and comes back at its checkpoint; tasks beyond what the queue knows are submitted again."""
        run = Checked(self.scope, point.run)
        run.ledger.open(self.scope.settings, saved)
        submitted = run.ledger.state.tasks.next
        if not run.ledger.state.exhausted:
            run.ledger.submit(submitted, self.scope.tasks - submitted)
            run.ledger.exhaust(self.scope.tasks)
        name = f"the learner comes back at {saved.version}"
        return name, replace(point, run=run, index=0, attempt=None, over=False)


def key(lease: Any) -> tuple[int, int]:
    return lease.ordinal, lease.epoch


def key_of(point: Point) -> Any:
    """What a further move can depend on. Leases are numbered in their order, whichever their epochs are; the two
    workers are alike."""
    state = point.run.ledger.state
    known = {lease.epoch for worker in point.workers for lease in worker.leases}
    epochs = sorted(
        known | {lease.epoch for lease in state.leases} | {t.epoch for t in state.tasks.records.values()}
    )
    number = {epoch: at for at, epoch in enumerate(epochs)}
    tasks = tuple(
        (o, t.state, t.held, number[t.epoch], t.start_version, t.lost)
        for o, t in sorted(state.tasks.records.items())
    )
    leases = tuple(sorted((x.ordinal, number[x.epoch], x.at, x.worker) for x in state.leases))
    workers = tuple(
        (w.lineage, w.held, tuple(sorted((o, number[e], held) for o, e, held in w.leases)))
        for w in point.workers
    )
    swapped = tuple(sorted((*lease[:3], {"w0": "w1", "w1": "w0"}[lease[3]]) for lease in leases))
    parties = min((workers, leases), (workers[::-1], swapped))
    steps = state.steps
    replay = tuple((v, step.whole, tuple(step.claims)) for v, step in sorted(steps.replay.items()))
    retained = tuple((v, tuple(step.ordinals())) for v, step in sorted(steps.retained.steps.items()))
    stream = (
        *(
            state.lineage,
            steps.version,
            tuple(sorted(steps.published.items())),
            tuple(steps.claims),
            replay,
            retained,
        ),
        *(steps.retained.floor, tuple(sorted(steps.retained.forks.items())), point.attempt == steps.attempt),
        *(state.tasks.head, state.exhausted, tuple(sorted(state.leases.hedged))),
        *(
            state.tasks.ranks.frontier,
            tuple(sorted(state.tasks.ranks.trained)),
            tuple(state.tasks.ranks.dropped),
        ),
    )
    at = point.saved
    saved = at and (at.lineage, at.version, at.frontier, at.kept, at.trained, at.dropped_ordinals)
    return stream, tasks, parties, point.index, point.attempt is None, saved, point.faults, point.over
