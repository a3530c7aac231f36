"""The broker's machine: dispatcher and recovery as in queue/broker/broker.py, a disk, crashes between any two steps.

messages ─▸ inbox ─▸ read … decided ─▸ shelved ─▸ written (─▸ compacted) ─▸ sent …      the points of a crash
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncrl.queue.broker.dispatcher import Dispatcher, OutgoingReply
from asyncrl.queue.broker.recovery import Recovery
from asyncrl.queue.storage.store import PayloadKey, PayloadStore

from .files import FileDisk
from .kept import Disk, MortalShelf, SimJournal
from .network import Frames

if TYPE_CHECKING:
    from .world import World

TICK_S = 1.0
"""Longest pause between two looks at deadlines."""

COOL_BYTES = 700
"""Payloads kept for a rewind that stay in memory, where there is a shelf: two or three groups."""

DOOMED_S = 5.0
"""A broker that does not reach its crash point by then dies where it is."""


class Crash(Exception):  # noqa: N818  (the machine's, not the program's)
    pass


class BrokerHost:
    """One broker after another."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._disk = FileDisk() if world.plan.files else Disk()
        self._journal: SimJournal | None = None
        self._life = 0
        self._desk: Dispatcher | None = None
        self._shelf: MortalShelf | None = None
        self._clock_ahead = 0.0
        self._inbox: list[tuple[bytes, Frames]] = []
        self._due = False
        self._stalled_until = 0.0
        self._crash_at = ""
        self._down_s = 1.0
        self._stale: dict[PayloadKey, int] = {}

    @property
    def up(self) -> bool:
        return self._desk is not None

    # ------------------------------------------------------------------ lives

    def start(self, anew: bool = False) -> None:
        world, plan = self._world, self._world.plan
        self._life += 1
        world.say(f"broker {self._life} starts{' anew' if anew else ''}")
        self._disk.find_again(world.rng)
        self._clock_ahead = world.rng.uniform(0.0, 1e6)  # every machine has its own
        self._shelf = self._disk.shelf(plan.durable) if plan.durable or plan.spill else None
        self._journal = SimJournal(self._disk.journal(), self._reach, world.flushed, world.forgotten)
        self._store = PayloadStore(self._shelf, durable=plan.durable, cool_bytes=COOL_BYTES)
        self._stale = {}
        try:
            self._recovery = Recovery(world.run, self._journal, self._store, now=self._now(), anew=anew)
        except Crash:
            self._die(anew)
            return
        self._desk = Dispatcher(self._recovery.queue)
        self._due = False
        self._tick(self._life)
        world.start_feeder()

    def doom(self, where: str, down_s: float) -> None:
        """Die at the next point of this name, or soon."""
        self._crash_at, self._down_s = where, down_s
        self._world.loop.call_later(DOOMED_S, self._die_late, self._life)

    def crash(self, down_s: float) -> None:
        self._down_s = down_s
        self._die()

    def begin_anew(self, down_s: float) -> None:
        self._down_s = down_s
        self._die(anew=True)

    def stall(self, seconds: float) -> None:
        self._stalled_until = self._world.loop.time() + seconds

    def _die_late(self, life: int) -> None:
        if self._crash_at and life == self._life and self.up:
            self._die()

    def _die(self, anew: bool = False) -> None:
        world = self._world
        world.say(f"broker {self._life} dies")
        self._let_go()
        self._desk, self._inbox, self._crash_at = None, [], ""
        self._life += 1
        world.kill("feeder")
        world.network.break_all()
        world.loop.call_later(self._down_s, self._restart, self._life, anew)

    def _let_go(self) -> None:
        for kept in (self._shelf, self._journal):
            if kept is not None:
                kept.die(self._world.rng)
        self._shelf = self._journal = None

    def clear(self) -> None:
        """The world ends."""
        self._let_go()
        self._disk.clear()

    def _restart(self, life: int, anew: bool) -> None:
        if life == self._life:  # else it was killed meanwhile, and waits for a later one
            self.start(anew)

    # ------------------------------------------------------------------ its loop

    def arrive(self, identity: bytes, frames: Frames) -> None:
        if self.up:
            self._inbox.append((identity, frames))
            self._soon()

    def _soon(self) -> None:
        if not self._due:
            self._due = True
            now = self._world.loop.time()
            pause = self._world.rng.random() * self._world.plan.latency_s  # in which others arrive too
            self._world.loop.call_at(max(now, self._stalled_until) + pause, self._turn, self._life)

    def _tick(self, life: int) -> None:
        if life == self._life and self.up:
            self._soon()
            self._world.loop.call_later(TICK_S, self._tick, life)

    def _turn(self, life: int) -> None:
        if life != self._life or self._desk is None:
            return
        self._due = False
        inbox, self._inbox = self._inbox, []
        try:
            letters = []
            for identity, frames in inbox:
                letters += self._desk.receive(identity, frames, self._now())
                self._reach("read")
            letters += self._desk.tick(self._now())
            self._reach("decided")
            self._recovery.flush()
            while self._send(letters):
                letters = self._desk.tick(self._now())
                self._recovery.flush()
        except Crash:
            self._die()

    def _send(self, letters: Sequence[OutgoingReply]) -> bool:
        """Returns whether leases came back, of clients that are gone."""
        assert self._desk is not None
        returned = False
        for letter in letters:
            if not self._world.network.send(letter.identity, letter.frames):
                returned |= self._desk.unreachable(letter.identity, [letter])
            self._reach("sent")
        if letters:
            self._check()
        return returned

    def _reach(self, point: str) -> None:
        if point == self._crash_at:
            raise Crash

    def _now(self) -> float:
        return self._world.loop.time() + self._clock_ahead

    # ------------------------------------------------------------------ what must be true of it at all times

    def _check(self) -> None:
        queue = self._recovery.queue
        assert not queue.refused["bug"], "a request has uncovered a bug; see the log"
        assert not queue.refused["malformed"]
        for name, stream in queue.streams.items():
            self._check_memory(name)
            retained = {o for step in stream.ledger.state.steps.retained.steps.values() for o in step.records}
            assert set(stream.tasks) == set(stream.ledger.state.tasks.records) | retained
        self._check_bytes()

    def _check_memory(self, name: str) -> None:
        """By what the run is configured to, not by how long it is."""
        state, plan = self._recovery.queue.streams[name].ledger.state, self._world.plan
        if state.settings is None:
            return
        kept = state.steps.version - state.steps.retained.floor
        assert kept <= 5 * plan.checkpoint_every or state.settings.max_staleness is None
        steps = state.settings.groups_per_version * (
            len(state.steps.retained.steps) + len(state.steps.replay) + 1
        )
        assert len(state.tasks.records) <= 4 * state.settings.depth + steps
        assert self._desk is not None
        assert self._desk.parked <= 16 * len(self._world.network.links) + 64

    def _check_bytes(self) -> None:
        """What is kept is what the ledgers count on."""
        streams = self._recovery.queue.streams
        states = [stream.ledger.state for stream in streams.values()]
        counted = sum(state.usage.live + state.usage.retained for state in states)
        assert self._store.sizes().memory <= counted
        if self._shelf is None:
            return
        needed = {
            PayloadKey(name, o, part): o for name, stream in streams.items() for o, part, _ in stream.needed()
        }
        stale = self._shelf.keys - needed.keys()
        self._stale = {key: self._stale.get(key, 0) + 1 for key in stale}
        assert all(turns <= 3 for turns in self._stale.values()), "the shelf keeps what nobody needs"
        if self._world.plan.durable:
            # Claimed before their bytes were lost: the learner that has got them may go on.
            lost = {key for key, o in needed.items() if self._is_lost(key.stream, o)}
            assert self._shelf.keys >= needed.keys() - lost

    def _is_lost(self, stream: str, ordinal: int) -> bool:
        item = self._recovery.queue.streams[stream].ledger.state.tasks.records.get(ordinal)
        return item is not None and item.lost
