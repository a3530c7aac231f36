"""Rollouts of several turns whose messages show pictures: what the policy read is what the learner reads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from image_cases import plain, read
from model_families import FAMILIES, IMAGE, VOCABULARY
from picture_cases import Gallery, picture, write_model
from PIL import Image
from test_images import backend_of
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from asyncrl.config.schema import Config, ModelConfig, RewardConfig
from asyncrl.config.sections.agent import AgentConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.agents.agent import Agent
from asyncrl.generator.agents.chat import Chat
from asyncrl.generator.agents.env_child import packed_frame
from asyncrl.generator.agents.trajectory import Trajectory
from asyncrl.generator.engines.transformers.kv_cache import ATTENTION
from asyncrl.generator.engines.transformers.transformers_engine import TransformersEngine
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.learner.checks.group_check import GroupCheck
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.models.loading import load_causal_lm
from asyncrl.models.prompts import ImageReader
from asyncrl.queue.wire.payload import decode_group, encode_group
from asyncrl.types import Group, Rollout, Sampling, Task

LONGEST = 150
TASK, SAMPLING = Task(3, ""), Sampling(max_tokens=20, seed=1)
ENDS = range(8, 30, 2)
"""Tokens that end a turn: so many that turns of a random model do end."""
WAYS = ["whole", "composed", pytest.param("history", marks=pytest.mark.slow)]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-vl", "qwen3.5-images")]


@pytest.fixture(scope="module", params=["qwen2.5-vl", *SLOW])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_model(request.param, path)
    return path


@cache
def loaded(folder: Path) -> PreTrainedModel:
    return load_causal_lm(ModelConfig(path=str(folder)), 0, ATTENTION)


@asynccontextmanager
async def agent_of(folder: Path, history: int | None = None, **options: Any) -> AsyncIterator[Agent]:
    model, tokenizer = ModelConfig(path=str(folder)), AutoTokenizer.from_pretrained(folder)
    engine = TransformersEngine(loaded(folder), slots=4, max_length=LONGEST, end_ids=ENDS, version=0)
    await engine.start()
    config = AgentConfig(environment="unused:Unused", history=history)
    make = lambda: Gallery(**options)  # noqa: E731
    yield Agent(engine, Chat(tokenizer), make, ImageReader(model), config, LONGEST)
    await engine.close()


def alone(rollout: Rollout) -> list[Rollout]:
    """Its segments as rollouts, each with its own pictures."""
    group = Group.from_rollouts(TASK, SAMPLING, [rollout])
    cuts = np.cumsum(group.segment_lengths)[:-1]
    starts = [0, *cuts.tolist(), len(rollout.token_ids)]
    return [
        Rollout(
            rollout.token_ids[start:end],
            rollout.loss_mask[start:end],
            rollout.logprobs[start:end],
            rollout.versions[start:end],
            "stop",
            media=tuple(shown.moved(-start) for shown in rollout.media if start <= shown.start < end),
        )
        for start, end in pairwise(starts)
    ]


@pytest.mark.parametrize("way", WAYS)
async def test_packed_rollouts_have_the_log_probs_that_their_turns_were_sampled_by(
    folder: Path, way: str
) -> None:
    """Five rollouts that show different pictures, through the bytes of the queue; transformers reads each segment."""
    history, composed = (1 if way == "history" else None), way == "composed"
    async with agent_of(folder, history, composed=composed) as agent:
        for seed in range(8):
            sampling = replace(SAMPLING, seed=seed)
            played = [await agent.play(TASK, f"{i}", sampling, sample=i, of=5) for i in range(5)]
            rollouts = [one.rollout({}) for one in played]
            # Transformers takes a sampled token of an image for an image.
            if not any((one.token_ids[one.loss_mask == 1] == IMAGE).any() for one in rollouts):
                break
    assert len({len(rollout.media) for rollout in rollouts}) > 1
    packed = encode_group(Group.from_rollouts(TASK, SAMPLING, rollouts))
    group = decode_group([bytes(frame) for frame in packed.frames])
    assert len(group.media) < sum(len(rollout.media) for rollout in rollouts)
    config = AutoConfig.from_pretrained(folder)
    check = GroupCheck(rollouts=5, longest=LONGEST, vocabulary=VOCABULARY, model=config, segments=3)
    assert check.fault(group, 0) is None
    batch = MicroBatch.of([group])
    said = batch.loss_mask_N == 1
    predicted = backend_of(folder).policy.predict(batch)[said]
    torch.testing.assert_close(predicted, batch.behaviour_N[said], atol=1e-4, rtol=1e-4)
    close = 1e-4 if config.model_type == "qwen3_5" else 1e-5  # delta nets add up in other pieces
    segments = [segment for rollout in rollouts for segment in alone(rollout)]
    assert (len(segments) > 5) == (way != "whole")
    with torch.no_grad():
        expected = torch.cat([plain(read(folder), segment) for segment in segments])
    torch.testing.assert_close(predicted, expected, atol=close, rtol=close)


@pytest.mark.parametrize("way", WAYS)
async def test_another_worker_goes_on_with_the_same_pictures(folder: Path, way: str) -> None:
    """From what is kept after each entry, also after the last one: kept bytes have no pixels."""
    history, composed = (1 if way == "history" else None), way == "composed"
    async with agent_of(folder, history, composed=composed) as agent:
        whole = await agent.play(TASK, "r", SAMPLING)
        assert len(whole.packed) < 3000
        for count in range(1, len(whole.entries) + 1):
            kept = Trajectory.unpack(bytes(whole.packed))
            kept.keep_first(count)
            assert kept.blind
            again = (await agent.play(TASK, "r", SAMPLING, trajectory=kept)).rollout({})
            assert again.token_ids.tolist() == whole.rollout({}).token_ids.tolist()
            for one, other in zip(again.media, whole.rollout({}).media, strict=True):
                assert one == other
                np.testing.assert_array_equal(
                    one.item.arrays["pixel_values"], other.item.arrays["pixel_values"]
                )
        assert agent.stats()["agent/resumed"] == len(whole.entries)
        assert "agent/diverged" not in agent.stats()


@pytest.mark.parametrize("since", [0, 1])
async def test_a_rollout_whose_pictures_come_out_otherwise_begins_anew(folder: Path, since: int) -> None:
    """The other pictures have the same sizes, so all tokens are the same."""
    async with agent_of(folder) as agent:
        for seed in range(8):
            sampling = replace(SAMPLING, seed=seed)
            whole = await agent.play(TASK, "r", sampling)
            if len(whole.rollout({}).media) > 1:
                break
    for count in (3, len(whole.entries)):
        kept = Trajectory.unpack(bytes(whole.packed))
        kept.keep_first(count)
        async with agent_of(folder, other=1, since=since) as agent:
            made = (await agent.play(TASK, "r", sampling, trajectory=kept)).rollout({})
            assert agent.stats()["agent/diverged"] == 1
        assert made.media[:since] == whole.rollout({}).media[:since]
        assert made.media[since] != whole.rollout({}).media[since]


async def test_turns_with_equal_tokens_and_other_pictures_begin_in_other_states(folder: Path) -> None:
    anchors = []
    for other in (0, 1, 0):
        async with agent_of(folder, other=other, turns=1, composed=True) as agent:
            made = (await agent.play(TASK, "r", SAMPLING)).rollout({})
        prompt = made.token_ids[made.loss_mask == 0]
        anchors.append((prompt.tolist(), int(made.columns["anchor"].max())))
    first, changed, again = anchors
    assert first[0] == changed[0]
    assert first == again
    assert first[1] != changed[1]


async def test_pictures_come_out_of_another_process_as_they_went_in(folder: Path) -> None:
    """As PNG, whatever their colours are stored as."""
    reader, noise = (
        ImageReader(ModelConfig(path=str(folder))),
        np.random.default_rng(0).integers(0, 256, (40, 30, 4)),
    )
    for mode in ("RGB", "RGBA", "L", "P"):
        image = Image.fromarray(noise.astype(np.uint8)).convert(mode)
        messages = [{"role": "user", "content": [{"type": "image", "image": image}]}]
        (*_, sent) = msgpack.unpackb(packed_frame([0, "ok", messages]))
        here, there = (reader.shown_in(np.array([5, IMAGE, 6]), each) for each in (messages, sent))
        assert here.media == there.media


async def test_pictures_that_nothing_would_read_end_the_run_by_name(folder: Path, tmp_path: Path) -> None:
    """A model for text, an engine that is given tokens alone, a program: a new task would not help."""
    for path, engine, says in [
        (tmp_path, "transformers", "model.path = .* reads no images"),
        (folder, "vllm", "generator.engine = 'vllm'"),
    ]:
        FAMILIES["qwen3"].save_config(tmp_path)
        model = ModelConfig(path=str(path))
        chat = Chat(AutoTokenizer.from_pretrained(folder))
        agent = Agent(None, chat, Gallery, ImageReader(model, engine), AgentConfig(), LONGEST)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=says):
            await agent.play(TASK, "r", SAMPLING)
    config = Config(agent=AgentConfig(program="true"), reward=RewardConfig(function="unused:unused"))
    played = Rollouts(None, chat.tokenizer, Scorer(None, config.reward), config)  # type: ignore[arg-type]
    shown = Task(0, [{"role": "user", "content": [picture(1)]}])
    with pytest.raises(ConfigError, match=r"agent = 'true': task 0 has images"):
        await played.sample(shown, "r")
