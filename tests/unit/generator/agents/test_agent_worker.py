"""Finished turns outlive the worker that made them: a real queue without sockets, two workers, one killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from agent_cases import CALL, Counting, Speaker, calculating
from generator_cases import PATIENCE_S, FakeLearner, FakeQueue, FakeReader
from local_queue import LocalQueue
from waiting import Clock

from asyncrl.config.schema import BatchConfig, Config, GeneratorConfig, RewardConfig
from asyncrl.config.sections.agent import AgentConfig
from asyncrl.errors import RefusedError
from asyncrl.generator import leases, weights
from asyncrl.generator import worker as worker_module
from asyncrl.generator.agents.task_progress import Keep, TaskProgress
from asyncrl.generator.agents.trajectory import Trajectory
from asyncrl.generator.agents.trajectory_entries import TrajectoryEnd
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.engines.receiver import LocalReceiver
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.generator.weights import WeightFollower
from asyncrl.generator.worker import Worker
from asyncrl.queue.broker.clock import STEP_S
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.types import NO_VERSION, Group, Task, Turn

LEASE_S = 30.0
CONFIG = Config(
    batch=BatchConfig(groups=2, group_size=2),
    generator=GeneratorConfig(slots=8, max_length=2000, max_tokens=200, heartbeat_s=0.01),
    reward=RewardConfig(function="unused:unused", retries=0),
    agent=AgentConfig(tools=["agent_cases:multiply"]),
)
TASKS = [Task(ordinal, f"the product {ordinal}", {"answer": "the answer is 408"}) for ordinal in range(2)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "POLL_S", 0.05)
    monkeypatch.setattr(leases, "GIVE_BACK_S", 0.05)


async def right(task: Task, text: str) -> float:
    return float(text == task.data["answer"])


@dataclass
class SpeakingEngine(Speaker):
    """Holds second turns back while its gate is shut."""

    version: int = NO_VERSION
    newer: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    weight: torch.Tensor = field(default_factory=lambda: torch.zeros(3))

    async def sample(self, request: SampleRequest) -> list[Turn]:
        if "<tool_response>" in self.tok.decode(request.prompt_ids):
            await self.gate.wait()
        return await super().sample(request)

    async def flip(self, staged: Mapping[str, torch.Tensor], version: int) -> float:
        self.weight.copy_(staged["w"])
        self.version = version
        return 0.0

    def stats(self) -> dict[str, float]:
        return {"tokens": 0.0, "running": 0.0, "waiting": 0.0}


@dataclass
class Party:
    """One worker. kept: the trajectories that its queue has of each task."""

    engine: SpeakingEngine
    worker: Worker
    link: Any
    kept: dict[int, list[Trajectory]] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    running: asyncio.Task[None] | None = None

    async def until_all_turns_are_kept(self, turns: int) -> None:
        def all_there() -> bool:
            every = [one for several in self.kept.values() for one in several]
            return len(every) == 4 and all(one.turns == turns and not one.unanswered for one in every)

        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(all_there)

    async def kill(self) -> None:
        """Nothing that it says is heard any more."""
        self.link.send = lambda frames: None
        await self.stop()

    async def stop(self) -> None:
        assert self.running is not None
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


@asynccontextmanager
async def party(queue: LocalQueue, name: str, version: int) -> AsyncIterator[Party]:
    learner, client = FakeLearner(FakeQueue()), queue.client(name)
    await client.connect()
    await learner.publish(version)
    await client.post("weights/0", learner.queue.directory["weights/0"])
    engine = SpeakingEngine(calculating)
    reader = FakeReader("run", name, CONFIG.sync, stream=learner.open)
    receiver = LocalReceiver({"w": engine.weight}, engine.flip, reader)
    follower = WeightFollower(name, receiver, client)  # type: ignore[arg-type]
    scorer = Scorer(right, CONFIG.reward)
    rollouts = Rollouts(engine, engine.tok, scorer, CONFIG)  # type: ignore[arg-type]
    worker = Worker(name, CONFIG, client=client, engine=engine, follower=follower, rollouts=rollouts)  # type: ignore[arg-type]
    made = Party(engine, worker, client._connection._link)
    send = client.progress

    async def progress(stream: str, lease: Any, frames: Sequence[bytes]) -> None:
        await send(stream, lease, frames)
        made.kept[lease.task.ordinal] = [Trajectory.unpack(frame) for frame in frames[1:]]
        async with made.changed:
            made.changed.notify_all()

    client.progress = progress  # type: ignore[method-assign]
    made.running = asyncio.create_task(worker.run())
    try:
        yield made
    finally:
        await made.stop()
        scorer.close()


async def claimed(learner: Any, opened: Any, rank_step: int = 0) -> list[Group]:
    got = await learner.claim(
        "train",
        learner_epoch=opened.learner_epoch,
        step=rank_step,
        index=0,
        rank=0,
        max_tokens=1 << 20,
        whole=True,
        wait_s=PATIENCE_S,
    )
    return list(got.groups)


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_finished_turns_go_on_at_another_worker(how: str) -> None:
    clock = Clock()
    async with LocalQueue(clock=clock) as queue:
        learner = queue.client("learner")
        await learner.connect()
        opened = await learner.open("train", StreamSettings(2, 2, 1, 6, 1 << 30, LEASE_S))
        await learner.submit("train", TASKS)
        async with party(queue, "first", version=0) as first:
            await first.until_all_turns_are_kept(1)
            await getattr(first, how)()
        for _ in range(
            int(worker_module.LEASE_S + LEASE_S) + 2
        ):  # its parked request ends before its leases do
            clock.now += STEP_S
            await learner.status()
        async with party(queue, "second", version=1) as second:
            second.engine.gate.set()
            groups = await claimed(learner, opened)
            assert len(second.engine.asked) == 4  # the second turns alone
            assert second.worker.telemetry.collect()["agent/resumed"] == 4
        assert len(first.engine.asked) == 4
        for group in groups:
            assert group.rewards.tolist() == [1.0, 1.0]
            assert group.start_version == 0
            for rollout in group.rollouts():
                said = rollout.versions[rollout.loss_mask == 1].tolist()
                assert said == [0] * (len(CALL) + 1) + [1] * (len("the answer is 408") + 1)
                assert (rollout.versions[rollout.loss_mask == 0] == NO_VERSION).all()
                assert set(rollout.columns["step"]) == {-1, 0, 1}
        await learner.close()


async def test_what_is_kept_while_a_message_is_under_way_goes_with_the_next_one() -> None:
    sent: list[list[bytes]] = []
    arrived, go_on = asyncio.Event(), asyncio.Semaphore(0)

    async def send(frames: Sequence[bytes]) -> None:
        sent.append(list(frames))
        arrived.set()
        await go_on.acquire()

    with TaskProgress(2, keep=Keep(send)) as progress:
        progress.changed()
        await arrived.wait()
        arrived.clear()
        for trajectory in progress.trajectories:
            trajectory.add(TrajectoryEnd("done"))
            progress.changed()
        go_on.release()
        await arrived.wait()
    assert [[Trajectory.unpack(f).ended for f in frames[1:]] for frames in sent] == [[None] * 2, ["done"] * 2]
    again = TaskProgress(2, sent[1])
    assert [trajectory.ended for trajectory in again.trajectories] == ["done", "done"]


@pytest.mark.parametrize("ending", [asyncio.CancelledError, RefusedError, None])
@pytest.mark.parametrize("stage", ["nothing new", "a message under way", "newer than the message"])
async def test_what_no_message_has_is_left_for_whoever_gives_the_lease_back(
    ending: type[BaseException] | None, stage: str
) -> None:
    """Only of cancelled rollouts: others end as a group, or are dropped."""

    async def send(frames: Sequence[bytes]) -> None:
        await asyncio.get_running_loop().create_future()

    keep = Keep(send)
    with suppress(asyncio.CancelledError, RefusedError), TaskProgress(1, keep=keep) as progress:
        if stage != "nothing new":
            progress.trajectories[0].add(TrajectoryEnd("first"))
            progress.changed()
            await asyncio.sleep(0)
        if stage == "newer than the message":
            progress.trajectories[0].clear()
            progress.trajectories[0].add(TrajectoryEnd("second"))
            progress.changed()
        if ending is not None:
            raise ending("full")
    left = TaskProgress(1, keep.unsent).trajectories[0].ended if keep.unsent else None
    newest = {"a message under way": "first", "newer than the message": "second"}.get(stage)
    assert left == (newest if ending is asyncio.CancelledError else None)


async def test_a_queue_that_keeps_no_more_is_not_asked_again() -> None:
    asked = asyncio.Semaphore(0)

    async def send(frames: Sequence[bytes]) -> None:
        asked.release()
        raise RefusedError("full")

    progress = TaskProgress(1, keep=Keep(send))
    progress.changed()
    await asked.acquire()
    await asyncio.sleep(0)
    progress.changed()
    await asyncio.sleep(0)
    assert asked.locked()


@pytest.mark.parametrize(
    "kept", [[b"\xc1"], [b"what"], TaskProgress(3).frames(), [*TaskProgress(2).frames()[:-1], b"\x00"]]
)
def test_what_cannot_be_read_is_made_anew(kept: list[bytes]) -> None:
    assert [len(trajectory.entries) for trajectory in TaskProgress(2, kept).trajectories] == [0, 0]


async def test_a_group_of_several_turns_is_scored_by_its_last_words_and_its_environment() -> None:
    config = Config(
        batch=BatchConfig(groups=2, group_size=2),
        reward=RewardConfig(function="unused:unused", weights={"alive": 2.0}),
        agent=AgentConfig(environment="agent_cases:Counting", options={"turns": 2}),
    )
    speaker = Speaker(lambda so_far: f"words {so_far.count('turn')}", newer=0)

    async def words(task: Task, text: str) -> dict[str, float]:
        return {"last": float(text == "words 1")}

    scorer = Scorer(words, config.reward)
    rollouts = Rollouts(speaker, speaker.tok, scorer, config)  # type: ignore[arg-type]
    group = await rollouts.score(TASKS[0], await rollouts.sample(TASKS[0], "r"))
    assert group.rewards.tolist() == [3.0, 3.0]
    assert {name: part.tolist() for name, part in group.reward_parts.items()} == {
        "last": [1.0, 1.0],
        "alive": [1.0, 1.0],
    }
    assert group.columns["step_rewards"].sum() == 4.0
    assert np.array_equal(group.loss_mask == 1, group.columns["step"] >= 0)
    held_out = await rollouts.evaluate(TASKS[0], TASKS, "e")
    assert (held_out.rewards.tolist(), held_out.columns) == ([3.0, 3.0], {})
    assert await rollouts.answer(TASKS[0], "a") == "words 1"
    assert Counting.seen > 0
    scorer.close()
