"""The loop of a pool process: groups in, columns out.

              queue                           this process
   ┌───────────────────────────┐
   │ stage_lease (parks until  │──▸ a task ──▸ work ──▸ columns
   │  a group waits)           │                │
   │ stage_commit │ stage_drop │◂───────────────┘ it leaves the group out
   │ renew, with stats         │◂── heartbeat
   └───────────────────────────┘

Each task waits for the queue, and `deadline_s` at most for the work. There is one task more than groups that are worked
on at once: it fetches the next group and hands the last one over. The groups of a process that died wait for another
process once its leases have expired.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from asyncrl.config.config_consistency import check_with_learner
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError, DeadlineError, RefusedError, RunClosedError, first_failure
from asyncrl.queue.client.client import QueueClient
from asyncrl.queue.protocol.replies import StageLease
from asyncrl.telemetry import tracing
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import TRAIN, Array, Group

log = logging.getLogger(__name__)

LEASE_S = 10.0
"""How long a lease request may park at the queue before it is made again."""

UNKNOWN = "unknown_stage"
"""Refusal by the queue until the learner has opened the stream with this stage."""

LEARNER, GROUP = "the learner", "a group from the queue"
"""The waits of a pool, in its status."""

RETRY_S = 0.5
"""Between two requests that the queue refuses so."""


class LeftOut(Exception):  # noqa: N818  (a decision, not a failure)
    """This group is not to be trained on; the queue counts it under `reason`. detail: for the log, if it matters."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail)
        self.reason = reason


AddColumns = Callable[[Group], Awaitable[Mapping[str, Array]]]
"""A group's columns, as `QueueClient.stage_commit` takes them. They depend on this group alone, not on others that wait
beside it. Raises LeftOut."""


class PoolWork(ABC):
    """The work of a pool on groups. concurrency: groups that it can do side by side."""

    concurrency = 1

    @abstractmethod
    async def columns(self, group: Group) -> Mapping[str, Array]:
        """`AddColumns` of the train stream."""

    @property
    def streams(self) -> Mapping[str, AddColumns]:
        """The work on the groups of each stream."""
        return {TRAIN: self.columns}

    def stats(self) -> Mapping[str, float]:
        """Totals of its own, for telemetry."""
        return {}

    async def ready(self) -> None:  # noqa: B027
        """Wait until columns can be made."""

    def check(self) -> None:  # noqa: B027
        """Raise an error that the work cannot go on after. Called with every heartbeat."""


class PoolWorker:
    """One process of the pool of `stage`. name: of the process, unique in the run."""

    def __init__(
        self,
        name: str,
        stage: str,
        work: PoolWork,
        client: QueueClient,
        config: Config,
        status: ProcessStatus,
    ) -> None:
        self.name, self._stage, self._work, self._client = name, stage, work, client
        self._config, self._status = config, status
        self._deadline_s = config.placement.places[stage].deadline_s
        self._learner_deadline_s = config.learner.groups_deadline_s
        self._heartbeat_s = config.generator.heartbeat_s
        self._free = asyncio.Semaphore(work.concurrency)
        self._counts = Counter[str](groups=0)
        self._working, self._since, self._busy_s = 0, 0.0, 0.0
        self._lane = tracing.LoopLane("pool")

    async def run(self) -> None:
        """Work until the run is closed. Raises the first error; ConfigError if the learner has another config."""
        try:
            async with asyncio.TaskGroup() as loops:
                loops.create_task(self._heartbeat())
                with self._status.waiting(LEARNER, self._learner_deadline_s):
                    await check_with_learner(self._client, self._config, self._learner_deadline_s)
                    loops.create_task(self._keep_checking_config())
                    await self._work.ready()
                for stream, add_columns in self._work.streams.items():
                    for _ in range(self._work.concurrency + 1):
                        loops.create_task(self._work_on(stream, add_columns))
        except* RunClosedError:
            log.info("%s: the run is closed", self.name)
        except* AsyncRLError as failures:
            raise first_failure(failures) from None

    async def _keep_checking_config(self) -> None:
        """The learner may come back with another configuration."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await check_with_learner(self._client, self._config, self._learner_deadline_s)

    async def _work_on(self, stream: str, add_columns: AddColumns) -> None:
        since = time.monotonic()
        while True:
            if not self._working:
                self._status.wait_begins(GROUP)
                self._lane.do("wait/groups")
            try:
                leases = await self._client.stage_lease(stream, self._stage, most=1, wait_s=LEASE_S)
            except RefusedError as refusal:
                if refusal.reason != UNKNOWN:
                    raise
                await self._wait_for_stream(since, refusal)
                continue
            since = time.monotonic()
            for lease in leases:
                self._status.wait_ends(GROUP)
                await self._handle(stream, lease, add_columns)

    async def _wait_for_stream(self, since: float, refusal: RefusedError) -> None:
        """Wait a little. Raises DeadlineError if the learner has not opened the stream for too long."""
        waited = time.monotonic() - since
        if waited > self._learner_deadline_s:
            what = f"a stream with the stage {self._stage!r}"
            raise DeadlineError(self.name, "the learner", what, waited, refusal.detail)
        await asyncio.sleep(RETRY_S)

    async def _handle(self, stream: str, lease: StageLease, add_columns: AddColumns) -> None:
        try:
            try:
                columns = await self._columns(add_columns, lease)
            except LeftOut as left_out:
                if str(left_out):
                    self._status.failure = str(left_out)
                    log.warning("%s leaves task %d out: %s", self.name, lease.task.ordinal, left_out)
                self._counts[f"dropped/{left_out.reason}"] += 1
                await self._client.stage_drop(stream, lease, left_out.reason)
                return
            await self._client.stage_commit(stream, lease, columns)
            self._counts["groups"] += 1
        except RefusedError as refusal:
            # The lease is over: another process has the group by now, or it has ended.
            self._counts[f"refused/{refusal.reason}"] += 1

    async def _columns(self, add_columns: AddColumns, lease: StageLease) -> Mapping[str, Array]:
        async with self._free:
            try:
                about = {"task": lease.task.ordinal, "rollouts": len(lease.group.rewards)}
                with self._busy(), tracing.span("groups", self._stage, **about):
                    async with asyncio.timeout(self._deadline_s):
                        return await add_columns(lease.group)
            except TimeoutError:
                what = f"the columns of task {lease.task.ordinal}"
                raise DeadlineError(self.name, f"stage {self._stage!r}", what, self._deadline_s) from None

    async def _heartbeat(self) -> None:
        while True:
            self._work.check()
            self._status.figures = stats = self.stats()
            if (await self._client.renew(stats)).closed:
                raise RunClosedError("the queue closed the run")
            await asyncio.sleep(self._heartbeat_s)

    def stats(self) -> dict[str, Any]:
        """Telemetry for the queue to keep, totals of this process: stage · groups done · busy_s, in which some group
        was worked on · dropped/<reason>, refused/<reason> · and those of the work."""
        under_way = time.monotonic() - self._since if self._working else 0.0
        return {
            **self._work.stats(),
            **self._counts,
            "stage": self._stage,
            "busy_s": self._busy_s + under_way,
        }

    @contextmanager
    def _busy(self) -> Iterator[None]:
        if not self._working:
            self._since = time.monotonic()
            self._lane.do("compute")
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._lane.do(tracing.OTHER)
                self._busy_s += time.monotonic() - self._since
