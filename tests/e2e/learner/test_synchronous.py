"""At max_staleness 0 the processes together are, bit for bit, a plain loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from learner_cases import copied_weights
from own_functions import reward_key
from processes import final_weights

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.generator.engines.transformers.transformers_engine import load_transformers_engine
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.launch.local_run import train
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.training.version_step import version_step
from asyncrl.models.loading import load_tokenizer
from asyncrl.tasks.source import training_tasks
from asyncrl.types import Group

VERSIONS = 3


def micro_batches(groups: Sequence[Group], max_tokens: int) -> list[list[Group]]:
    """Consecutive groups, as many as fit."""
    made: list[list[Group]] = [[]]
    for group in groups:
        if made[-1] and sum(g.tokens for g in made[-1]) + group.tokens > max_tokens:
            made.append([])
        made[-1].append(group)
    return made


async def plain_loop(config: Config) -> dict[str, torch.Tensor]:
    """Generate a batch task by task, train on it, copy the weights, again. No queue, no streams, no processes."""
    backend = FsdpBackend(config)
    training, tasks = version_step(backend, config), training_tasks(config)
    tokenizer = load_tokenizer(config.model)
    engine = load_transformers_engine(config, tokenizer)
    rollouts = Rollouts(engine, tokenizer, Scorer.from_config(config.reward), config)
    await engine.start()
    for version in range(config.run.versions):
        await engine.flip(backend.local_tensors(), version)
        groups = []
        for ordinal in range(version * config.batch.groups, (version + 1) * config.batch.groups):
            task = tasks.task_at(ordinal)
            groups.append(await rollouts.score(task, await rollouts.sample(task, str(ordinal))))
        for batch in micro_batches(groups, config.learner.micro_batch_tokens):
            training.add(batch, version)
        training.step(version)
    await engine.close()
    return copied_weights(backend)


def test_weights_after_some_steps_are_bit_identical_to_a_plain_loop(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    # A reward with spread, so that every step moves the weights of this untrained model.
    overrides = [
        f"run.versions={VERSIONS}",
        "queue.max_staleness=0",
        "generator.count=2",
        "evaluation.source=null",
        reward_key("digit_sum"),
    ]
    config = load_config(config_file, overrides)
    expected = asyncio.run(plain_loop(config))
    start = FsdpBackend(config).local_tensors()
    summary = train(config)
    assert summary["staleness"]["max"] == 0
    assert summary["versions"] == VERSIONS
    found = final_weights(config_file.parent / "it")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name}: {(found[name] - tensor).abs().max()}"
    assert any(not torch.equal(start[name], tensor) for name, tensor in expected.items())
