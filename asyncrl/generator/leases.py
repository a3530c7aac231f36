"""The leases of one worker, and how they end: committed, dropped, refused, lost to another worker, given back.

A lease whose work ends the worker stays here, and is given back at the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import AsyncRLError, RefusedError, RunClosedError
from asyncrl.generator.agents.agent import EnvironmentFailedError
from asyncrl.generator.agents.task_progress import Keep
from asyncrl.generator.engines.engine import PromptTooLongError, RequestFailedError, SampleLostError
from asyncrl.generator.scoring.reward_calls import RewardError
from asyncrl.queue.client.client import QueueClient
from asyncrl.queue.protocol.replies import Lease
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import EVAL, TRAIN, Group, StreamName, Task

log = logging.getLogger(__name__)

Key = tuple[str, int, int]
"""(stream, ordinal, epoch): one lease."""

LOGGED = 8
"""Most drops of one reason that are all logged; afterwards only every doubling of their number is."""

GIVE_BACK_S = 5.0
"""Longest wait at the end: leases not given back expire by themselves."""

RETURNS = 2
"""How often one worker gives a task back whose samples its engine loses; then it drops the task."""

DROP_REASONS: Mapping[type[Exception], str] = {
    PromptTooLongError: "too_long",
    RewardError: "reward",
    RequestFailedError: "engine",
    SampleLostError: "engine",
    EnvironmentFailedError: "environment",
}
"""Failures that concern one task alone."""


def drop_reason(failure: Exception) -> str:
    """The entry of DROP_REASONS."""
    return next(reason for kind, reason in DROP_REASONS.items() if isinstance(failure, kind))


@dataclass(slots=True, eq=False)
class LeasedTask:
    """One lease under way. sampling_since: None when its samples are made, and for evaluations · keep: None for
    evaluations."""

    stream: StreamName
    lease: Lease
    sampling_since: float | None
    job: asyncio.Task[None] | None = None
    keep: Keep | None = None

    @property
    def key(self) -> Key:
        return self.stream, self.lease.task.ordinal, self.lease.epoch

    @property
    def task(self) -> Task:
        return self.lease.task

    @property
    def request_id(self) -> str:
        return "/".join(map(str, self.key))


class WorkerLeases:
    """The leases of one generator, by their key, and how they ended.

    counts     groups/<stream>, dropped/<reason>, refused/<reason>, returned and lost, so far
    freed      set when there may be room for another lease
    news       set when a lease ends
    """

    def __init__(self, who: str, client: QueueClient, status: ProcessStatus) -> None:
        self.counts: Counter[str] = Counter()
        self.freed, self.news = asyncio.Event(), asyncio.Event()
        self._who, self._client, self._status = who, client, status
        self._under_way: dict[Key, LeasedTask] = {}
        self._returns: Counter[tuple[str, int]] = Counter()
        """How often each task was given back, by stream and ordinal."""

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def evaluations(self) -> int:
        return sum(one.stream == EVAL for one in self._under_way.values())

    def sampling_s(self) -> list[float]:
        """The age of each lease whose samples are not all made."""
        now = asyncio.get_running_loop().time()
        begun = [one.sampling_since for one in self._under_way.values()]
        return [now - since for since in begun if since is not None]

    def begin(
        self,
        stream: StreamName,
        lease: Lease,
        work: Callable[[LeasedTask], Coroutine[Any, Any, None]],
        jobs: asyncio.TaskGroup,
    ) -> None:
        """Start `work` on a lease as one of `jobs`, unless it is under way already."""
        since = asyncio.get_running_loop().time() if stream == TRAIN else None
        one = LeasedTask(stream, lease, since)
        if one.key not in self._under_way:
            self._under_way[one.key] = one
            one.job = jobs.create_task(work(one))

    def sampled(self, one: LeasedTask) -> None:
        """Scoring takes no room: a slow reward must not starve the engine."""
        one.sampling_since = None
        self.freed.set()

    async def commit(
        self, one: LeasedTask, group: Group, columns: Sequence[str] | None, score: float | None
    ) -> None:
        """Hand in the group. columns, score: as `QueueClient.commit`."""
        if await self._end(one, self._client.commit(one.stream, one.lease, group, columns, score)):
            self.counts[f"groups/{one.stream}"] += 1

    async def drop(
        self,
        one: LeasedTask,
        reason: str,
        failure: Exception | None = None,
        score: float | None = None,
    ) -> None:
        """failure: logged, and shown in the status."""
        self.counts[f"dropped/{reason}"] += 1
        count = self.counts[f"dropped/{reason}"]
        if failure is not None:
            self._status.failure = str(failure)
            if count <= LOGGED or not count & (count - 1):
                which = f"task {one.task.ordinal} of stream {one.stream}"
                log.warning(
                    "%s drops %s, its drop %d of reason %s: %s", self._who, which, count, reason, failure
                )
        await self._end(one, self._client.drop(one.stream, one.lease, reason, score))

    async def return_one(self, one: LeasedTask, failure: SampleLostError) -> None:
        """Give the task back, for another generator, or drop it if that was done RETURNS times."""
        task = one.stream, one.task.ordinal
        if self._returns[task] >= RETURNS:
            await self.drop(one, drop_reason(failure), failure)
            return
        self._returns[task] += 1
        self.counts["returned"] += 1
        self._status.failure = str(failure)
        log.warning(
            "%s gives task %d of stream %s back: %s", self._who, one.task.ordinal, one.stream, failure
        )
        await self._end(one, self._client.give_back(one.stream, [one.lease]))

    async def renew(self, stats: dict[str, Any]) -> None:
        """Renew all leases, and report `stats`. Raises RunClosedError at the end of the run."""
        self._status.figures = stats
        renewal = await self._client.renew(stats)
        if renewal.closed:
            raise RunClosedError("the queue closed the run")
        for key in renewal.lost:
            self._lose(key)

    async def ended(self) -> None:
        """Wait until no lease is under way."""
        while self._under_way:
            self.freed.clear()
            await self.freed.wait()

    async def hand_over(self) -> None:
        """Send what is made of tasks whose rollouts were cancelled, for their next leases."""
        unsent = [one for one in self._under_way.values() if one.keep is not None and one.keep.unsent]
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                for one in unsent:
                    assert one.keep is not None
                    await one.keep.send(one.keep.unsent)
        except (AsyncRLError, TimeoutError) as error:
            log.info("%s could not hand over parts of %d tasks: %s", self._who, len(unsent), error)

    async def give_back(self) -> None:
        """Return the leases that are left to the queue."""
        returned = 0
        for stream in (TRAIN, EVAL):
            left = [one.lease for one in self._under_way.values() if one.stream == stream]
            if not left:
                continue
            try:
                async with asyncio.timeout(GIVE_BACK_S):
                    await self._client.give_back(stream, left)
                returned += len(left)
            except (AsyncRLError, TimeoutError) as error:
                log.info("%s could not give back %d leases: %s", self._who, len(left), error)
        log.info("%s: leases returned to the queue: %d", self._who, returned)
        self._under_way.clear()

    def _lose(self, key: Key) -> None:
        """The queue has ended this lease; another worker may have the task."""
        one = self._under_way.pop(key, None)
        if one is not None and one.job is not None:
            self.counts["lost"] += 1
            one.job.cancel()
            self.freed.set()

    async def _end(self, one: LeasedTask, request: Awaitable[None]) -> bool:
        """Whether the queue did what was requested. A lease that it refuses is over too."""
        self.news.set()
        accepted = True
        try:
            await request
        except RefusedError as refusal:
            self.counts[f"refused/{refusal.reason}"] += 1
            accepted = False
        self._under_way.pop(one.key, None)
        self.freed.set()
        return accepted
