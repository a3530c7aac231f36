"""The loop of a generator: tasks in, scored groups out, while the weights change underneath.

              queue                         this worker                            engine, reward, learner
   ┌────────────────────────┐
   │ lease (waits until     │──▸ intake ──▸ one _work per lease ──▸ sample ────────▸ engine
   │  admission permits)    │      ▴             │                 score ─────────▸ reward function
   │ commit │ drop          │◂─────┼─────────────┘ waits for the flip's checksum; dropped if filtered
   │ renew, with stats      │◂──── telemetry.py: heartbeat, and with each group ──▸ lost leases: _work is cancelled
   └────────────────────────┘      │
                                  held ◂── weights (weights.py) ◂─────────────────── weight stream

  intake waits for  weights; room in the engine (sample_limit.py), counted in samples: one long sample keeps no slot
                    of its finished siblings idle; the queue's reply, or a newer `held` for the next request
  _work waits for   the engine, the reward, the queue
  Evaluation leases have an intake of their own; while one is under way, no training lease is taken
  and no version is flipped to.

Any loop that fails ends the worker. RunClosedError is the regular end; remaining leases are given back, with what is
made of them. A worker that is to leave takes no more tasks, and ends with its last lease.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from asyncrl.config.schema import Config
from asyncrl.config.sections.placement import REWARDS
from asyncrl.device import accelerator
from asyncrl.device.meter import measured
from asyncrl.errors import AsyncRLError, RefusedError, RunClosedError, first_failure
from asyncrl.generator.agents.task_progress import Keep
from asyncrl.generator.engines.engine import Engine, SampleLostError
from asyncrl.generator.leases import DROP_REASONS, LeasedTask, WorkerLeases, drop_reason
from asyncrl.generator.prober import Prober
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.sample_limit import LOOK_S, SampleLimit
from asyncrl.generator.scoring.scores import FILTERED, passes_filter
from asyncrl.generator.telemetry import WorkerTelemetry
from asyncrl.generator.watches import EngineWatch, LoopWatch
from asyncrl.generator.weights import WeightFollower
from asyncrl.queue.client.client import QueueClient
from asyncrl.telemetry import decisions, tracing
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import EVAL, NO_VERSION, TRAIN, Group, StreamName, Task, Version

log = logging.getLogger(__name__)

LEASE_S = 10.0
"""How long a lease request may wait at the queue before it is repeated."""

LOOK_AT_ENGINE_S = 1.0
"""Between two looks at the engine's progress."""

WEIGHTS, TASK = "the learner's weights", "a task from the queue"
"""Waits of a worker, as its status shows them."""


class LeftError(Exception):
    """Ends the loops of a worker that was to leave, and has no lease any more."""


class Worker:
    """One generator's loops over parts that are made elsewhere (see process.py).

    Raises ConfigError as `SampleLimit.from_config`.

    held_out  the sets of tasks that evaluation leases point into; without any, no such lease is requested
    prober    draws a few tokens of each version for the learner to compare; None if it does not
    status    receives the stats of each heartbeat, and the waits of the worker
    leaving   once it is set, no task is taken any more
    """

    def __init__(
        self,
        name: str,
        config: Config,
        *,
        client: QueueClient,
        engine: Engine,
        follower: WeightFollower,
        rollouts: Rollouts,
        held_out: Mapping[str, Sequence[Task]] | None = None,
        prober: Prober | None = None,
        status: ProcessStatus | None = None,
        leaving: asyncio.Event | None = None,
    ) -> None:
        self._leaving = leaving or asyncio.Event()
        self._name, self._config, self._client = name, config, client
        self._follower, self._rollouts, self._prober = follower, rollouts, prober
        self._held_out, self._status = held_out or {}, status or ProcessStatus()
        self._limit = SampleLimit.from_config(config)
        self._watch = EngineWatch(name, engine, config.generator.progress_deadline_s)
        self._leases = WorkerLeases(name, client, self._status)
        # The GPUs of a server are not this process's.
        gpus = None if config.generator.behind_http else measured(range(accelerator.count()))
        self.telemetry = WorkerTelemetry(engine, follower, rollouts, prober, self._leases, self._limit, gpus)
        self._loops: asyncio.TaskGroup

    async def run(self) -> None:
        """Run until the run is closed, `leaving` is set and all leases have ended, or this is cancelled. Raises the
        failure of any loop."""
        try:
            with LoopWatch(self._name, self._config.generator.progress_deadline_s):
                await self._run_loops()
        except* RunClosedError:
            log.info("%s: the run is closed", self._name)
        except* LeftError:
            log.info("%s: has finished its tasks and leaves", self._name)
        except* AsyncRLError as failures:
            raise first_failure(failures) from None
        finally:
            if not self._follower.flipping:  # as with a commit, nothing of unverified weights
                await self._leases.hand_over()
            await self._leases.give_back()

    async def _run_loops(self) -> None:
        async with asyncio.TaskGroup() as self._loops:
            self._loops.create_task(self.telemetry.send_heartbeats(self._config.generator.heartbeat_s))
            self._loops.create_task(self.telemetry.send_news())
            self._loops.create_task(self._follower.run())
            self._loops.create_task(self._watch_engine())
            self._loops.create_task(self._leave())
            self._loops.create_task(self._intake(TRAIN))
            if self._prober is not None:
                self._loops.create_task(self._prober.run())
            if self._held_out:
                self._loops.create_task(self._intake(EVAL))

    async def _watch_engine(self) -> None:
        """Raises DeadlineError if the engine makes no progress."""
        deadline_s = self._config.generator.progress_deadline_s
        while True:
            await asyncio.sleep(min(LOOK_AT_ENGINE_S, deadline_s / 4))
            self._watch.look(time.monotonic(), self.telemetry.engine_stats(), self._follower.flipping)

    async def _leave(self) -> None:
        await self._leaving.wait()
        log.info("%s: takes no more tasks; under way: %d", self._name, len(self._leases))
        await self._leases.ended()
        raise LeftError

    async def _intake(self, stream: StreamName) -> None:
        while not self._leaving.is_set():
            with self._status.waiting(WEIGHTS):
                await self._follower.past(lineage=-1, held=NO_VERSION)
            most = self._wanted(stream)
            if most <= 0:
                self._leases.freed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._leases.freed.wait()
                continue
            lineage, held = self._follower.lineage, self._follower.held
            if len(self._leases) == 0:
                self._status.wait_begins(TASK)
            request = self._loops.create_task(self._lease(stream, most, held, lineage))
            newer = asyncio.ensure_future(self._follower.past(lineage, held))
            leaving = asyncio.ensure_future(self._leaving.wait())
            # A request that waits under an old `held` admits less than a new one would: cancel it.
            await asyncio.wait({request, newer, leaving}, return_when=asyncio.FIRST_COMPLETED)
            for waiting in (newer, leaving, request):
                waiting.cancel()

    def _wanted(self, stream: StreamName) -> int:
        """Leases to request: one evaluation at a time, and no training beside it."""
        evaluations = self._leases.evaluations
        if stream == EVAL:
            return 1 - evaluations
        return 0 if evaluations else self._limit.groups_wanted(self.telemetry.under_way())

    async def _lease(self, stream: StreamName, most: int, held: Version, lineage: int) -> None:
        try:
            leases = await self._client.lease(stream, held=held, lineage=lineage, most=most, wait_s=LEASE_S)
        except RefusedError as refusal:
            if refusal.reason != "lineage":
                raise
            log.info("%s: the learner was rewound; waiting for its weights", self._name)
            await self._follower.past(lineage, held)
            return
        for lease in leases:
            self._status.wait_ends(TASK)
            self._leases.begin(stream, lease, self._work, self._loops)

    async def _work(self, one: LeasedTask) -> None:
        try:
            group = await (self._evaluate(one) if one.stream == EVAL else self._generate(one))
            await self._follower.settled()
        except SampleLostError as error:
            await self._leases.return_one(one, error)
            return
        except tuple(DROP_REASONS) as error:
            await self._leases.drop(one, drop_reason(error), error)
            return
        pool_rewards = REWARDS in self._config.placement.pools
        decisions.flush()
        scored = one.stream == TRAIN and self._config.tasks.curriculum.solved is not None
        score = float(group.rewards.mean()) if scored else None
        if one.stream == TRAIN and not pool_rewards and not passes_filter(group, self._config):
            await self._leases.drop(one, FILTERED, score=score)
        else:
            await self._leases.commit(one, group, [*group.columns] if pool_rewards else None, score)

    async def _generate(self, one: LeasedTask) -> Group:
        async def send(frames: Sequence[bytes]) -> None:
            """Hand finished turns to the task's next lease. As with a commit, not those of unverified weights."""
            await self._follower.settled()
            decisions.flush()
            await self._client.progress(TRAIN, one.lease, frames)

        one.keep = Keep(send)
        if one.lease.progress:
            decisions.note("kept", one.request_id, [bytes(frame) for frame in one.lease.progress])
        about = {"task": one.task.ordinal, "version": self._follower.held}
        with tracing.span("rollouts", "generate", **about):
            samples = await self._rollouts.sample(one.task, one.request_id, one.lease.progress, one.keep)
        self._leases.sampled(one)
        with tracing.span("rewards", "score", tracing.SHORT_S, **about):
            return await self._rollouts.score(one.task, samples)

    async def _evaluate(self, one: LeasedTask) -> Group:
        task, name = one.task, str(one.task.data["set"])
        start, stop = int(task.data["start"]), int(task.data["stop"])
        chunk = self._held_out[name][start:stop]
        decisions.note("evaluate", one.request_id, name, start, stop)
        async with self._follower.pinned() as version:
            with tracing.span("rollouts", "evaluate", task=task.ordinal, version=version):
                return await self._rollouts.evaluate(task, chunk, one.request_id, name)
