"""A recorded embedded engine and its replay come to the same groups."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from waiting import eventually

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import DivergedError
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.engines.transformers.transformers_engine import (
    TransformersEngine,
    load_transformers_engine,
)
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.learner.reporting.version_decisions import mark_of
from asyncrl.models.prompts import policy_tokenizer
from asyncrl.replay.replayed_generator import ReplayedGenerator
from asyncrl.replay.stores import GroupStore, Published, WeightStore
from asyncrl.sync.tensors.shards import Shards, layout_of
from asyncrl.tasks.source import training_tasks
from asyncrl.telemetry import decisions
from asyncrl.telemetry.decisions import ClaimedGroup, Life, read_lives
from asyncrl.types import Sampling

CONFIG = """
model: {{path: {model}}}
tasks: {{source: asyncrl.tasks.addition:train, options: {{digits: 1, held_out: 20}}}}
reward: {{function: "asyncrl.tasks.addition:reward"}}
batch: {{groups: 4, group_size: 4}}
generator: {{slots: 8, max_tokens: 72, max_length: 80, threads: 1}}
learner: {{threads: 1}}
"""
GROUPS = 6

Recorded = tuple[Config, Life, list[ClaimedGroup], dict[int, Mapping[str, Tensor]]]


DRAFTS = ["generator.speculation.tokens=4", "generator.temperature=0.3"]
"""A sure policy draws many of its drafts, wherever the flips come."""


@pytest.fixture(scope="module", params=[[], DRAFTS], ids=["", "with drafts"])
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model_folder: Path
) -> Recorded:
    """Six tasks with two flips in the middle of samples, and a seventh that is given up."""
    folder = tmp_path_factory.mktemp("run")
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(model=model_folder))
    config = load_config(path, request.param)
    about = {"format": decisions.FORMAT, "role": "generator", "config": path.name}
    with decisions.recording(folder / "decisions", "generator-0", about):
        claimed, weights = asyncio.run(_generate(config))
    (life,) = read_lives(folder / "decisions")
    assert {item[0] for item in life.items} == {"step", "add", "remove", "weights", "flip"}
    return config, life, claimed, weights


async def _generate(config: Config) -> tuple[list[ClaimedGroup], dict[int, Mapping[str, Tensor]]]:
    tokenizer, tasks = policy_tokenizer(config), training_tasks(config)
    engine = load_transformers_engine(config, tokenizer)
    await engine.start()
    rollouts = Rollouts(engine, tokenizer, Scorer.from_config(config.reward), config)
    weights: dict[int, Mapping[str, Tensor]] = {}

    async def make(ordinal: int) -> ClaimedGroup:
        samples = await rollouts.sample(tasks.task_at(ordinal), f"train/{ordinal}/{ordinal + 1}")
        group = await rollouts.score(tasks.task_at(ordinal), samples)
        return ClaimedGroup(ordinal, mark_of(group))

    await _flip(engine, 0, weights)
    jobs = [asyncio.create_task(make(ordinal)) for ordinal in range(GROUPS + 1)]
    for version in (1, 2):
        begun = engine.stats()["tokens"]
        await eventually(lambda begun=begun: engine.stats()["tokens"] > begun + 8)
        await _flip(engine, version, weights)
    jobs.pop().cancel()
    claimed = await asyncio.gather(*jobs)
    assert engine.batch.drafter is None or engine.batch.drafter.accepted > 0
    await engine.close()
    return claimed, weights


async def _flip(engine: TransformersEngine, version: int, weights: dict[int, Mapping[str, Tensor]]) -> None:
    torch.manual_seed(version)
    weights[version] = {name: torch.randn_like(target) / 3 for name, target in engine.targets.items()}
    decisions.note("weights", 1, version)
    await engine.flip(weights[version], version)


def replayed(
    recorded: Recorded, life: Life | None = None
) -> tuple[ReplayedGenerator, GroupStore, WeightStore]:
    config, was, claimed, _ = recorded
    groups, weights = GroupStore(claimed), WeightStore(Published(1, version) for version in range(3))
    tokenizer, tasks = policy_tokenizer(config), training_tasks(config)
    generator = ReplayedGenerator(life or was, config, tokenizer, tasks, {}, groups, weights)
    return generator, groups, weights


def publish(recorded: Recorded, store: WeightStore, version: int) -> None:
    tensors = recorded[3][version]
    store.put(Published(1, version), Shards(layout_of(tensors), tensors))


async def test_the_same_groups_come_of_it(recorded: Recorded) -> None:
    generator, groups, weights = replayed(recorded)
    for version in range(3):
        assert not generator.ended
        assert generator.waits_for == f"generator-0.0 waits for version {version}"
        publish(recorded, weights, version)
        assert await generator.advance()
        assert not await generator.advance()  # it waits for the next version, or has ended
    await generator.settle()
    assert generator.ended
    assert all(groups.has(one) for one in recorded[2])
    assert {v for one in recorded[2] for v in groups.take(one).versions.tolist()} == {-1, 0, 1, 2}
    await generator.close()


async def test_a_flip_at_another_token_makes_other_groups(recorded: Recorded) -> None:
    """The test above can fail."""
    life = recorded[1]
    first, second, *_ = (at for at, item in enumerate(life.items) if item[0] == "flip")
    named = next(at for at, item in enumerate(life.items) if item == ("weights", 1, 1))
    early = [life.items[named], life.items[second]]
    rest = [item for at, item in enumerate(life.items) if at not in (named, second)]
    items = [*rest[: first + 1], *early, *rest[first + 1 :]]
    generator, groups, weights = replayed(recorded, replace(life, items=items))
    for version in range(3):
        publish(recorded, weights, version)
    await generator.advance()
    await generator.settle()
    assert not all(groups.has(one) for one in recorded[2])
    await generator.close()


async def test_a_request_that_does_not_come_is_named(recorded: Recorded) -> None:
    life = recorded[1]
    items = [("add", "train/3/4/5/6") if item == ("add", "train/3/4") else item for item in life.items]
    generator, _, weights = replayed(recorded, replace(life, items=items))
    for version in range(3):
        publish(recorded, weights, version)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncrl.replay.replayed_generator.WAIT_S", 0.2)
        with pytest.raises(DivergedError, match=r"generator-0\.0 had a request train/3/4/5/6"):
            await generator.advance()
    await generator.close()


async def test_a_task_between_two_requests_is_awaited_until_the_second_one(recorded: Recorded) -> None:
    """As after a tool call of a rollout whose generator was killed."""
    generator, *_ = replayed(recorded)
    request = SampleRequest("train/9/9", np.ones(1, np.int64), Sampling(), ordinal=9)

    async def act() -> None:
        await asyncio.sleep(0)
        await generator._engine.sample(request)

    generator._begin("train/9/9", act())
    async with asyncio.timeout(10):
        await generator.settle()
    assert generator._engine.samples_for("train/9/9")
    await generator.close()
