"""`asyncrl queue`: the broker on the main thread, the task feeder as one of its clients on another.

main thread     bind ──▸ take up what the journal holds ──▸ announce the address ──▸ serve ··· until stopped:
                                                                            SIGTERM, Ctrl-C, or the feeder ends
feeder thread            connect ──▸ wait for the learner, and compare configurations
                                 ──▸ wait for room ──▸ submit tasks ──▸ …   until the run is closed (or it fails),
                                                                            then until generators have noticed it
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from asyncrl.config.config_consistency import check_with_learner
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError, ConfigError, DeadlineError
from asyncrl.launch.folder.run_folder import read_address, run_folder, write_address
from asyncrl.launch.views.process_reports import SILENT_S
from asyncrl.queue.broker.broker import Broker
from asyncrl.queue.broker.recovery import open_recovery
from asyncrl.queue.broker.trace_intake import TraceIntake
from asyncrl.queue.client.client import QueueClient
from asyncrl.queue.feeder import feed
from asyncrl.rpc.keys import server_keys
from asyncrl.system.signals import stop_signals
from asyncrl.tasks.curriculum import CurriculumStream
from asyncrl.tasks.source import TaskStream, tasks_of_run
from asyncrl.telemetry import tracing
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import TRAIN

log = logging.getLogger(__name__)

LEARNER = "the learner"
"""The wait of the feeder, as the status of the process shows it."""

LOOK_S = 1.0
"""Between two readings of the queue's figures for the status."""

ANY_PORT = ("*", "0")
"""Ports of ZeroMQ's addresses that stand for any free one."""

LEARNER_S = 30.0
"""Longest wait of one request for the learner."""

LAST_HEARTBEATS = 3
"""The queue outlives the run by this many heartbeats of a generator."""


def run_queue(
    config: Config, announce: int | None = None, anew: bool = False, status: ProcessStatus | None = None
) -> None:
    """Serve until a signal, or until the run is closed.

    announce: a file descriptor that gets the bound address as one line
    anew: whether the journal and the payloads of an earlier queue of this run are discarded
    status: gets the queue's figures, and the feeder's wait for the learner

    Raises:
        ConfigError: The port is in use, the learner has another configuration, or the task source is none.
        TaskError: A task cannot be read.
        JournalError, DeadlineError, OSError: The journal, Redis or the disk does not keep records any more.
    """
    folder = run_folder(config)
    tasks = tasks_of_run(config, folder)
    broker = _bound(config, folder)
    interrupts = _stop_on_signals(broker)
    address = broker.bound_address
    recovery = open_recovery(config.queue, config.run.name, folder / "queue", now=time.monotonic(), anew=anew)
    recovery.queue.traces = _intake(config)
    broker.take_up(recovery.queue, recovery.flush)
    write_address(folder, address)
    if announce is not None:
        with open(announce, "w", encoding="utf-8") as pipe:
            pipe.write(address + "\n")
    again = ", going on from its journal" if recovery.recovered else ""
    print(f"run {config.run.name}: queue at {address}, process {os.getpid()}{again}", flush=True)
    status = status or ProcessStatus()
    if isinstance(tasks, CurriculumStream):
        tasks.begin(anew and not config.run.resume)  # a queue may forget its groups, and the tasks go on
    feeder = Feeder(config, address, tasks, broker, status)
    feeder.start()
    status.loaded.set()
    broker.serve()
    recovery.close()
    if recovery.queue.traces is not None:
        recovery.queue.traces.close()
    feeder.raise_failure()
    if interrupts:
        raise KeyboardInterrupt


def _intake(config: Config) -> TraceIntake | None:
    """Takes the rows of other machines, if this process writes a trace itself."""
    trace = tracing.current()
    if trace is None:
        return None
    try:
        return TraceIntake(trace.path.parent, config.telemetry.trace_mb * 1_000_000)
    except OSError as error:
        log.warning("traces of other machines are not kept: %s", error)
        return None


def _bound(config: Config, folder: Path) -> Broker:
    """Where `queue.address` leaves the port open, at that of an earlier queue of this run: its clients know no other.

    If that port is taken, at another one, with a warning. Raises ConfigError for an address that cannot be bound.
    """
    open_broker = partial(Broker, run=config.run.name, keys=server_keys(config.queue.keys))
    host, _, port = config.queue.address.rpartition(":")
    with suppress(ConfigError):
        known = read_address(folder)
        if port in ANY_PORT and (again := known.rpartition(":")[2]).isdigit():
            try:
                return open_broker(f"{host}:{again}")
            except ConfigError as error:
                log.warning(
                    "the queue cannot listen at %s again, where its clients know it: %s", known, error
                )
    return open_broker(config.queue.address)


def _stop_on_signals(broker: Broker) -> list[int]:
    """SIGINT and `stop_signals` end `serve`. Returns the list that gets each SIGINT."""
    interrupts: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            interrupts.append(number)
        broker.stop()

    for number in (signal.SIGINT, *stop_signals()):
        signal.signal(number, on_signal)
    return interrupts


class QueueChanges:
    """Changes in the figures of a queue since the last look, as rows of the trace."""

    def __init__(self) -> None:
        self._clients: Mapping[str, float] = {}
        self._counted: dict[str, Counter[str]] = {}

    def trace(self, status: Mapping[str, Any]) -> None:
        """status: of `QueueClient.status`. Counts of the training stream become figures; clients that come, leave or
        fall silent, requests that are refused and tasks that are dropped become events."""
        counts = status["streams"].get(TRAIN, {})
        if figures := {f"queue/{name}": n for name, n in counts.items() if isinstance(n, int | float)}:
            tracing.sample(figures)
        self._trace_clients(status["silent_s"])
        self._trace_growth("refused", status["refused"])
        self._trace_growth("dropped", counts.get("dropped_by_reason", {}))

    def _trace_clients(self, silent_s: Mapping[str, float]) -> None:
        """silent_s: seconds since the last message of each client that has not signed off"""
        before, self._clients = self._clients, dict(silent_s)
        for name in silent_s.keys() | before.keys():
            was, now = before.get(name), silent_s.get(name)
            if was is None:
                tracing.event("joined", process=name)
            elif now is None:
                if was < SILENT_S:
                    tracing.event("left", process=name)
            elif now >= SILENT_S > was:
                tracing.event("silent", process=name, since_s=round(now, 1))
            elif was >= SILENT_S > now:
                tracing.event("back", process=name)

    def _trace_growth(self, event: str, counts: Mapping[str, int]) -> None:
        """counts: by reason"""
        for reason, count in (Counter(counts) - self._counted.get(event, Counter())).items():
            tracing.event(event, reason=reason, count=count)
        self._counted[event] = Counter(counts)


class EpochDraws:
    """Draws the epochs of a curriculum as the queue has room for them, by the scores of groups until then."""

    def __init__(self, client: QueueClient, tasks: CurriculumStream) -> None:
        self._client, self._tasks, self._scores = client, tasks, 0

    async def draw_until(self, ordinal: int) -> None:
        """Those that the tasks below `ordinal` are of."""
        self._scores, found = await self._client.scores(TRAIN, self._scores)
        self._tasks.take(found)
        while self._tasks.end < ordinal:
            drawn = self._tasks.draw()
            tracing.event("epoch", **drawn)
            line = "epoch {epoch}: {tasks} tasks, {again} of them solved before; {rest} rest"
            print(line.format(**drawn), flush=True)


class Feeder(threading.Thread):
    """Submits tasks as the queue has room for them. An error that ends it ends the queue too."""

    def __init__(
        self, config: Config, address: str, tasks: TaskStream, broker: Broker, status: ProcessStatus
    ) -> None:
        super().__init__(name="feeder", daemon=True)
        self._config, self._address, self._tasks = config, address, tasks
        self._broker, self._status = broker, status
        self._failure: BaseException | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._feed())
        except BaseException as error:
            self._failure = error
        self._broker.stop()

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _agree(self, client: QueueClient) -> None:
        """Wait for the learner. ConfigError if these are not the tasks of its configuration."""
        with self._status.waiting(LEARNER):
            while True:
                with suppress(DeadlineError):
                    return await check_with_learner(client, self._config, LEARNER_S, queue=True)

    async def _look(self, client: QueueClient) -> None:
        """Until cancelled. A queue that ends does not answer any more."""
        changes = QueueChanges()
        with suppress(AsyncRLError):
            while True:
                self._status.figures = await client.status()
                changes.trace(self._status.figures)
                await asyncio.sleep(LOOK_S)

    async def _feed(self) -> None:
        client = QueueClient.of(self._config, "feeder", address=self._address)
        await client.connect()
        looking = asyncio.create_task(self._look(client))
        try:
            await self._agree(client)
            tasks = self._tasks
            draws = EpochDraws(client, tasks) if isinstance(tasks, CurriculumStream) else None
            reason = await feed(client, TRAIN, tasks.task_at, None if draws is None else draws.draw_until)
            print(
                f"run {self._config.run.name}: closed by the learner ({reason}); the queue ends", flush=True
            )
            # Generators notice at their next heartbeat that the run is over.
            await asyncio.sleep(LAST_HEARTBEATS * self._config.generator.heartbeat_s)
        finally:
            looking.cancel()
            await client.close()
