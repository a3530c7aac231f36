"""Answers that are kept while they are made, and that another generator goes on from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from generator_cases import Letters
from transformers import AutoModelForCausalLM, Qwen2Config

from asyncrl.config.schema import BatchConfig, Config, GeneratorConfig, RewardConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.errors import RefusedError
from asyncrl.generator.agents.task_progress import Keep, TaskProgress
from asyncrl.generator.agents.trajectory import Trajectory
from asyncrl.generator.agents.trajectory_entries import ContextEntry, PolicyEntry
from asyncrl.generator.engines.engine import Engine, SampleRequest
from asyncrl.generator.engines.transformers.kv_cache import ATTENTION
from asyncrl.generator.engines.transformers.transformers_engine import TransformersEngine
from asyncrl.generator.long_answers import LongAnswers
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.types import Prompt, Sampling, Task, Turn

TASK = Task(3, "?", {})
PROMPT = np.array([1, 2, 3])
SAMPLING = Sampling(max_tokens=100, seed=1)
GREEDY = Sampling(temperature=0.0, max_tokens=100, seed=1)
EVERY, MAX_LENGTH = 16, 200


class Sent:
    """The messages of a task's progress."""

    def __init__(self) -> None:
        self.messages: list[list[bytes]] = []

    async def __call__(self, frames: Sequence[bytes]) -> None:
        self.messages.append(list(frames))

    def lengths(self) -> list[list[int]]:
        return [[len(Trajectory.unpack(one).last_words) for one in message[1:]] for message in self.messages]


async def sampled(engine: Engine, kept: Sequence[bytes], sent: Sent, greedy: int = 0) -> list[Turn]:
    answers = LongAnswers(engine, EVERY, MAX_LENGTH)
    samplings = [(SAMPLING, 2), *[(GREEDY, 1)] * greedy]
    with TaskProgress(2 + greedy, kept, Keep(sent)) as progress:
        return await answers.sample(TASK, "r", Prompt(PROMPT), samplings, progress)


def bits(turn: Turn) -> tuple[Any, ...]:
    arrays = turn.prompt_ids, turn.output_ids, turn.logprobs, turn.versions
    return (*(array.tobytes() for array in arrays), turn.finish)


@pytest.mark.parametrize("fixed_shape", [False, True], ids=["compact", "fixed shape"])
async def test_whoever_goes_on_from_any_message_makes_the_answers_of_an_undisturbed_run(
    fixed_shape: bool,
) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    engine = TransformersEngine(
        model, slots=4, max_length=MAX_LENGTH, end_ids=(), version=0, fixed_shape=fixed_shape
    )
    await engine.start()
    sent = Sent()
    plain = await engine.sample(SampleRequest("p", PROMPT, SAMPLING, TASK.ordinal, 2))
    whole = await sampled(engine, (), sent, greedy=1)
    for mine, alone in zip(whole[:2], plain, strict=True):
        assert mine.output_ids.tolist() == alone.output_ids.tolist()
        assert not fixed_shape or bits(mine) == bits(alone)
    assert len(sent.messages) >= 3
    for message in sent.messages:
        again = await sampled(engine, message, Sent(), greedy=1)
        for frame, first, second in zip(message[1:], whole, again, strict=True):
            kept = Trajectory.unpack(frame).last_words
            assert second.output_ids[: len(kept)].tobytes() == kept.tobytes()
            assert second.logprobs[: len(kept)].tobytes() == first.logprobs[: len(kept)].tobytes()
            assert second.output_ids.tolist() == first.output_ids.tolist()
            np.testing.assert_allclose(second.logprobs, first.logprobs, atol=2e-5)
            assert not fixed_shape or bits(second) == bits(first)
    await engine.close()


class Pieceworker:
    """Gives the pieces of each sample one after another: `sizes` of sample 0, then of sample 1, and so on."""

    def __init__(self, *sizes: Sequence[int]) -> None:
        self.sizes, self.asked = sizes, list[SampleRequest]()

    async def sample(self, request: SampleRequest) -> list[Turn]:
        self.asked.append(request)
        assert request.pieces is not None
        for sample in range(request.n):
            for size in self.sizes[request.first + sample]:
                request.pieces.take(sample, self._turn(request, size, "abort"))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        return [self._turn(request, 100 - request.made, "length") for _ in range(request.n)]

    def _turn(self, request: SampleRequest, size: int, finish: Any) -> Turn:
        ids = np.arange(request.made, request.made + size)
        return request.turn(ids, np.full(size, -0.5), np.full(size, request.made // 10), finish)


async def test_tokens_keep_the_versions_that_they_were_recorded_with() -> None:
    first, second, sent = Pieceworker([16, 32], [16]), Pieceworker([], []), Sent()
    await sampled(first, (), sent)  # type: ignore[arg-type]
    turns = await sampled(second, sent.messages[-1], Sent())  # type: ignore[arg-type]
    made = sent.lengths()[-1]
    assert [(one.first, one.made, one.sampling.max_tokens, one.place) for one in second.asked] == [
        (0, made[0], 100 - made[0], 2 * TASK.ordinal),
        (1, made[1], 100 - made[1], 2 * TASK.ordinal + 1),
    ]
    for turn, size in zip(turns, made, strict=True):
        assert turn.output_ids.tolist() == list(range(100))
        assert turn.versions.tolist() == [0] * size + [size // 10] * (100 - size)
        assert turn.prompt_ids.tolist() == [1, 2, 3]


async def test_a_message_goes_once_as_much_is_new_as_all_that_are_under_way_make_in_so_many_steps() -> None:
    """One answer of 16 goes at once; then two are under way, and 32 new tokens make a message."""
    sent = Sent()
    await sampled(Pieceworker([16, 32], [16, 32, 48]), (), sent)  # type: ignore[arg-type]
    assert sent.lengths() == [[16, 0], [32, 0], [32, 32]]


async def test_answers_shorter_than_a_piece_are_never_sent() -> None:
    sent = Sent()
    await sampled(Pieceworker([], []), (), sent)  # type: ignore[arg-type]
    assert sent.messages == []


async def test_an_answer_that_had_ended_is_not_made_again_and_a_full_one_ends() -> None:
    progress = TaskProgress(2)
    engine = Pieceworker([], [])
    await LongAnswers(engine, EVERY, MAX_LENGTH).sample(TASK, "r", Prompt(PROMPT), [(SAMPLING, 2)], progress)
    progress.trajectories[1].keep_first(1)
    full = np.arange(100)
    progress.trajectories[1].add(PolicyEntry(full, -full.astype(np.float32), full.astype(np.int32), "abort"))
    again = Pieceworker()
    turns = await sampled(again, progress.frames(), Sent())  # type: ignore[arg-type]
    assert again.asked == []
    assert [(len(turn.output_ids), turn.finish) for turn in turns] == [(100, "length")] * 2


async def test_progress_of_another_prompt_or_of_several_turns_begins_anew() -> None:
    progress = TaskProgress(2)
    answers = LongAnswers(Pieceworker([], []), EVERY, MAX_LENGTH)
    await answers.sample(TASK, "r", Prompt(PROMPT[:2]), [(SAMPLING, 2)], progress)
    again = Pieceworker([], [])
    await sampled(again, progress.frames(), Sent())  # type: ignore[arg-type]
    assert [(one.n, one.made) for one in again.asked] == [(2, 0)]


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions"),
    [
        ([16], [-1.0], [0]),
        ([-1], [-1.0], [0]),
        ([5], [np.nan], [0]),
        ([5], [-np.inf], [0]),
        ([5], [1.0], [0]),
        ([5], [-1.0], [-1]),
        ([5, 6], [-1.0], [0]),
    ],
)
def test_progress_that_no_engine_makes_is_not_gone_on_with(ids: Any, logprobs: Any, versions: Any) -> None:
    """It would end the engine of each generator that gets it, one after another."""
    progress = TaskProgress(1)
    progress.trajectories[0].add(ContextEntry(PROMPT, 0))
    made = np.array(ids), np.array(logprobs, np.float32), np.array(versions, np.int32)
    progress.trajectories[0].add(PolicyEntry(*made, "abort"))
    assert TaskProgress(1, progress.frames(), vocabulary=16).trajectories[0].entries == []
    whole = TaskProgress(1)
    whole.trajectories[0].add(ContextEntry(PROMPT, 0))
    assert TaskProgress(1, whole.frames(), vocabulary=16).trajectories[0].length == 3


@pytest.mark.parametrize("every", [0, EVERY])
async def test_the_key_turns_it_off(every: int) -> None:
    asked: list[SampleRequest] = []

    class Spy:
        async def sample(self, request: SampleRequest) -> list[Turn]:
            asked.append(request)
            return [request.turn([65], [-0.5], [0], "stop")] * request.n

    config = Config(
        batch=BatchConfig(group_size=2),
        generator=GeneratorConfig(progress_tokens=every),
        reward=RewardConfig(function="unused:unused"),
        algorithm=AlgorithmConfig(advantage="remax"),
    )
    scorer: Any = Scorer({}, config.reward)
    tokenizer: Any = Letters()
    made = await Rollouts(Spy(), tokenizer, scorer, config).sample(TASK, "r", (), Sent())
    assert len(made.played) == 2
    assert made.greedy is not None
    assert [(one.request_id, one.n, one.pieces is not None) for one in asked] == [
        ("r", 2, every > 0),
        ("r/greedy", 1, every > 0),
    ]


async def test_a_queue_that_is_full_ends_the_messages_and_not_the_answers() -> None:
    messages = 0

    async def refuse(frames: Sequence[bytes]) -> None:
        nonlocal messages
        messages += 1
        raise RefusedError("full")

    progress = TaskProgress(2, (), Keep(refuse))
    answers = LongAnswers(Pieceworker([16, 32, 48], [16, 32, 48]), EVERY, MAX_LENGTH)
    turns = await answers.sample(TASK, "r", Prompt(PROMPT), [(SAMPLING, 2)], progress)
    assert [len(turn.output_ids) for turn in turns] == [100, 100]
    assert messages == 1
