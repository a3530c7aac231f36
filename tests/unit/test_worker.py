"""The generator's loops against a queue and a learner that live in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from asyncrl.config.schema import BatchConfig, Config, EvaluationConfig, GeneratorConfig, RewardConfig
from asyncrl.errors import ConfigError, DeadlineError, RefusedError, RunClosedError, WeightSyncError
from asyncrl.generator import weights
from asyncrl.generator.rewards import Scorer
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.scripted_engine import ScriptedEngine
from asyncrl.generator.weights import Learner, WeightFollower
from asyncrl.generator.worker import Worker
from asyncrl.types import Group, Task

CONFIG = Config(
    batch=BatchConfig(groups=4, group_size=2),
    generator=GeneratorConfig(slots=8, max_length=64, max_tokens=8, heartbeat_s=0.01),
    evaluation=EvaluationConfig(max_tokens=3),
)
PATIENCE_S = 20.0


@dataclass(frozen=True)
class FakeLease:
    task: Task
    epoch: int


@dataclass(frozen=True)
class FakeRenewal:
    lost: list[tuple[str, int, int]]
    closed: bool


@dataclass
class FakeQueue:
    """Leases what `held` and `lineage` allow, and remembers everything that it is told."""

    directory: dict[str, Any] = field(default_factory=dict)
    pending: dict[str, list[tuple[Task, int]]] = field(default_factory=lambda: {"train": [], "eval": []})
    lineage: int = 0
    asked: list[tuple[str, int, int]] = field(default_factory=list)  # (stream, held, most)
    committed: dict[tuple[str, int], Group] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    returned: list[int] = field(default_factory=list)
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

    async def lease(
        self, stream: str, *, held: int, lineage: int, most: int, wait_s: float
    ) -> list[FakeLease]:
        self.asked.append((stream, held, most))
        await self.tell()

        def allowed() -> list[tuple[Task, int]]:
            return [entry for entry in self.pending[stream] if entry[1] <= held][:most]

        async with self.changed:
            await self.changed.wait_for(lambda: bool(allowed()) or self.closed or lineage != self.lineage)
            if self.closed:
                raise RunClosedError("the run is over")
            if lineage != self.lineage:
                raise RefusedError("lineage")
            chosen = allowed()
            self.pending[stream] = [entry for entry in self.pending[stream] if entry not in chosen]
            return [FakeLease(task, 1) for task, _ in chosen]

    async def renew(self, stats: Mapping[str, Any]) -> FakeRenewal:
        self.stats = stats
        lost, self.lost = self.lost, []
        await self.tell()
        return FakeRenewal(lost, self.closed)

    async def commit(self, stream: str, lease: FakeLease, group: Group) -> None:
        if lease.task.ordinal in self.fenced:
            raise RefusedError("fenced")
        self.committed[stream, lease.task.ordinal] = group
        await self.tell()

    async def drop(self, stream: str, lease: FakeLease, reason: str) -> None:
        self.dropped[lease.task.ordinal] = reason
        await self.tell()

    async def give_back(self, stream: str, leases: Sequence[FakeLease]) -> None:
        self.returned += [lease.task.ordinal for lease in leases]


@dataclass(frozen=True)
class FakeStaged:
    version: int
    digest: int | None
    seconds: float = 0.0


class FakeLearner:
    """Publishes weights that are all equal to version + 1 of its lineage."""

    def __init__(self, queue: FakeQueue, lineage: int = 0) -> None:
        self.queue, self.lineage = queue, lineage
        self.version = -1
        self.gone = self.lies = False
        self.fetched: list[int] = []
        self.changed = threading.Condition()

    async def publish(self, version: int) -> None:
        with self.changed:
            self.version = version
            self.changed.notify_all()
        entry = {"endpoint": f"tcp://127.0.0.1:{9000 + self.lineage}", "world": 1, "lineage": self.lineage}
        self.queue.directory["weights/0"] = entry
        await self.queue.tell()

    def open(self, learner: Learner, staging: Mapping[str, torch.Tensor]) -> FakeStream:
        assert learner.lineage == self.lineage
        return FakeStream(self, staging)


@dataclass
class FakeStream:
    learner: FakeLearner
    staging: Mapping[str, torch.Tensor]

    def fetch(self, newer_than: int, wait_s: float) -> FakeStaged | None:
        learner = self.learner
        with learner.changed:
            learner.changed.wait_for(lambda: learner.gone or learner.version > newer_than, wait_s)
            if learner.gone:
                raise DeadlineError("worker", "the learner", "weights", wait_s)
            if learner.version <= newer_than:
                return None
            for tensor in self.staging.values():
                tensor.fill_(learner.version + 1)
            digest = sum_of(self.staging) + (1 if learner.lies else 0)
            learner.fetched.append(learner.version)
            return FakeStaged(learner.version, digest)

    def close(self) -> None: ...


def sum_of(tensors: Mapping[str, torch.Tensor]) -> int:
    return int(sum(float(tensor.sum()) for tensor in tensors.values()))


class Letters:
    """A tokenizer of one token a letter."""

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
class House:
    queue: FakeQueue
    learner: FakeLearner
    engine: ScriptedEngine
    worker: Worker
    running: asyncio.Task[None]
    may_verify: threading.Event


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
    held_out: Sequence[Task] = (),
) -> AsyncIterator[House]:
    queue = FakeQueue()
    learner = FakeLearner(queue)
    engine = ScriptedEngine(script, slots=8, max_length=64, parameters={"w": torch.zeros(3)})
    await engine.start()
    may_verify = threading.Event()
    may_verify.set()

    def digest(live: Mapping[str, torch.Tensor]) -> int:
        assert may_verify.wait(PATIENCE_S)
        return sum_of(live)

    follower = WeightFollower(
        "worker", engine, queue, lambda *of: made.learner.open(*of), digest, CONFIG.sync
    )
    scorer = Scorer(reward, RewardConfig(function="unused:unused", retries=0))
    rollouts = Rollouts(engine, Letters(), scorer, CONFIG)  # type: ignore[arg-type]
    worker = Worker(
        "worker", CONFIG, client=queue, engine=engine, follower=follower, rollouts=rollouts, held_out=held_out
    )
    made = House(queue, learner, engine, worker, asyncio.create_task(worker.run()), may_verify)
    try:
        yield made
    finally:
        may_verify.set()
        made.running.cancel()
        await asyncio.gather(made.running, return_exceptions=True)
        await engine.close()
        scorer.close()


@pytest.fixture(autouse=True)
def _quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "POLL_S", 0.05)
    monkeypatch.setattr(weights, "RETRY_S", 0.01)


async def ended(h: House) -> None:
    await asyncio.wait_for(h.running, PATIENCE_S)


async def test_every_task_comes_back_as_a_scored_group() -> None:
    async with house() as h:
        await h.queue.submit("train", *tasks(20))
        await h.learner.publish(0)
        await h.queue.until(lambda: len(h.queue.committed) == 20)
        group = h.queue.committed["train", 3]
        assert group.task.prompt == "3?"
        assert group.token_ids.tolist() == [ord("3"), ord("?"), ord("A"), ord("3"), ord("?"), ord("B")]
        assert group.loss_mask.tolist() == [0, 0, 1, 0, 0, 1]
        assert group.rewards.tolist() == [1.0, 0.0]
        assert group.versions.tolist() == [-1, -1, 0, -1, -1, 0]
        assert group.sampling.max_tokens == 8
        await h.queue.close()
        await ended(h)
        assert h.queue.returned == []


async def test_nothing_is_leased_before_the_first_weights() -> None:
    async with house() as h:
        await h.queue.submit("train", *tasks(1))
        await h.queue.until(lambda: bool(h.queue.stats))
        assert h.queue.asked == []
        await h.learner.publish(5)
        await h.queue.until(lambda: len(h.queue.committed) == 1)
        assert {held for _, held, _ in h.queue.asked} == {5}
        assert torch.equal(h.engine.weight_targets()["w"], torch.full((3,), 6.0))


async def test_no_more_is_leased_than_the_engine_can_hold_and_a_lead() -> None:
    async with house() as h:
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(30))
        await h.queue.until(lambda: len(h.queue.committed) == 30)
        assert max(most for _, _, most in h.queue.asked) == 5  # 8 slots / 2 samples, and a quarter


async def test_a_flip_asks_again_with_the_newer_version() -> None:
    async with house() as h:
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(1), held=1)
        await h.queue.until(lambda: ("train", 0, 5) in h.queue.asked)
        await h.learner.publish(1)
        await h.queue.until(lambda: len(h.queue.committed) == 1)
        assert h.queue.committed["train", 0].start_version == 1


async def test_weights_that_hash_wrong_end_the_worker_and_nothing_made_with_them_is_committed() -> None:
    scored: list[int] = []

    async def reward(task: Task, text: str) -> float:
        scored.append(task.ordinal)
        return 1.0

    async with house(reward=reward) as h:
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(1))
        await h.queue.until(lambda: len(h.queue.committed) == 1)
        h.learner.lies = True
        h.may_verify.clear()
        await h.learner.publish(1)
        await h.queue.until(lambda: h.engine.version == 1)
        await h.queue.submit("train", Task(1, "1?"))
        for _ in range(3):
            seen = h.queue.stats
            await h.queue.until(lambda: h.queue.stats is not seen and scored.count(1) == 2)  # noqa: B023
        h.may_verify.set()
        with pytest.raises(WeightSyncError, match="worker: after the flip to version 1"):
            await ended(h)
        assert list(h.queue.committed) == [("train", 0)]
        assert h.queue.returned == [1]


async def test_prompts_too_long_and_rewards_that_fail_are_dropped_alone() -> None:
    def picky(task: Task, text: str) -> float:
        if task.ordinal == 1:
            raise KeyError("no answer")
        return 1.0

    async with house(reward=picky) as h:
        await h.learner.publish(0)
        await h.queue.submit("train", Task(0, "x" * 64), Task(1, "1?"), Task(2, "2?"))
        await h.queue.until(lambda: len(h.queue.committed) + len(h.queue.dropped) == 3)
        assert h.queue.dropped == {0: "too_long", 1: "reward"}
        assert list(h.queue.committed) == [("train", 2)]


async def test_a_lost_lease_is_given_up() -> None:
    never = asyncio.Event()

    async def stuck(task: Task, text: str) -> float:
        if task.ordinal == 0:
            await never.wait()
        return 1.0

    async with house(reward=stuck) as h:
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(2))
        await h.queue.until(lambda: ("train", 1) in h.queue.committed)
        h.queue.lost = [("train", 0, 1)]
        await h.queue.until(lambda: h.queue.stats.get("lost") == 1 and h.queue.stats["leases"] == 0)
        await h.queue.submit("train", Task(2, "2?", {"answer": "A"}))
        await h.queue.until(lambda: ("train", 2) in h.queue.committed)
        assert ("train", 0) not in h.queue.committed


async def test_a_fenced_commit_is_counted_and_the_worker_goes_on() -> None:
    async with house() as h:
        h.queue.fenced = {0}
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(2))
        await h.queue.until(lambda: h.queue.stats.get("refused/fenced") == 1 and len(h.queue.committed) == 1)


async def test_an_evaluation_is_greedy_over_its_chunk_and_pins_the_version() -> None:
    gate = asyncio.Event()

    async def gated(task: Task, text: str) -> float:
        await gate.wait()
        return float(task.ordinal)

    held_out = [Task(ordinal, f"h{ordinal}") for ordinal in range(6)]
    async with house(reward=gated, held_out=held_out) as h:
        await h.learner.publish(0)
        await h.queue.submit("eval", Task(0, "", {"version": 0, "start": 2, "stop": 5}))
        await h.queue.until(lambda: h.queue.stats.get("leases") == 1)
        await h.learner.publish(1)
        await h.queue.submit("train", *tasks(1))
        await h.queue.until(lambda: h.learner.fetched == [0, 1])
        for _ in range(3):
            seen = h.queue.stats
            await h.queue.until(lambda: h.queue.stats is not seen)  # noqa: B023
            assert h.queue.stats["held"] == h.engine.version == 0
        gate.set()
        await h.queue.until(lambda: len(h.queue.committed) == 2)
        evaluation = h.queue.committed["eval", 0]
        assert evaluation.rewards.tolist() == [2.0, 3.0, 4.0]
        assert evaluation.sampling.temperature == 0.0
        assert set(evaluation.versions.tolist()) == {-1, 0}
        await h.queue.until(lambda: h.queue.stats["held"] == 1)


async def test_a_rewound_learner_is_followed_to_its_lower_version() -> None:
    async with house() as h:
        await h.learner.publish(7)
        await h.queue.submit("train", *tasks(1))
        await h.queue.until(lambda: len(h.queue.committed) == 1)
        h.queue.lineage = 1
        h.learner = FakeLearner(h.queue, lineage=1)
        await h.learner.publish(4)
        await h.queue.submit("train", Task(1, "1?", {"answer": "A"}))
        await h.queue.until(lambda: len(h.queue.committed) == 2)
        assert h.queue.committed["train", 1].start_version == 4


async def test_a_learner_that_is_gone_stops_nothing() -> None:
    async with house() as h:
        await h.learner.publish(0)
        await h.queue.until(lambda: h.queue.stats.get("held") == 0)
        with h.learner.changed:
            h.learner.gone = True
            h.learner.changed.notify_all()
        await h.queue.until(lambda: h.queue.stats["weights/failures"] >= 1)
        await h.queue.submit("train", *tasks(2))
        await h.queue.until(lambda: len(h.queue.committed) == 2)
        h.learner.gone = False
        await h.learner.publish(1)
        await h.queue.until(lambda: h.queue.stats["held"] == 1)


async def test_a_cancelled_worker_gives_back_what_it_has() -> None:
    async def stuck(task: Task, text: str) -> float:
        return await asyncio.get_running_loop().create_future()

    async with house(reward=stuck) as h:
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(3))
        await h.queue.until(lambda: h.queue.stats.get("leases") == 3)
        h.running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ended(h)
        assert sorted(h.queue.returned) == [0, 1, 2]


async def test_a_queue_that_is_gone_ends_the_worker_by_name() -> None:
    async with house() as h:

        async def renew(stats: Mapping[str, Any]) -> FakeRenewal:
            raise DeadlineError("worker", "the queue", "an answer to 'renew'", 1.0)

        h.queue.renew = renew  # type: ignore[method-assign]
        with pytest.raises(DeadlineError, match="worker waited"):
            await ended(h)


async def test_messages_go_through_the_chat_template() -> None:
    async with house() as h:
        await h.learner.publish(0)
        await h.queue.submit("train", Task(0, [{"role": "user", "content": "hi"}], {"answer": "A"}))
        await h.queue.until(lambda: len(h.queue.committed) == 1)
        assert h.queue.committed["train", 0].token_ids[:3].tolist() == [ord("h"), ord("i"), ord(">")]


async def test_slots_that_hold_no_group_are_refused() -> None:
    config = Config(batch=BatchConfig(group_size=9), generator=GeneratorConfig(slots=8))
    with pytest.raises(ConfigError, match=r"^generator.slots = 8"):
        Worker("w", config, client=None, engine=None, follower=None, rollouts=None)  # type: ignore[arg-type]
