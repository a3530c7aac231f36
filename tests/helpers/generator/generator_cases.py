"""A queue and a learner that live in memory, a tokenizer of letters, and a worker between them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncrl.config.schema import BatchConfig, Config, EvaluationConfig, GeneratorConfig, RewardConfig
from asyncrl.errors import DeadlineError, RefusedError, RunClosedError, WeightSyncError
from asyncrl.generator.engines.receiver import Learner, LocalReceiver, WeightReader
from asyncrl.generator.engines.scripted_engine import ScriptedEngine
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.generator.weights import WeightFollower
from asyncrl.generator.worker import Worker
from asyncrl.queue.protocol.replies import Lease, Renewal
from asyncrl.sync.tensors.shards import Shards
from asyncrl.types import Group, Task

CONFIG = Config(
    batch=BatchConfig(groups=4, group_size=2),
    generator=GeneratorConfig(slots=8, max_length=64, max_tokens=8, heartbeat_s=0.01),
    evaluation=EvaluationConfig(max_tokens=3),
)
PATIENCE_S = 20.0


class Letters:
    """A tokenizer of one token a letter."""

    chat_template = "{{ messages }}>"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        assert options["add_generation_prompt"]
        return [ord(letter) for message in messages for letter in message["content"]] + [ord(">")]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(i) for i in ids)


@dataclass
class FakeQueue:
    """Leases what `held` and `lineage` allow, and remembers everything that it is told."""

    directory: dict[str, Any] = field(default_factory=dict)
    pending: dict[str, list[tuple[Task, int]]] = field(default_factory=lambda: {"train": [], "eval": []})
    lineage: int = 0
    asked: list[tuple[str, int, int]] = field(default_factory=list)  # (stream, held, most)
    parked: list[tuple[str, int]] = field(default_factory=list)  # (stream, held) of requests that wait
    committed: dict[tuple[str, int], Group] = field(default_factory=dict)
    scores: dict[tuple[str, int], float | None] = field(default_factory=dict)
    columns: dict[tuple[str, int], Sequence[str] | None] = field(
        default_factory=dict
    )  # as they were committed with
    dropped: dict[int, str] = field(default_factory=dict)
    returned: list[int] = field(default_factory=list)
    progress_of: dict[int, Sequence[bytes]] = field(default_factory=dict)
    fenced: set[int] = field(default_factory=set)
    lost: list[tuple[str, int, int]] = field(default_factory=list)
    stats: Mapping[str, Any] = field(default_factory=dict)
    closed: bool = False
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(what)

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def submit(self, stream: str, *tasks: Task, held: int = 0) -> None:
        self.pending[stream] += [(task, held) for task in tasks]
        await self.tell()

    async def close(self) -> None:
        self.closed = True
        await self.tell()

    async def lookup(self, key: str, wait_s: float) -> Any:
        try:
            async with asyncio.timeout(wait_s), self.changed:
                await self.changed.wait_for(lambda: key in self.directory)
        except TimeoutError:
            raise DeadlineError("worker", "the queue", key, wait_s) from None
        return self.directory[key]

    async def lease(self, stream: str, *, held: int, lineage: int, most: int, wait_s: float) -> list[Lease]:
        self.asked.append((stream, held, most))
        await self.tell()

        def allowed() -> list[tuple[Task, int]]:
            return [entry for entry in self.pending[stream] if entry[1] <= held][:most]

        async with self.changed:
            self.parked.append((stream, held))
            try:
                await self.changed.wait_for(lambda: bool(allowed()) or self.closed or lineage != self.lineage)
            finally:
                self.parked.remove((stream, held))
            if self.closed:
                raise RunClosedError("the run is over")
            if lineage != self.lineage:
                raise RefusedError("lineage")
            chosen = allowed()
            self.pending[stream] = [entry for entry in self.pending[stream] if entry not in chosen]
            return [Lease(task, 1) for task, _ in chosen]

    async def renew(self, stats: Mapping[str, Any]) -> Renewal:
        self.stats = stats
        lost, self.lost = self.lost, []
        await self.tell()
        return Renewal(lost, self.closed)

    async def commit(
        self,
        stream: str,
        lease: Lease,
        group: Group,
        columns: Sequence[str] | None = None,
        score: float | None = None,
    ) -> None:
        if lease.task.ordinal in self.fenced:
            raise RefusedError("fenced")
        self.committed[stream, lease.task.ordinal] = group
        self.columns[stream, lease.task.ordinal] = columns
        self.scores[stream, lease.task.ordinal] = score
        await self.tell()

    async def drop(self, stream: str, lease: Lease, reason: str, score: float | None = None) -> None:
        self.dropped[lease.task.ordinal] = reason
        self.scores[stream, lease.task.ordinal] = score
        await self.tell()

    async def progress(self, stream: str, lease: Lease, frames: Sequence[bytes]) -> None:
        self.progress_of[lease.task.ordinal] = frames

    async def give_back(self, stream: str, leases: Sequence[Lease]) -> None:
        self.returned += [lease.task.ordinal for lease in leases]


def at_once() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass(frozen=True)
class FakeProof:
    total: int
    may_verify: threading.Event

    def check(self, shards: Shards, whose: str) -> None:
        assert self.may_verify.wait(PATIENCE_S)
        if sum(float(part.sum()) for part in shards.parts) != self.total:
            raise WeightSyncError(f"{whose} do not hash to {self.total}")


@dataclass(frozen=True)
class FakeStaged:
    version: int
    checksum: Any
    seconds: float = 0.0
    bytes: int = 12


class FakeLearner:
    """Publishes weights that are all equal to version + 1 of its lineage."""

    def __init__(self, queue: FakeQueue, lineage: int = 0) -> None:
        self.queue, self.lineage = queue, lineage
        self.version = -1
        self.gone = self.lies = False
        self.fetched: list[int] = []
        self.acknowledged: list[int] = []
        self.changed = threading.Condition()

    async def publish(self, version: int) -> None:
        with self.changed:
            self.version = version
            self.changed.notify_all()
        entry = {"endpoint": f"tcp://127.0.0.1:{9000 + self.lineage}", "world": 1, "lineage": self.lineage}
        self.queue.directory["weights/0"] = entry
        await self.queue.tell()

    def open(
        self,
        learner: Learner,
        staging: Mapping[str, torch.Tensor],
        may_verify: threading.Event | None = None,
    ) -> FakeStream:
        assert learner.lineage == self.lineage
        return FakeStream(self, staging, may_verify or at_once())


@dataclass
class FakeStream:
    learner: FakeLearner
    staging: Mapping[str, torch.Tensor]
    may_verify: threading.Event

    def newest(self, newer_than: int, wait_s: float) -> int | None:
        learner = self.learner
        with learner.changed:
            learner.changed.wait_for(lambda: learner.gone or learner.version > newer_than, wait_s)
            if learner.gone:
                raise DeadlineError("worker", "the learner", "weights", wait_s)
            return learner.version if learner.version > newer_than else None

    def stage(self, version: int) -> FakeStaged:
        learner = self.learner
        with learner.changed:
            for tensor in self.staging.values():
                tensor.fill_(version + 1)
            total = int(sum(float(tensor.sum()) for tensor in self.staging.values()))
            learner.fetched.append(version)
            return FakeStaged(version, FakeProof(total + learner.lies, self.may_verify))

    def held(self, version: int) -> None:
        self.learner.acknowledged.append(version)

    def close(self) -> None: ...


@dataclass(frozen=True)
class FakeReader(WeightReader):
    """stream: made of a learner and the staging memory, in place of the weight stream."""

    stream: Any = None

    def open(self, learner: Learner, layout: Any, staging: Any) -> Any:
        return self.stream(learner, staging)


@dataclass
class House:
    queue: FakeQueue
    learner: FakeLearner
    engine: ScriptedEngine
    worker: Worker
    running: asyncio.Task[None]
    may_verify: threading.Event
    leaving: asyncio.Event


def tasks(count: int) -> list[Task]:
    return [Task(ordinal, f"{ordinal}?", {"answer": "A"}) for ordinal in range(count)]


def letter_of(ordinal: int, sample: int) -> list[int]:
    """The first sample answers A, the second B, and so on."""
    return [ord("A") + sample]


async def right(task: Task, text: str) -> float:
    return float(text == task.data["answer"])


@asynccontextmanager
async def house(
    reward: Callable[..., Any] = right,
    script: Callable[[int, int], list[int]] = letter_of,
    held_out: Mapping[str, Sequence[Task]] | None = None,
    config: Config = CONFIG,
) -> AsyncIterator[House]:
    queue = FakeQueue()
    learner = FakeLearner(queue)
    engine = ScriptedEngine(script, slots=8, max_length=64, targets={"w": torch.zeros(3)})
    await engine.start()
    may_verify = at_once()

    reader = FakeReader("run", "worker", config.sync, stream=lambda *of: made.learner.open(*of, may_verify))
    receiver = LocalReceiver(engine.targets, engine.flip, reader)
    follower = WeightFollower("worker", receiver, queue)
    scorer = Scorer(reward, RewardConfig(function="unused:unused", retries=0))
    rollouts = Rollouts(engine, Letters(), scorer, config)  # type: ignore[arg-type]
    leaving = asyncio.Event()
    worker = Worker(
        "worker",
        config,
        client=queue,
        engine=engine,
        follower=follower,
        rollouts=rollouts,
        held_out=held_out,
        leaving=leaving,
    )
    made = House(queue, learner, engine, worker, asyncio.create_task(worker.run()), may_verify, leaving)
    try:
        yield made
    finally:
        may_verify.set()
        made.running.cancel()
        await asyncio.gather(made.running, return_exceptions=True)
        await engine.close()
        scorer.close()
