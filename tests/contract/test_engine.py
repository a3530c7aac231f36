"""What a worker may expect of every engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from asyncrl.errors import RunClosedError
from asyncrl.generator.engine import Engine, PromptTooLongError, SampleRequest
from asyncrl.generator.kv_cache import ATTENTION
from asyncrl.generator.scripted_engine import ScriptedEngine
from asyncrl.generator.transformers_engine import TransformersEngine
from asyncrl.types import Sampling

SLOTS, MAX_LENGTH, VOCABULARY = 8, 400, 16


def scripted() -> Engine:
    def script(ordinal: int, sample: int) -> list[int]:
        return [(ordinal + sample + i) % VOCABULARY for i in range(10_000)]

    return ScriptedEngine(script, slots=SLOTS, max_length=MAX_LENGTH, version=0)


def transformers(fixed_shape: bool) -> Engine:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    return TransformersEngine(
        model, slots=SLOTS, max_length=MAX_LENGTH, end_ids=(), version=0, fixed_shape=fixed_shape
    )


MAKERS: dict[str, Callable[[], Engine]] = {
    "scripted": scripted,
    "transformers": lambda: transformers(fixed_shape=False),
    "transformers at fixed shape": lambda: transformers(fixed_shape=True),
}


@pytest.fixture(params=MAKERS.values(), ids=MAKERS.keys())
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    made: Engine = request.param()
    await made.start()
    yield made
    await made.close()


def request(
    name: str, *, ordinal: int = 0, n: int = 1, max_tokens: int = 5, prompt: int = 3
) -> SampleRequest:
    prompt_ids = np.arange(prompt, dtype=np.int64) % VOCABULARY
    return SampleRequest(name, prompt_ids, Sampling(max_tokens=max_tokens, seed=1), ordinal, n)


async def until_tokens(engine: Engine, at_least: int) -> None:
    """The engine has made so many more tokens than now."""
    start = engine.stats()["tokens"]
    async with asyncio.timeout(30):
        while engine.stats()["tokens"] < start + at_least:
            await asyncio.sleep(0)


async def test_turns_have_the_promised_shapes(engine: Engine) -> None:
    turns = await engine.sample(request("a", n=3, max_tokens=5))
    assert len(turns) == 3
    for turn in turns:
        assert turn.prompt_ids.tolist() == [0, 1, 2]
        assert turn.output_ids.shape == turn.logprobs.shape == turn.versions.shape == (5,)
        assert (turn.output_ids.dtype, turn.logprobs.dtype, turn.versions.dtype) == (
            np.int64,
            np.float32,
            np.int32,
        )
        assert turn.finish == "length"
        assert (turn.logprobs < 0).all()
        assert (turn.versions == 0).all()


async def test_more_requests_than_slots_all_finish(engine: Engine) -> None:
    requests = [request(f"r{i}", ordinal=i, n=3, max_tokens=2 + i % 3) for i in range(12)]
    answers = await asyncio.gather(*(engine.sample(r) for r in requests))
    assert [len(turns[0].output_ids) for turns in answers] == [2 + i % 3 for i in range(12)]
    stats = engine.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["tokens"] == sum(3 * (2 + i % 3) for i in range(12))


async def test_the_same_request_gives_the_same_tokens_again(engine: Engine) -> None:
    first = await engine.sample(request("a", ordinal=5, n=2))
    other, again = await asyncio.gather(
        engine.sample(request("b", ordinal=6, n=2)), engine.sample(request("a", ordinal=5, n=2))
    )
    outputs = [[turn.output_ids.tolist() for turn in turns] for turns in (first, again, other)]
    assert outputs[0] == outputs[1]
    assert outputs[0] != outputs[2]
    assert outputs[0][0] != outputs[0][1]


async def test_a_prompt_without_room_for_an_answer_is_refused(engine: Engine) -> None:
    with pytest.raises(PromptTooLongError, match="long: a prompt of 400 tokens"):
        await engine.sample(request("long", prompt=MAX_LENGTH))
    (turn,) = await engine.sample(request("fits", prompt=MAX_LENGTH - 1, max_tokens=1))
    assert len(turn.output_ids) == 1


async def test_more_samples_than_slots_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="1 to 8 slots"):
        await engine.sample(request("wide", n=SLOTS + 1))


async def test_an_aborted_request_returns_what_it_has(engine: Engine) -> None:
    long = asyncio.ensure_future(engine.sample(request("long", n=2, max_tokens=300)))
    await until_tokens(engine, 10)
    await engine.abort("long")
    turns = await asyncio.wait_for(long, 30)
    for turn in turns:
        assert turn.finish == "abort"
        assert 0 < len(turn.output_ids) < 300
        assert len(turn.output_ids) == len(turn.logprobs) == len(turn.versions)


async def test_aborting_what_is_not_there_does_nothing(engine: Engine) -> None:
    await engine.abort("nobody")
    assert len(await engine.sample(request("a"))) == 1


async def test_a_cancelled_request_leaves_its_slots(engine: Engine) -> None:
    lost = asyncio.ensure_future(engine.sample(request("lost", n=SLOTS, max_tokens=300)))
    await until_tokens(engine, 10)
    lost.cancel()
    turns = await asyncio.wait_for(engine.sample(request("next", n=SLOTS)), 30)
    assert len(turns) == SLOTS


async def test_a_flip_moves_samples_in_flight_to_the_new_version(engine: Engine) -> None:
    sampling = asyncio.ensure_future(engine.sample(request("a", n=2, max_tokens=300)))
    await until_tokens(engine, 10)
    staged = {name: torch.full_like(live, 0.5) for name, live in engine.weight_targets().items()}
    pause_s = await engine.flip(staged, 7)
    assert pause_s >= 0
    assert engine.version == 7
    for turn in await sampling:
        assert turn.versions[0] == 0
        assert turn.versions[-1] == 7
        assert (np.diff(turn.versions) >= 0).all()
    for name, live in engine.weight_targets().items():
        assert torch.equal(live, staged[name])


async def test_a_flip_that_lacks_a_parameter_is_refused_and_changes_nothing(engine: Engine) -> None:
    before = {name: live.clone() for name, live in engine.weight_targets().items()}
    staged = {name: torch.full_like(live, 9.0) for name, live in before.items()}
    staged.pop(sorted(staged)[-1])
    with pytest.raises(ValueError, match="lacks 1 parameters"):
        await engine.flip(staged, 7)
    assert engine.version == 0
    assert all(torch.equal(live, before[name]) for name, live in engine.weight_targets().items())


async def test_closing_ends_what_is_in_flight(engine: Engine) -> None:
    sampling = asyncio.ensure_future(engine.sample(request("a", max_tokens=390)))
    await until_tokens(engine, 3)
    await engine.close()
    with pytest.raises(RunClosedError):
        await sampling


async def test_all_time_is_accounted_for_and_idle_time_is_a_wait(engine: Engine) -> None:
    engine.stats()
    await engine.sample(request("a"))
    spans = {name for name in engine.stats() if name.startswith("seconds/")}
    assert {"seconds/compute", "seconds/wait/tasks"} <= spans
