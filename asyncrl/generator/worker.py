"""The loop of a generator: tasks in, scored groups out, while the weights change underneath.

              queue                        this worker                             engine, reward, learner
   ┌───────────────────────┐
   │ lease (parks until     │──▸ intake ──▸ one _work per lease ──▸ sample ────────▸ engine
   │  admission lets some)  │      ▴             │                 score ─────────▸ reward function
   │ commit │ drop          │◂─────┼─────────────┘ waits until no unverified flip; without spread: drop, if filtered
   │ renew, with stats      │◂──── heartbeat, and with each group ──▸ leases lost: their _work is cancelled
   └───────────────────────┘      │
                                 held ◂── weights (weights.py) ◂─────────────────── weight stream

  intake waits for  weights; room in the engine (admission.py), sample by sample, so that the longest one of
                    a group keeps no slot empty; the queue's answer, or a newer `held` to ask with
  _work waits for   the engine, the reward, the queue
  Evaluation leases come through an intake of their own; while one is under way, no training lease is taken
  and no version is flipped to.

Any loop that fails ends the worker. RunClosedError is the regular end; what is still leased is given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from asyncrl.generator.weights import WeightFollower
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import EVAL, NO_VERSION, TRAIN, Group, StreamName, Task, Version

log = logging.getLogger(__name__)

Key = tuple[str, int, int]
"""(stream, ordinal, epoch): one lease."""

LEASE_S = 10.0
"""How long a lease request may park at the queue before it is made again."""

NEWS_S = 0.1
"""Least seconds between two reports of finished groups."""

LOOK_S = 0.05
"""Between two looks at how many samples the engine has left, while it has enough. Also how long a new lease counts
with all of its samples: by then the engine knows of them."""

SECONDS = "seconds/"
"""What an engine's stats call the time since they were last asked for."""

WEIGHTS, TASK = "the learner's weights", "a task from the queue"
"""What a worker waits for, as its status has it."""

LOGGED = 8
"""Drops of one reason that are all in the log; of more, every one that doubles their number."""

GIVE_BACK_S = 5.0
"""Longest wait at the end: leases not given back expire by themselves."""


class Lease(Protocol):
    @property
    def task(self) -> Task: ...
    @property
    def epoch(self) -> int: ...
    @property
    def progress(self) -> Sequence[bytes]: ...


class Renewal(Protocol):
    """lost: leases that are no longer this worker's · closed: the run is over."""

    @property
    def lost(self) -> Sequence[Key]: ...
    @property
    def closed(self) -> bool: ...


class WorkerClient(Protocol):
    """What a worker needs of the queue's client."""

    async def lease(
        self, stream: str, *, held: Version, lineage: int, most: int, wait_s: float
    ) -> Sequence[Lease]: ...

    async def progress(self, stream: str, lease: Any, frames: Sequence[bytes]) -> None: ...

    async def renew(self, stats: Mapping[str, Any]) -> Renewal: ...

    async def commit(
        self, stream: str, lease: Any, group: Group, columns: Sequence[str] | None = None
    ) -> None: ...

    async def give_back(self, stream: str, leases: Sequence[Any]) -> None: ...

    async def drop(self, stream: str, lease: Any, reason: str) -> None: ...


class Worker:
    """One generator's loops over parts that are made elsewhere (see process.py).

    held_out  the sets of tasks that evaluation leases point into; none: no evaluation leases are asked for
    prober    draws a few tokens of each version for the learner to compare; none: nobody does
    status    gets the stats of each heartbeat, and what the worker waits for
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
        self._client, self._engine, self._follower, self._rollouts = client, engine, follower, rollouts
        self._held_out, self._heartbeat_s = held_out or {}, config.generator.heartbeat_s
        self._prober, self._status = prober, status or ProcessStatus()
        self._pool_rewards = REWARDS in config.placement.pools
        self._passes = partial(passes_filter, config=config)
        self._samples, self._admission = samples, Admission(slots, samples)
        self._sampling: dict[Key, float] = {}  # since when
        self._evaluating: set[Key] = set()
        self._leases: dict[Key, tuple[StreamName, Lease]] = {}
        self._working: dict[Key, asyncio.Task[None]] = {}
        self._room, self._news = asyncio.Event(), asyncio.Event()
        self._counts: Counter[str] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._loops: asyncio.TaskGroup

    async def run(self) -> None:
        """Until the run is closed (returns), or something fails (raises it), or cancelled."""
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

    # ---- leases

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
            asked = self._loops.create_task(self._ask(stream, most, held, lineage))
            newer = asyncio.ensure_future(self._follower.past(lineage, held))
            # A request parked under an old `held` admits less than the new one would: take it back.
            await asyncio.wait({asked, newer}, return_when=asyncio.FIRST_COMPLETED)
            newer.cancel()
            asked.cancel()

    async def _ask(self, stream: StreamName, most: int, held: Version, lineage: int) -> None:
        try:
            leases = await self._client.lease(stream, held=held, lineage=lineage, most=most, wait_s=LEASE_S)
        except RefusedError as refusal:
            if refusal.reason != "lineage":
                raise
            log.info("%s: the learner was rewound; waiting for its weights", self.name)
            await self._follower.past(lineage, held)
            return
        for lease in leases:
            self._take(stream, lease)

    def _take(self, stream: StreamName, lease: Lease) -> None:
        self._status.wait_ends(TASK)
        key = (stream, lease.task.ordinal, lease.epoch)
        if key in self._leases:
            return
        self._leases[key] = (stream, lease)
        if stream == EVAL:
            self._evaluating.add(key)
        else:
            self._sampling[key] = asyncio.get_running_loop().time()
        self._working[key] = self._loops.create_task(self._work(key, stream, lease))
        self._working[key].add_done_callback(lambda _: self._ended(key))

    def _ended(self, key: Key) -> None:
        """However it ended: done, failed, or cancelled before it began."""
        self._working.pop(key, None)
        self._sampling.pop(key, None)
        self._evaluating.discard(key)
        self._room.set()

    def _train_room(self) -> int:
        return 0 if self._evaluating else self._admission.room(self._under_way())

    def _under_way(self) -> int:
        """Samples of training leases that the engine has not finished."""
        now, engine = asyncio.get_running_loop().time(), self._look()
        new = sum(now - since < LOOK_S for since in self._sampling.values())
        in_engine = int(engine["running"] + engine["waiting"])
        return min(self._samples * len(self._sampling), self._samples * new + in_engine)

    def _eval_room(self) -> int:
        return 1 - len(self._evaluating)

    # ---- one lease

    async def _work(self, key: Key, stream: StreamName, lease: Lease) -> None:
        try:
            make = self._evaluate if stream == EVAL else self._generate
            group = await make(key, lease)
            await self._follower.settled()
            self._news.set()
            if stream == TRAIN and not self._pool_rewards and not self._passes(group):
                await self._drop(stream, lease, FILTERED)
            else:
                lacking_rewards = [*group.columns] if self._pool_rewards else None
                await self._client.commit(stream, lease, group, lacking_rewards)
                self._counts[f"groups/{stream}"] += 1
        except PromptTooLongError as error:
            await self._drop(stream, lease, "too_long", error)
        except RewardError as error:
            await self._drop(stream, lease, "reward", error)
        except RequestFailedError as error:
            await self._drop(stream, lease, "engine", error)
        except EnvironmentFailedError as error:
            await self._drop(stream, lease, "environment", error)
        except RefusedError as refusal:
            self._counts[f"refused/{refusal.reason}"] += 1
        self._leases.pop(key, None)

    async def _generate(self, key: Key, lease: Lease) -> Group:
        task, keep = lease.task, partial(self._keep, lease)
        samples = await self._rollouts.sample(task, "/".join(map(str, key)), lease.progress, keep)
        # Scoring takes no room: a slow reward must not starve the engine.
        self._sampling.pop(key, None)
        self._room.set()
        return await self._rollouts.score(task, samples)

    async def _keep(self, lease: Lease, frames: Sequence[bytes]) -> None:
        """Finished turns go on with whoever has the task next. As with a commit, not those of unverified weights."""
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
        self._counts[f"dropped/{reason}"] += 1
        self._news.set()
        if error is not None:
            self._status.failure = str(error)
            count = self._counts[f"dropped/{reason}"]
            if count <= LOGGED or not count & (count - 1):
                which = f"task {lease.task.ordinal} of stream {stream}"
                log.warning(
                    "%s drops %s, its drop %d of reason %s: %s", self.name, which, count, reason, error
                )
        try:
            await self._client.drop(stream, lease, reason)
        except RefusedError as refusal:
            self._counts[f"refused/{refusal.reason}"] += 1

    # ---- heartbeat

    async def _heartbeat(self) -> None:
        while True:
            stats = self.stats()
            self._admission.observe(
                self._under_way(), stats.get("kv_usage", 0.0), stats.get("preemptions", 0.0)
            )
            await self._report(stats)
            await asyncio.sleep(self._heartbeat_s)

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
        for stream, ordinal, epoch in renewal.lost:
            self._lose((stream, ordinal, epoch))

    def _lose(self, key: Key) -> None:
        """Another worker has this task by now."""
        self._leases.pop(key, None)
        work = self._working.get(key)
        if work is not None:
            self._counts["lost"] += 1
            work.cancel()

    def stats(self) -> dict[str, Any]:
        """Telemetry for the queue to keep, totals of this process unless said otherwise.

        tokens · running, waiting samples now · kv_usage, preemptions of engines that tell · admitted: samples that
        may be under way · held, lineage · leases now · weights/… of the follower · probes: the prober's reports
        reward/… of the reward function · seconds {span of the engine: seconds}
        groups/<stream>, dropped/<reason>, refused/<reason>, lost
        """
        return {
            **self._look(),
            **self._follower.stats(),
            **self._rollouts.stats(),
            **self._counts,
            "held": self._follower.held,
            "lineage": self._follower.lineage,
            "leases": len(self._leases),
            "seconds": dict(self._seconds),
            "admitted": self._admission.limit,
            **({"probes": self._prober.reports()} if self._prober is not None else {}),
        }

    def _look(self) -> dict[str, float]:
        """The engine's stats of now; its seconds are added to the totals."""
        engine = self._engine.stats()
        for name, seconds in engine.items():
            if name.startswith(SECONDS):
                self._seconds[name.removeprefix(SECONDS)] += seconds
        return {name: value for name, value in engine.items() if not name.startswith(SECONDS)}

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
