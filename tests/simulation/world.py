"""A whole run on a virtual clock: real ledger, service, desk, journal and clients; simulated wires, disks and crashes.

    faults ──▸ kill, cut off, freeze ──▸ processes ── network ──▸ broker ── flush ──▸ history: what must be true
      ▴                                                             ▴  │
      └── after so many messages                       restart ─────┘  └─▸ journal, shelf

Everything random comes from the seed, so that a seed is a run.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from asyncrl.errors import RefusedError
from asyncrl.queue.ledger.events import Event, Recovered, Requeued, StageReturned
from asyncrl.queue.storage.records import Happened, decode_record

from .broker import BrokerHost
from .history import History
from .learner import Checkpoint, Learner
from .loop import StuckError, VirtualLoop
from .network import Network
from .parties import TRAIN, Feeder, Operator, Policy, Process, Scorer, Worker
from .scenario import Fault, Scenario

PATIENCE_S = 900.0
"""Of virtual time, after the last fault: the longest that a run may take to its end."""

RESTART_S = 3.0

CALM_S = 0.05
"""With no longer latencies heartbeats are in time."""

Trace = Callable[[float, str], None]


class World:
    def __init__(self, plan: Scenario, trace: Trace | None = None) -> None:
        self.plan, self.run = plan, "run"
        self.loop, self.rng = VirtualLoop(), random.Random(plan.seed + 1)
        self.history = History(plan.stream)
        self.network = Network(self.loop, self.rng, plan.latency_s, self._message_passed)
        self.checkpoints: list[Checkpoint] = []
        self.messages = 0
        self.struck: list[str] = []
        self._trace = trace
        self._faults = list(plan.faults)
        self._last_fault_at = 0.0
        self._disturbed = plan.latency_s > CALM_S  # a lease may expire
        self._identities = 0
        self._policy: Policy | None = None
        self._alive: dict[str, Process] = {}
        self._verdict: asyncio.Future[None] = self.loop.create_future()
        self.broker = BrokerHost(self)
        self.network.host = self.broker

    # ------------------------------------------------------------------ the run

    def play(self) -> None:
        """To the end of the run. AssertionError, or what has failed."""
        asyncio.set_event_loop(self.loop)
        self.loop.set_exception_handler(self._callback_failed)
        try:
            self.broker.start()
            self._start_learner()
            for number in range(self.plan.workers):
                self._start(f"worker{number}", Worker)
            for number in range(self.plan.scorers):
                self._start(f"scorer{number}", Scorer)
            self.loop.call_later(PATIENCE_S, self._check_patience)
            try:
                self.loop.run_until_complete(self._verdict)
            except StuckError:
                raise AssertionError("everybody waits, and nothing will ever happen") from None
        finally:
            self._clear()

    def wound_up(self, learned: dict[int, list[int]]) -> None:
        """The learner has nothing more to do, and is about to close the run."""
        self.say("the learner has done all it can")
        self.history.check_end(self.plan, learned)

    def _done(self) -> None:
        """The learner has closed the run, and that is kept. A broker that dies now comes back with nothing."""
        if not self._verdict.done():
            self._verdict.set_result(None)

    def fail(self, error: BaseException) -> None:
        if not self._verdict.done():
            self._verdict.set_exception(error)

    def say(self, what: str) -> None:
        if self._trace is not None:
            self._trace(self.loop.time(), what)

    # ------------------------------------------------------------------ what processes need

    def next_identity(self, who: str) -> bytes:
        self._identities += 1
        return f"{who} #{self._identities}".encode()

    def publish(self, policy: Policy) -> None:
        """The weight stream: workers flip to it one after another, some time later."""
        self.say(f"published {policy}")
        self._policy = policy
        for process in self._alive.values():
            self._send_weights(process)

    def _send_weights(self, process: Process) -> None:
        if isinstance(process, Worker) and self._policy is not None:
            lag = self.rng.expovariate(1 / (0.05 + self.plan.step_s))
            self.loop.call_later(lag, process.flip, self._policy)

    def flushed(self, records: list[bytes]) -> None:
        """By the broker's journal."""
        for packed in records:
            match decode_record(packed):
                case Happened(stream, event):
                    self.say(f"{stream} keeps {event}")
                    if stream == TRAIN:
                        self.history.observe(event)
                        self._check_kept(event)
        if self.history.finished is not None:
            self.loop.call_soon(self._done)

    def _check_kept(self, event: Event) -> None:
        """What no fault explains."""
        match event:
            case Recovered(lost=lost):
                assert not (lost and self.plan.durable), f"lost though they were durable: {lost}"
            case Requeued(why="expired") | StageReturned(why="expired"):
                assert self._disturbed, f"{event} though everybody lives"

    def forgotten(self) -> None:
        """The journal begins anew."""
        made = self.history.made
        self.history = History(self.plan.stream)
        self.history.made = made

    # ------------------------------------------------------------------ processes

    def _start(self, name: str, kind: type[Process]) -> None:
        self.say(f"{name} starts")
        process = self._alive[name] = kind(self, name)
        process.start(process.run())  # type: ignore[attr-defined]
        self._send_weights(process)

    def _start_learner(self) -> None:
        self._start("learner", Learner)

    def start_feeder(self) -> None:
        """It lives in the broker's process."""
        self._start("feeder", Feeder)

    def kill(self, name: str) -> None:
        process = self._alive.pop(name, None)
        if process is not None:
            self.say(f"{name} is killed")
            process.kill()

    def failed(self, process: Process, error: BaseException) -> None:
        """A learner that is fenced by what the one before it had sent ends, and is started again."""
        fenced = isinstance(error, RefusedError) and error.reason in ("fenced", "occupied")
        if isinstance(process, Learner) and fenced and self._alive.get("learner") is process:
            self.say(f"the learner ends: {error}")
            self._restart_learner(RESTART_S)
        elif self._alive.get(process.name) is process:
            self.fail(error)

    def _restart_learner(self, seconds: float) -> None:
        self.kill("learner")
        if self.checkpoints:
            self.loop.call_later(seconds, self._start_learner)
        else:
            self._begin_anew(seconds)

    def _begin_anew(self, seconds: float) -> None:
        """Without a checkpoint there is nothing to go back to: the run begins again, from nothing."""
        self.say("the run begins anew")
        self._disturbed = True  # what the killed have asked for is under way, and granted to nobody
        names = [name for name in self._alive if name != "feeder"]
        for name in names:
            self.kill(name)
        self._policy = None
        self.broker.begin_anew(seconds)
        self.loop.call_later(seconds + RESTART_S, self._start_all, names)

    def _start_all(self, names: list[str]) -> None:
        for name in dict.fromkeys(("learner", *names)):
            self._start(name, {"l": Learner, "w": Worker, "s": Scorer, "o": Operator}[name[0]])

    # ------------------------------------------------------------------ faults

    def _message_passed(self) -> None:
        self.messages += 1
        while self._faults and self._faults[0].after <= self.messages:
            fault = self._faults.pop(0)
            self._last_fault_at = self.loop.time()
            # Not from within a delivery: what it kills may be what is running.
            self.loop.call_soon(self._strike, fault)

    def _strike(self, fault: Fault) -> None:
        self.struck.append(fault.kind)
        self._disturbed |= fault.kind not in ("learner", "checkpoint", "drain")
        self.say(f"fault: {fault}")
        workers, scorers = (
            sorted(name for name in self._alive if name.startswith(kind)) for kind in ("worker", "scorer")
        )
        match fault.kind:
            case "worker" if workers:
                name = workers[fault.pick % len(workers)]
                self.kill(name)
                self.loop.call_later(fault.seconds, self._start, name, Worker)
            case "scorer" if scorers:
                name = scorers[fault.pick % len(scorers)]
                self.kill(name)
                self.loop.call_later(fault.seconds, self._start, name, Scorer)
            case "learner" if "learner" in self._alive:
                self._restart_learner(fault.seconds)
            case "checkpoint" if "learner" in self._alive:
                self.checkpoints = self.checkpoints[:-1] or self.checkpoints
                self._restart_learner(fault.seconds)
            case "broker":
                self.broker.doom(fault.where, fault.seconds)
            case "run" if "learner" in self._alive:
                self._kill_everybody(fault.seconds)
            case "freeze" if workers:
                frozen = self._alive[workers[fault.pick % len(workers)]]
                assert isinstance(frozen, Worker)
                frozen.frozen_until = self.loop.time() + fault.seconds
            case "stall":
                self.broker.stall(fault.seconds)
            case "drain":
                self._start("operator", Operator)
            case "drop" | "swallow" if self.network.links:
                links = list(self.network.links.values())
                link = links[fault.pick % len(links)]
                link.drop() if fault.kind == "drop" else link.swallow(fault.seconds)

    def _kill_everybody(self, seconds: float) -> None:
        names = [name for name in self._alive if name != "feeder"]
        if not self.checkpoints:
            self._begin_anew(seconds)
            return
        for name in names:
            self.kill(name)
        self.broker.crash(seconds)
        self.loop.call_later(seconds + RESTART_S, self._start_all, names)

    # ------------------------------------------------------------------ ends

    def _check_patience(self) -> None:
        late = self._last_fault_at + PATIENCE_S
        if self.loop.time() >= late:
            self.fail(AssertionError(f"no end within {PATIENCE_S:.0f} s after the last fault"))
        else:
            self.loop.call_at(late, self._check_patience)

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        error = context.get("exception")
        self.fail(error if isinstance(error, BaseException) else AssertionError(context["message"]))

    def _clear(self) -> None:
        for name in list(self._alive):
            self.kill(name)
        while tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks))
        self.loop.close()
        self.broker.clear()
        asyncio.set_event_loop(None)
