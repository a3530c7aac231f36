"""The loop of a generator: tasks in, scored groups out, while the weights change underneath.

              queue                        this worker                             engine, reward, learner
   ┌───────────────────────┐
   │ lease (waits until     │──▸ intake ──▸ one _work per lease ──▸ sample ────────▸ engine
   │  admission permits)    │      ▴             │                 score ─────────▸ reward function
   │ commit │ drop          │◂─────┼─────────────┘ waits until no unverified flip; without spread: drop, if filtered
   │ renew, with stats      │◂──── heartbeat, and with each group ──▸ leases lost: their _work is cancelled
   └───────────────────────┘      │
                                 held ◂── weights (weights.py) ◂─────────────────── weight stream

  intake waits for  weights; room in the engine (admission.py), sample by sample, so that the longest one of
                    a group keeps no slot empty; the queue's answer, or a newer `held` for the next request
  _work waits for   the engine, the reward, the queue
  Evaluation leases have an intake of their own; while one is under way, no training lease is taken
  and no version is flipped to.

Any loop that fails ends the worker. RunClosedError is the regular end; remaining leases are given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from asyncrl.config.schema import Config
from asyncrl.config.sections.placement import REWARDS
from asyncrl.config.sections.rules import require
from asyncrl.errors import AsyncRLError, RefusedError, RunClosedError, first_failure
from asyncrl.generator.admission import Admission
from asyncrl.generator.agents.agent import EnvironmentFailedError
from asyncrl.generator.engines.engine import Engine, PromptTooLongError
from asyncrl.generator.engines.retry import RequestFailedError
from asyncrl.generator.prober import Prober
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.scoring.group_filter import FILTERED, passes_filter
from asyncrl.generator.scoring.rewards import RewardError
from asyncrl.generator.telemetry import WorkerTelemetry
from asyncrl.generator.weights import WeightFollower
from asyncrl.queue.protocol.replies import Lease, Renewal
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import EVAL, NO_VERSION, TRAIN, Group, StreamName, Task, Version

log = logging.getLogger(__name__)

Key = tuple[str, int, int]
"""(stream, ordinal, epoch): one lease."""

LEASE_S = 10.0
"""How long a lease request may wait at the queue before it is repeated."""

NEWS_S = 0.1
"""Least seconds between two reports of finished groups."""

LOOK_S = 0.05
"""Poll interval of the engine's samples while it has enough. Also how long a new lease counts with all of its samples:
by then the engine has them."""

WEIGHTS, TASK = "the learner's weights", "a task from the queue"
"""Waits of a worker, as its status shows them."""

LOGGED = 8
"""Most drops of one reason that are all logged; afterwards only every doubling of their number is."""

GIVE_BACK_S = 5.0
"""Longest wait at the end: leases not given back expire by themselves."""

DROP_REASONS: Mapping[type[Exception], str] = {
    PromptTooLongError: "too_long",
    RewardError: "reward",
    RequestFailedError: "engine",
    EnvironmentFailedError: "environment",
}
"""Failures that concern one task alone."""


class WorkerClient(Protocol):
    """The part of `QueueClient` that a worker uses; tests have a queue in memory."""

    async def lease(
        self, stream: str, *, held: Version, lineage: int, most: int, wait_s: float
    ) -> Sequence[Lease]: ...

    async def progress(self, stream: str, lease: Lease, frames: Sequence[bytes]) -> None: ...

    async def renew(self, stats: Mapping[str, Any]) -> Renewal: ...

    async def commit(
        self, stream: str, lease: Lease, group: Group, columns: Sequence[str] | None = None
    ) -> None: ...

    async def give_back(self, stream: str, leases: Sequence[Lease]) -> None: ...

    async def drop(self, stream: str, lease: Lease, reason: str) -> None: ...


@dataclass(slots=True)
class _Running:
    """One lease under way. sampling_since: None when its samples are made, and for evaluations."""

    job: asyncio.Task[None]
    stream: StreamName
    sampling_since: float | None


class Worker:
    """One generator's loops over parts that are made elsewhere (see process.py).

    Args:
        held_out: The sets of tasks that evaluation leases point into; without any, no such lease is requested.
        prober: Draws a few tokens of each version for the learner to compare; None if it does not.
        status: Receives the stats of each heartbeat, and the waits of the worker.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        *,
        client: WorkerClient,
        engine: Engine,
        follower: WeightFollower,
        rollouts: Rollouts,
        held_out: Mapping[str, Sequence[Task]] | None = None,
        prober: Prober | None = None,
        status: ProcessStatus | None = None,
    ) -> None:
        slots, samples = config.generator.slots, config.batch.group_size + config.greedy_rollout
        greedy = " and a greedy rollout" if config.greedy_rollout else ""
        require(
            samples <= slots,
            "generator.slots",
            slots,
            f"must hold one group of batch.group_size={config.batch.group_size}{greedy}",
            f"set generator.slots={samples} or more",
        )
        self.name = name
        self._config, self._client, self._follower, self._rollouts = config, client, follower, rollouts
        self._held_out, self._prober, self._status = held_out or {}, prober, status or ProcessStatus()
        self._admission = Admission(slots, samples)
        self._telemetry = WorkerTelemetry(engine, follower, rollouts, prober)
        self._leases: dict[Key, tuple[StreamName, Lease]] = {}
        self._running: dict[Key, _Running] = {}
        self._room, self._news = asyncio.Event(), asyncio.Event()
        self._loops: asyncio.TaskGroup

    async def run(self) -> None:
        """Run until the run is closed, or this is cancelled. Raises the failure of any loop."""
        try:
            async with asyncio.TaskGroup() as self._loops:
                self._loops.create_task(self._heartbeat())
                self._loops.create_task(self._report_news())
                self._loops.create_task(self._follower.run())
                self._loops.create_task(self._intake(TRAIN, self._train_room))
                if self._prober is not None:
                    self._loops.create_task(self._prober.run())
                if self._held_out:
                    self._loops.create_task(self._intake(EVAL, self._eval_room))
        except* RunClosedError:
            log.info("%s: the run is closed", self.name)
        except* AsyncRLError as failures:
            raise first_failure(failures) from None
        finally:
            await self._give_back()

    # ---- the loop: leases in, groups out

    async def _intake(self, stream: StreamName, room: Callable[[], int]) -> None:
        while True:
            with self._status.waiting(WEIGHTS):
                await self._follower.past(lineage=-1, held=NO_VERSION)
            most = room()
            if most <= 0:
                self._room.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._room.wait()
                continue
            lineage, held = self._follower.lineage, self._follower.held
            if not self._leases:
                self._status.wait_begins(TASK)
            request = self._loops.create_task(self._lease(stream, most, held, lineage))
            newer = asyncio.ensure_future(self._follower.past(lineage, held))
            # A request that waits under an old `held` admits less than a new one would: cancel it.
            await asyncio.wait({request, newer}, return_when=asyncio.FIRST_COMPLETED)
            newer.cancel()
            request.cancel()

    async def _lease(self, stream: StreamName, most: int, held: Version, lineage: int) -> None:
        try:
            leases = await self._client.lease(stream, held=held, lineage=lineage, most=most, wait_s=LEASE_S)
        except RefusedError as refusal:
            if refusal.reason != "lineage":
                raise
            log.info("%s: the learner was rewound; waiting for its weights", self.name)
            await self._follower.past(lineage, held)
            return
        for lease in leases:
            self._begin(stream, lease)

    def _begin(self, stream: StreamName, lease: Lease) -> None:
        self._status.wait_ends(TASK)
        key = (stream, lease.task.ordinal, lease.epoch)
        if key in self._leases:
            return
        self._leases[key] = (stream, lease)
        since = asyncio.get_running_loop().time() if stream == TRAIN else None
        job = self._loops.create_task(self._work(key, stream, lease))
        self._running[key] = _Running(job, stream, since)
        job.add_done_callback(lambda _: self._ended(key))

    def _ended(self, key: Key) -> None:
        """It is done, has failed, or was cancelled before it began."""
        self._running.pop(key, None)
        self._room.set()

    async def _work(self, key: Key, stream: StreamName, lease: Lease) -> None:
        try:
            make = self._evaluate if stream == EVAL else self._generate
            group = await make(key, lease)
            await self._follower.settled()
            self._news.set()
            pool_rewards = REWARDS in self._config.placement.pools
            if stream == TRAIN and not pool_rewards and not passes_filter(group, self._config):
                await self._drop(stream, lease, FILTERED)
            else:
                without_rewards = [*group.columns] if pool_rewards else None
                await self._client.commit(stream, lease, group, without_rewards)
                self._telemetry.counts[f"groups/{stream}"] += 1
        except tuple(DROP_REASONS) as error:
            reason = next(reason for kind, reason in DROP_REASONS.items() if isinstance(error, kind))
            await self._drop(stream, lease, reason, error)
        except RefusedError as refusal:
            self._telemetry.counts[f"refused/{refusal.reason}"] += 1
        self._leases.pop(key, None)

    async def _generate(self, key: Key, lease: Lease) -> Group:
        task, keep = lease.task, partial(self._keep, lease)
        samples = await self._rollouts.sample(task, "/".join(map(str, key)), lease.progress, keep)
        # Scoring takes no room: a slow reward must not starve the engine.
        self._running[key].sampling_since = None
        self._room.set()
        return await self._rollouts.score(task, samples)

    async def _keep(self, lease: Lease, frames: Sequence[bytes]) -> None:
        """Hand finished turns to the task's next lease. As with a commit, not those of unverified weights."""
        await self._follower.settled()
        await self._client.progress(TRAIN, lease, frames)

    async def _evaluate(self, key: Key, lease: Lease) -> Group:
        task, name = lease.task, str(lease.task.data["set"])
        chunk = self._held_out[name][int(task.data["start"]) : int(task.data["stop"])]
        async with self._follower.pinned():
            return await self._rollouts.evaluate(task, chunk, "/".join(map(str, key)), name)

    async def _drop(
        self, stream: StreamName, lease: Lease, reason: str, error: Exception | None = None
    ) -> None:
        counts, name = self._telemetry.counts, f"dropped/{reason}"
        counts[name] += 1
        self._news.set()
        if error is not None:
            self._status.failure = str(error)
            if counts[name] <= LOGGED or not counts[name] & (counts[name] - 1):
                which = f"task {lease.task.ordinal} of stream {stream}"
                log.warning(
                    "%s drops %s, its drop %d of reason %s: %s", self.name, which, counts[name], reason, error
                )
        try:
            await self._client.drop(stream, lease, reason)
        except RefusedError as refusal:
            counts[f"refused/{refusal.reason}"] += 1

    # ---- room

    def _train_room(self) -> int:
        """Leases to request."""
        evaluating = any(one.stream == EVAL for one in self._running.values())
        return 0 if evaluating else self._admission.room(self._under_way())

    def _eval_room(self) -> int:
        return 1 - sum(one.stream == EVAL for one in self._running.values())

    def _under_way(self) -> int:
        """Samples of training leases that the engine has not finished."""
        now, engine = asyncio.get_running_loop().time(), self._telemetry.engine()
        since = [one.sampling_since for one in self._running.values() if one.sampling_since is not None]
        new = sum(now - begun < LOOK_S for begun in since)
        in_engine = int(engine["running"] + engine["waiting"])
        samples = self._admission.group
        return min(samples * len(since), samples * new + in_engine)

    # ---- heartbeat

    async def _heartbeat(self) -> None:
        while True:
            stats = self.stats()
            self._admission.observe(
                self._under_way(), stats.get("kv_usage", 0.0), stats.get("preemptions", 0.0)
            )
            await self._report(stats)
            await asyncio.sleep(self._config.generator.heartbeat_s)

    async def _report_news(self) -> None:
        """The learner reads the totals when it has trained on a group, maybe before the next heartbeat."""
        while True:
            await self._news.wait()
            self._news.clear()
            await self._report(self.stats())
            await asyncio.sleep(NEWS_S)

    async def _report(self, stats: dict[str, Any]) -> None:
        self._status.figures = stats
        renewal = await self._client.renew(stats)
        if renewal.closed:
            raise RunClosedError("the queue closed the run")
        for key in renewal.lost:
            self._lose(key)

    def _lose(self, key: Key) -> None:
        """Another worker has this task by now."""
        self._leases.pop(key, None)
        work = self._running.get(key)
        if work is not None:
            self._telemetry.counts["lost"] += 1
            work.job.cancel()

    def stats(self) -> dict[str, Any]:
        """See `WorkerTelemetry.collect`."""
        return self._telemetry.collect(len(self._leases), self._admission.limit)

    async def _give_back(self) -> None:
        returned = 0
        for stream in (TRAIN, EVAL):
            left = [lease for of, lease in self._leases.values() if of == stream]
            if not left:
                continue
            try:
                async with asyncio.timeout(GIVE_BACK_S):
                    await self._client.give_back(stream, left)
                returned += len(left)
            except (AsyncRLError, TimeoutError) as error:
                log.info("%s could not give back %d leases: %s", self.name, len(left), error)
        log.info("%s: leases returned to the queue: %d", self.name, returned)
        self._leases.clear()
