"""The generator's loops against a queue and a learner that live in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generator_cases import CONFIG, PATIENCE_S, FakeLearner, House, house, letter_of, tasks
from waiting import eventually

from asyncrl.config.schema import BatchConfig, Config, EvaluationConfig, GeneratorConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.placement import PlacementConfig, RewardsPlaceConfig
from asyncrl.config.sections.tasks import MAIN, CurriculumConfig
from asyncrl.errors import ConfigError, DeadlineError, RewardFailedError, TaskError, WeightSyncError
from asyncrl.generator import weights
from asyncrl.generator.agents.task_progress import TaskProgress
from asyncrl.generator.engines.engine import RequestFailedError, SampleLostError, SampleRequest
from asyncrl.generator.engines.receiver import Learner, LocalReceiver, LostWeightsError
from asyncrl.generator.scoring.reward_calls import FIRST
from asyncrl.generator.worker import Worker
from asyncrl.queue.protocol.replies import Renewal
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import Scored, Step, Task, Turn

RARE_HEARTBEATS = replace(
    CONFIG,
    generator=replace(CONFIG.generator, heartbeat_s=60.0),
    queue=replace(CONFIG.queue, lease_s=600.0),
)


@pytest.fixture(autouse=True)
def _quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "POLL_S", 0.05)
    monkeypatch.setattr(weights, "RETRY_S", 0.01)


async def ended(h: House) -> None:
    await asyncio.wait_for(h.running, PATIENCE_S)


async def heartbeats(h: House, count: int = 3) -> None:
    """Wait for so many of them."""
    for _ in range(count):
        seen = h.queue.stats
        await h.queue.until(lambda: h.queue.stats is not seen)  # noqa: B023


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


async def test_totals_are_reported_with_each_group_and_not_only_at_heartbeats() -> None:
    async with house(config=RARE_HEARTBEATS) as h:
        await h.queue.until(lambda: h.queue.stats.get("held") == -1)
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(1))
        await h.queue.until(lambda: h.queue.stats.get("weights/flips") == 1)
        assert h.queue.stats["held"] == 0
        assert h.queue.stats["tokens"] > 0


async def test_a_dropped_task_is_reported_before_the_next_heartbeat() -> None:
    def broken(task: Task, text: str) -> float:
        raise KeyError("anwser")

    async with house(config=RARE_HEARTBEATS, reward=broken) as h:
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(1))
        await h.queue.until(lambda: h.queue.stats.get("dropped/reward") == 1)
        assert h.queue.stats["reward/failures"] > 0


async def test_nothing_is_leased_before_the_first_weights() -> None:
    async with house() as h:
        await h.queue.submit("train", *tasks(1))
        await h.queue.until(lambda: bool(h.queue.stats))
        assert h.queue.asked == []
        await h.learner.publish(5)
        await h.queue.until(lambda: len(h.queue.committed) == 1)
        assert {held for _, held, _ in h.queue.asked} == {5}
        assert torch.equal(h.engine.targets["w"], torch.full((3,), 6.0))


async def test_no_more_is_leased_than_the_engine_can_hold_and_a_lead() -> None:
    async with house() as h:
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(30))
        await h.queue.until(lambda: len(h.queue.committed) == 30)
        assert max(most for _, _, most in h.queue.asked) == 5  # 8 slots / 2 samples, and a quarter


async def test_the_longest_sample_of_a_group_keeps_no_slot_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each group one sample of two goes on for ever."""
    begun: list[int] = []

    async def endless(request: SampleRequest) -> list[Turn]:
        begun.append(request.ordinal)
        return await asyncio.get_running_loop().create_future()

    async with house() as h:
        monkeypatch.setattr(h.engine, "sample", endless)
        monkeypatch.setattr(h.engine, "stats", lambda: {"tokens": 0.0, "running": len(begun), "waiting": 0.0})
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(30))
        await h.queue.until(
            lambda: len(begun) == 9
        )  # 9 samples go on; with a 10th group there would be 11 at first
        for _ in range(3):
            seen = h.queue.stats
            await h.queue.until(lambda: h.queue.stats is not seen)  # noqa: B023
        assert begun == list(range(9))


async def test_an_engine_that_takes_memory_away_is_given_less(monkeypatch: pytest.MonkeyPatch) -> None:
    pressed = {"tokens": 0.0, "running": 8.0, "waiting": 2.0, "kv_usage": 1.0, "preemptions": 4.0}

    async def endless(request: SampleRequest) -> list[Turn]:
        return await asyncio.get_running_loop().create_future()

    async with house() as h:
        await h.queue.until(lambda: h.queue.stats.get("admitted") == 10)
        monkeypatch.setattr(h.engine, "sample", endless)
        monkeypatch.setattr(h.engine, "stats", lambda: pressed)
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(30))
        await h.queue.until(lambda: h.queue.stats.get("admitted", 10) < 10)


async def test_a_request_that_fails_for_good_is_dropped_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with house() as h:
        plain = h.engine.sample

        async def sample(request: SampleRequest) -> list[Turn]:
            if request.ordinal == 1:
                raise RequestFailedError("no")
            return await plain(request)

        monkeypatch.setattr(h.engine, "sample", sample)
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(3))
        await h.queue.until(lambda: len(h.queue.committed) + len(h.queue.dropped) == 3)
        assert h.queue.dropped == {1: "engine"}


async def test_a_task_whose_sample_is_lost_goes_back_to_the_queue_and_the_third_time_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with house() as h:
        plain = h.engine.sample

        async def sample(request: SampleRequest) -> list[Turn]:
            if request.ordinal == 1:
                raise SampleLostError("the server forgot it")
            return await plain(request)

        monkeypatch.setattr(h.engine, "sample", sample)
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(3))
        for returned in (1, 2):
            await h.queue.until(lambda: h.queue.stats.get("returned") == returned)  # noqa: B023
            assert h.queue.returned == [1] * returned
            assert h.queue.dropped == {}
            await h.queue.submit("train", tasks(2)[1])
        await h.queue.until(lambda: h.queue.dropped == {1: "engine"})
        assert {ordinal for _, ordinal in h.queue.committed} == {0, 2}
        assert "worker gives task 1 of stream train back: the server forgot it" in caplog.text


async def test_an_engine_that_makes_no_token_ends_the_worker_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's own watch has the same limit, and would end the process of the tests after so short a pause."""
    monkeypatch.setattr("asyncrl.generator.worker.LoopWatch", lambda *_: nullcontext())
    impatient = replace(CONFIG, generator=replace(CONFIG.generator, progress_deadline_s=0.1))
    async with house(config=impatient) as h:
        monkeypatch.setattr(h.engine, "_step", lambda: None)
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(1))
        with pytest.raises(
            DeadlineError, match=r"worker waited .* its engine \(ScriptedEngine\): a token of version 0"
        ):
            await ended(h)
        assert h.queue.returned == [0]


async def test_a_flip_asks_again_with_the_newer_version() -> None:
    async with house() as h:
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(1), held=1)
        await h.queue.until(lambda: ("train", 0, 5) in h.queue.asked)
        await h.learner.publish(1)
        await h.queue.until(lambda: len(h.queue.committed) == 1)
        assert h.queue.committed["train", 0].start_version == 1
        await h.queue.until(lambda: h.learner.acknowledged == [0, 1])


async def test_a_flip_takes_back_the_request_that_waits_under_the_version_before() -> None:
    """The queue would go on to grant it tasks by the older version."""
    async with house() as h:
        await h.learner.publish(0)
        await h.queue.until(lambda: h.queue.parked == [("train", 0)])
        await h.learner.publish(1)
        await h.queue.until(lambda: h.queue.parked == [("train", 1)])


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


async def test_a_reward_that_always_fails_ends_the_worker() -> None:
    def typo(task: Task, text: str) -> float:
        raise KeyError("anwser")

    async with house(reward=typo) as h:
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(2 * FIRST))
        with pytest.raises(RewardFailedError, match="raised KeyError: 'anwser'"):
            await ended(h)


def by_task(task: Task, text: str) -> float:
    """Even tasks: all samples alike. Odd ones: they differ."""
    return float(task.ordinal % 2 and text == "A")


FILTERING = replace(CONFIG, algorithm=AlgorithmConfig(filter="no_spread"))


async def test_groups_without_spread_are_dropped_before_they_travel_if_the_config_says_so() -> None:
    async with house(reward=by_task, config=FILTERING) as h:
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(6))
        await h.queue.until(lambda: len(h.queue.committed) + len(h.queue.dropped) == 6)
        assert h.queue.dropped == {0: "filtered", 2: "filtered", 4: "filtered"}
        assert sorted(h.queue.committed) == [("train", 1), ("train", 3), ("train", 5)]
        await h.queue.until(lambda: h.queue.stats.get("dropped/filtered") == 3)
    async with house(reward=by_task) as h:
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(6))
        await h.queue.until(lambda: len(h.queue.committed) == 6)


async def test_a_curriculum_gets_the_score_of_every_group_of_the_run() -> None:
    """Filtered ones too, and none of an evaluation."""
    config = replace(FILTERING, tasks=replace(CONFIG.tasks, curriculum=CurriculumConfig(solved=0.9)))
    for given, scores in ((config, [0.0, 0.5]), (FILTERING, [None, None])):
        async with house(reward=by_task, held_out={MAIN: [Task(0, "?", {})]}, config=given) as h:
            await h.learner.publish(0)
            await h.queue.submit("train", *tasks(2))
            await h.queue.submit("eval", Task(0, "", {"version": 0, "set": "", "start": 0, "stop": 1}))
            await h.queue.until(lambda: len(h.queue.scores) == 3)
            assert h.queue.scores == {("train", 0): scores[0], ("train", 1): scores[1], ("eval", 0): None}


async def test_groups_that_a_pool_gives_rewards_go_to_it_without_theirs_and_unfiltered() -> None:
    place = PlacementConfig(rewards=RewardsPlaceConfig(where="pool"))
    held_out = [Task(0, "?", {"answer": "A"})]
    config = replace(FILTERING, placement=place)
    async with house(reward=by_task, held_out={MAIN: held_out}, config=config) as h:
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(2))
        await h.queue.submit("eval", Task(0, "", {"version": 0, "set": "", "start": 0, "stop": 1}))
        await h.queue.until(lambda: len(h.queue.committed) == 3)
        assert h.queue.columns == {("train", 0): [], ("train", 1): [], ("eval", 0): []}


async def test_an_evaluation_is_never_filtered() -> None:
    held_out = [Task(ordinal, "?", {"answer": "A"}) for ordinal in range(3)]
    async with house(held_out={MAIN: held_out}, config=FILTERING) as h:
        await h.learner.publish(0)
        await h.queue.submit("eval", Task(0, "", {"version": 0, "set": "", "start": 0, "stop": 3}))
        await h.queue.until(lambda: len(h.queue.committed) == 1)
        assert h.queue.committed["eval", 0].rewards.tolist() == [1.0, 1.0, 1.0]


async def test_a_group_is_filtered_only_once_its_weights_are_verified() -> None:
    """Weights that turn out wrong must not have decided what is dropped."""
    scored: list[int] = []

    async def alike(task: Task, text: str) -> float:
        scored.append(task.ordinal)
        return 1.0

    async with house(reward=alike, config=FILTERING) as h:
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(1))
        await h.queue.until(lambda: h.queue.dropped == {0: "filtered"})
        h.learner.lies = True
        h.may_verify.clear()
        await h.learner.publish(1)
        await h.queue.until(lambda: h.engine.version == 1)
        await h.queue.submit("train", Task(2, "2?"))
        for _ in range(3):
            seen = h.queue.stats
            await h.queue.until(lambda: h.queue.stats is not seen and scored.count(2) == 2)  # noqa: B023
        h.may_verify.set()
        with pytest.raises(WeightSyncError):
            await ended(h)
        assert h.queue.dropped == {0: "filtered"}
        assert h.queue.returned == [2]


async def test_a_greedy_rollout_takes_room_beside_the_group_and_only_its_reward_travels() -> None:
    config = replace(CONFIG, algorithm=AlgorithmConfig(advantage="remax"))
    async with house(config=config) as h:
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(30))
        await h.queue.until(lambda: len(h.queue.committed) == 30)
        assert max(most for _, _, most in h.queue.asked) == 3  # 8 slots / 3 samples, and a quarter
        assert h.engine.stats()["tokens"] == 90
        group = h.queue.committed["train", 3]
        assert group.greedy_reward == 1.0
        assert group.rewards.tolist() == [1.0, 0.0]
        assert group.sampling.temperature == 1.0


async def test_steps_travel_as_columns() -> None:
    def reward(task: Task, text: str) -> Scored:
        return Scored(0.5, [Step(0, 1, 0.25, "start"), Step(1, 2, 0.5, text[0])])

    async with house(reward=reward, script=lambda ordinal, sample: [ord("A") + sample, ord("x")]) as h:
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(1))
        await h.queue.until(lambda: len(h.queue.committed) == 1)
        group = h.queue.committed["train", 0]
        assert group.columns["step"].tolist() == [-1, -1, 0, 1, -1, -1, 0, 1]
        assert group.columns["step_rewards"].tolist() == [0, 0, 0.25, 0.5, 0, 0, 0.25, 0.5]
        assert group.rewards.tolist() == [1.25, 1.25]
        first, second = group.columns["anchor"][[2, 6]], group.columns["anchor"][[3, 7]]
        assert first[0] == first[1]
        assert second[0] != second[1]


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


async def test_the_work_of_a_lost_lease_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples would keep slots of the engine busy for a task that another worker has by now."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless(request: SampleRequest) -> list[Turn]:
        begun.set()
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    async with house() as h:
        monkeypatch.setattr(h.engine, "sample", endless)
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(1))
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        h.queue.lost = [("train", 0, 1)]
        await asyncio.wait_for(ended.wait(), PATIENCE_S)
        assert not h.running.done()


async def test_a_fenced_commit_is_counted_and_the_worker_goes_on() -> None:
    async with house() as h:
        h.queue.fenced = {0}
        await h.learner.publish(0)
        await h.queue.submit("train", *tasks(2))
        await h.queue.until(lambda: h.queue.stats.get("refused/fenced") == 1 and len(h.queue.committed) == 1)


async def test_an_evaluation_is_greedy_over_its_chunk_and_pins_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.generator.weights.POLL_S", 0.01)
    gate = asyncio.Event()

    async def gated(task: Task, text: str) -> float:
        await gate.wait()
        return float(task.ordinal)

    held_out = [Task(ordinal, f"h{ordinal}") for ordinal in range(6)]
    async with house(reward=gated, held_out={MAIN: held_out}) as h:
        await h.learner.publish(0)
        await h.queue.submit("eval", Task(0, "", {"version": 0, "set": "", "start": 2, "stop": 5}))
        await h.queue.until(lambda: h.queue.stats.get("leases") == 1)
        await h.learner.publish(1)
        await h.queue.submit("train", *tasks(1))
        await h.queue.until(lambda: h.learner.fetched == [0, 1])
        for _ in range(3):
            await heartbeats(h, 1)
            assert h.queue.stats["held"] == h.engine.version == 0
        await h.queue.until(lambda: h.queue.stats is not None and h.learner.acknowledged.count(0) > 2)
        gate.set()
        await h.queue.until(lambda: len(h.queue.committed) == 2)
        evaluation = h.queue.committed["eval", 0]
        assert evaluation.rewards.tolist() == [2.0, 3.0, 4.0]
        assert evaluation.sampling.temperature == 0.0
        assert set(evaluation.versions.tolist()) == {-1, 0}
        await h.queue.until(lambda: h.queue.stats["held"] == 1)


async def test_an_evaluation_under_way_keeps_training_leases_away() -> None:
    """But for the request that was parked at the queue before it began."""
    gate = asyncio.Event()

    async def gated(task: Task, text: str) -> float:
        await gate.wait()
        return 1.0

    async with house(reward=gated, held_out={MAIN: tasks(3)}) as h:
        await h.learner.publish(0)
        await h.queue.submit("eval", Task(0, "", {"version": 0, "set": "", "start": 0, "stop": 3}))
        await h.queue.until(lambda: h.queue.stats.get("leases") == 1)
        parked, other = tasks(2)
        await h.queue.submit("train", parked)
        await h.queue.until(lambda: h.queue.stats.get("leases") == 2)
        await h.queue.submit("train", other)
        await heartbeats(h)
        assert h.queue.pending["train"] == [(other, 0)]
        gate.set()
        await h.queue.until(lambda: len(h.queue.committed) == 3)


async def test_an_evaluation_waits_for_a_flip_that_is_not_verified_yet() -> None:
    sampled: list[int] = []

    def letters(ordinal: int, sample: int) -> list[int]:
        sampled.append(ordinal)
        return letter_of(ordinal, sample)

    async with house(script=letters, held_out={MAIN: tasks(3)}) as h:
        await h.learner.publish(0)
        await h.queue.until(lambda: h.queue.stats.get("held") == 0)
        h.may_verify.clear()
        await h.learner.publish(1)
        await h.queue.until(lambda: h.engine.version == 1)
        await h.queue.submit("eval", Task(0, "", {"version": 0, "set": "", "start": 0, "stop": 3}))
        await h.queue.until(lambda: h.queue.stats.get("leases") == 1)
        await heartbeats(h)
        assert (h.queue.stats["held"], sampled) == (0, [])
        h.may_verify.set()
        await h.queue.until(lambda: bool(h.queue.committed))
        assert set(h.queue.committed["eval", 0].versions.tolist()) == {-1, 1}


async def test_an_evaluation_lease_names_its_set() -> None:
    async def ordinal_of(task: Task, text: str) -> float:
        return float(task.ordinal)

    hard = {"source": "hard.jsonl", "samples": 2, "temperature": 1.0, "max_tokens": 3}
    config = replace(CONFIG, evaluation=EvaluationConfig(sets={"hard": hard}))
    sets = {"": [Task(0, "m")], "hard": [Task(ordinal, f"h{ordinal}") for ordinal in range(3)]}
    async with house(reward=ordinal_of, held_out=sets, config=config) as h:
        await h.learner.publish(0)
        await h.queue.submit("eval", Task(0, "", {"version": 0, "set": "hard", "start": 1, "stop": 3}))
        await h.queue.until(lambda: bool(h.queue.committed))
        assert h.queue.committed["eval", 0].rewards.tolist() == [1.0, 1.0, 2.0, 2.0]


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


@dataclass
class Opening:
    """A receiver that is only opened."""

    learner: asyncio.Future[Learner]

    async def open(self, learner: Learner) -> None:
        self.learner.set_result(learner)
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None: ...


async def test_ranks_of_two_lineages_are_no_learner() -> None:
    """While a learner comes back, its rank 1 may still be that of before, whose shards are of other versions."""
    looked: list[str] = []

    class ComingBack:
        async def lookup(self, key: str, wait_s: float) -> dict[str, Any]:
            looked.append(key)
            lineage = 2 if key == "weights/0" or looked.count(key) == 3 else 1
            return {"endpoint": f"{key} of {lineage}", "world": 2, "lineage": lineage}

    receiver: Any = Opening(asyncio.get_running_loop().create_future())
    following = asyncio.create_task(weights.WeightFollower("worker", receiver, ComingBack()).run())
    try:
        found = await asyncio.wait_for(receiver.learner, PATIENCE_S)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert found == Learner(("weights/0 of 2", "weights/1 of 2"), 2)


async def test_a_generator_of_another_configuration_takes_no_weights() -> None:
    class OneLearner:
        async def lookup(self, key: str, wait_s: float) -> dict[str, Any]:
            return {"endpoint": "tcp://127.0.0.1:9", "world": 1, "lineage": 0}

    async def differs() -> None:
        raise ConfigError("batch.group_size", "2", "the learner has 8", "start both alike")

    receiver: Any = Opening(asyncio.get_running_loop().create_future())
    follower = weights.WeightFollower("worker", receiver, OneLearner(), differs)
    with pytest.raises(ConfigError, match=r"batch\.group_size"):
        await asyncio.wait_for(follower.run(), PATIENCE_S)
    assert not receiver.learner.done()


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


async def test_a_generator_shows_that_its_learner_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class OneLearner:
        async def lookup(self, key: str, wait_s: float) -> dict[str, Any]:
            return {"endpoint": "tcp://127.0.0.1:9", "world": 1, "lineage": 0}

    failures: list[int] = []

    class Gone(Opening):
        answers = asyncio.Event()

        async def open(self, learner: Learner) -> None: ...

        async def newest(self, newer_than: int, wait_s: float) -> int | None:
            if not self.answers.is_set():
                failures.append(newer_than)
                raise DeadlineError("worker", "the learner", "an answer to 'newest'", 1.0)
            await asyncio.sleep(0)
            return None

    monkeypatch.setattr(weights, "RETRY_S", 0.0)
    status, receiver = ProcessStatus(), Gone(asyncio.get_running_loop().create_future())
    follower = weights.WeightFollower("worker", receiver, OneLearner(), status=status)  # type: ignore[arg-type]
    following = asyncio.create_task(follower.run())
    try:
        (wait,) = await eventually(lambda: status.waits(0.0))
        assert wait.whom == "an answer of the learner"
        await eventually(lambda: len(failures) >= 3)
        assert [line.getMessage() for line in caplog.records] == [
            "worker has no weights yet: worker waited 1.0 s for the learner: an answer to 'newest' did not come"
        ]
        receiver.answers.set()
        await eventually(lambda: not status.waits(0.0))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_while_a_flip_waits_only_the_learner_of_the_held_version_is_kept_informed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An evaluation holds the flip up. A learner that came back has never published what is held."""
    reported: list[int] = []

    class Flipping:
        async def held(self, version: int) -> None:
            reported.append(version)

        async def flip(self, version: int) -> float:
            return 0.0

        async def verify(self) -> None: ...

    async def installed(lineage: int, passes: int) -> list[int]:
        """What the learner of this lineage gets, while the event loop passes so often before the flip."""
        receiver: Any = Flipping()
        follower = weights.WeightFollower("worker", receiver, receiver)
        follower.held, follower.lineage = 3, 0
        reported.clear()
        staged: Any = SimpleNamespace(version=4, bytes=8, seconds=0.1)
        async with follower.pinned():
            flip = asyncio.create_task(follower._install(staged, Learner(("tcp://127.0.0.1:9",), lineage)))
            for _ in range(passes):
                await asyncio.sleep(0)
        await flip
        assert (follower.held, follower.lineage) == (4, lineage)
        return [*reported]

    monkeypatch.setattr(weights, "POLL_S", 0.0)
    passes = 10
    while 3 not in await installed(0, passes):
        passes *= 2
    assert await installed(1, 2 * passes) == [4]


async def test_counts_of_weights_change_together_with_what_is_held() -> None:
    """A heartbeat may come at any await: it must not report a loss beside the version that was lost."""
    follower = weights.WeightFollower("worker", Any, Any)  # type: ignore[arg-type]
    follower.held, follower.lineage = 3, 0
    async with follower._state:  # somebody looks at the state
        losing = asyncio.create_task(follower._lost(LostWeightsError("it restarted")))
        await asyncio.sleep(0)
        assert (follower.held, follower._counts["lost"]) == (3, 0)
    await losing
    assert (follower.held, follower._counts["lost"]) == (-1, 1)


async def test_an_engine_that_lost_its_weights_holds_none_until_they_are_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with house() as h:
        await h.learner.publish(3)
        await h.queue.submit("train", *tasks(1))
        await h.queue.until(lambda: len(h.queue.committed) == 1)
        plain, lost, away = LocalReceiver.newest, iter([True]), asyncio.Event()

        async def newest(self: LocalReceiver, newer_than: int, wait_s: float) -> int | None:
            if next(lost, False):
                raise LostWeightsError("it restarted")
            await away.wait()
            return await plain(self, newer_than, wait_s)

        monkeypatch.setattr(LocalReceiver, "newest", newest)
        await h.queue.until(lambda: h.queue.stats["weights/lost"] == 1)
        assert (h.queue.stats["held"], h.queue.stats["lineage"]) == (-1, -1)
        await h.queue.until(lambda: ("train", 3) not in h.queue.parked)
        asked = len(h.queue.asked)
        await h.queue.submit("train", Task(1, "1?", {"answer": "A"}))
        away.set()
        await h.queue.until(lambda: len(h.queue.committed) == 2)
        assert h.learner.fetched == [3, 3]
        assert {held for _, held, _ in h.queue.asked[asked:]} == {3}


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

        async def renew(stats: Mapping[str, Any]) -> Renewal:
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


async def test_messages_that_the_template_does_not_take_end_the_worker_by_the_name_of_the_task() -> None:
    async with house() as h:
        await h.learner.publish(0)
        await h.queue.submit("train", Task(0, "1?"), Task(1, [{"role": "user"}]))
        with pytest.raises(TaskError, match=r"task 1: its messages do not go .*\(KeyError: 'content'\)"):
            await ended(h)


async def test_slots_that_hold_no_group_are_refused() -> None:
    config = Config(batch=BatchConfig(group_size=9), generator=GeneratorConfig(slots=8))
    with pytest.raises(ConfigError, match=r"^generator.slots = 8"):
        Worker("w", config, client=None, engine=None, follower=None, rollouts=None)  # type: ignore[arg-type]
    config = Config(
        batch=BatchConfig(group_size=8),
        generator=GeneratorConfig(slots=8),
        algorithm=AlgorithmConfig(advantage="remax"),
    )
    with pytest.raises(ConfigError, match=r"^generator.slots = 8: .*=8 and a greedy rollout"):
        Worker("w", config, client=None, engine=None, follower=None, rollouts=None)  # type: ignore[arg-type]


async def test_each_heartbeat_traces_figures_and_drops(trace: Any) -> None:
    def broken(task: Task, text: str) -> float:
        raise KeyError("anwser")

    async with house(reward=broken) as h:
        await h.learner.publish(4)
        await h.queue.submit("train", *tasks(2))
        await h.queue.until(lambda: h.queue.stats.get("dropped/reward") == 2)
        await heartbeats(h)
    figures, events = trace().figures, trace().events
    assert figures["sync/held"][1][-1] == 4
    assert {"rollout/running", "rollout/waiting", "rollout/leases", "perf/generator/tokens_per_s"} <= set(
        figures
    )
    assert max(figures["perf/generator/tokens_per_s"][1]) > 0
    dropped = [event.about for event in events if event.name == "dropped"]
    assert {each["reason"] for each in dropped} == {"reward"}
    assert sum(each["count"] for each in dropped) == 2


async def half_made(h: House, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Lease tasks 0 and 1, and make three tokens of each sample; the event lets the samples end."""
    may_end = asyncio.Event()

    async def sample(request: SampleRequest) -> list[Turn]:
        turns = [request.turn([65 + i] * 3, [-0.5] * 3, [0] * 3, "abort") for i in range(request.n)]
        assert request.pieces is not None
        for index, turn in enumerate(turns):
            request.pieces.take(index, turn)
        await may_end.wait()
        return [replace(turn, finish="stop") for turn in turns]

    monkeypatch.setattr(h.engine, "sample", sample)
    await h.learner.publish(0)
    await h.queue.submit("train", *tasks(2))
    await h.queue.until(lambda: not h.queue.pending["train"] and len(h.queue.parked) > 0)
    return may_end


async def test_a_worker_that_leaves_takes_no_more_and_ends_with_its_last_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with house() as h:
        may_end = await half_made(h, monkeypatch)
        h.leaving.set()
        await h.queue.until(lambda: not h.queue.parked)
        await h.queue.submit("train", Task(2, "2?", {"answer": "A"}))
        may_end.set()
        await ended(h)
        assert sorted(ordinal for _, ordinal in h.queue.committed) == [0, 1]
        assert h.queue.returned == []
        assert [task.ordinal for task, _ in h.queue.pending["train"]] == [2]


async def test_an_idle_worker_leaves_at_once() -> None:
    async with house() as h:
        await h.learner.publish(0)
        await h.queue.until(lambda: len(h.queue.parked) > 0)
        h.leaving.set()
        await ended(h)
    async with house() as h:  # it has no weights yet
        h.leaving.set()
        await ended(h)


@pytest.mark.parametrize("verified", [True, False])
async def test_a_cancelled_worker_hands_over_what_it_has_made_unless_its_weights_are_unverified(
    monkeypatch: pytest.MonkeyPatch, verified: bool
) -> None:
    async with house() as h:
        await half_made(h, monkeypatch)
        if not verified:
            h.may_verify.clear()
            await h.learner.publish(1)
            await h.queue.until(lambda: h.worker._follower.flipping)
        assert h.queue.progress_of == {}  # three tokens are too few for a message
        h.running.cancel()
        h.may_verify.set()
        await asyncio.gather(h.running, return_exceptions=True)
        assert sorted(h.queue.returned) == [0, 1]
        assert sorted(h.queue.progress_of) == ([0, 1] if verified else [])
        for frames in h.queue.progress_of.values():
            kept = [one.last_words.tolist() for one in TaskProgress(2, frames).trajectories]
            assert kept == [[65] * 3, [66] * 3]
