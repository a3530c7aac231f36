"""Rollouts of several turns: every token with what it was made with, and nothing said twice or otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_cases import CALL, SAMPLING, TASK, Counting, Speaker, agent, calculating, multiply
from chat_cases import KINDS, tokenizer
from env_cases import Steps
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.schema import Config, ModelConfig
from asyncrl.config.sections.agent import AgentConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.agents.agent import Agent, EnvironmentFailedError
from asyncrl.generator.agents.chat import Message
from asyncrl.generator.agents.env import Action, Environment, Observation, ToolEnvironment
from asyncrl.generator.agents.trajectory import Trajectory
from asyncrl.generator.agents.trajectory_entries import (
    WIDEST,
    ContextEntry,
    PolicyEntry,
    TrajectoryEnd,
    recorded_experts,
)
from asyncrl.generator.engines.engine import PromptTooLongError, SampleRequest, StoppingSampler
from asyncrl.telemetry import tracing
from asyncrl.types import NO_VERSION, Task, Turn

PACKED = Trajectory()
PACKED.add(ContextEntry(np.arange(3), 5))


def text_of(speaker: Speaker, trajectory: Trajectory) -> str:
    return str(speaker.tok.decode(trajectory.context, skip_special_tokens=False))


async def play(made: Agent, trajectory: Trajectory | None = None, **options: Any) -> Trajectory:
    return await made.play(TASK, "r", SAMPLING, trajectory=trajectory, **options)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_is_answered_and_the_answer_ends_the_rollout(kind: str) -> None:
    speaker = Speaker(calculating, tokenizer(kind))
    made = await play(agent(speaker))
    shown = text_of(speaker, made).replace(" ", "")
    assert shown.endswith(
        "<|im_start|>assistant\n"
        + CALL.replace(" ", "")
        + "<|im_end|>\n<|im_start|>user\n<tool_response>\n408\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\ntheansweris408<|im_end|>"
    )
    assert (made.turns, made.ended) == (2, "done")
    rollout = made.rollout({})
    assert (rollout.finish, rollout.reward, rollout.reward_parts) == ("stop", 0.0, {})


async def test_each_request_begins_with_exactly_the_tokens_before_it() -> None:
    speaker = Speaker(calculating)
    made = await play(agent(speaker))
    first, second = speaker.asked
    said = [entry for entry in made.entries if isinstance(entry, PolicyEntry)]
    at = len(first.prompt_ids) + len(said[0].ids)
    assert second.prompt_ids[: len(first.prompt_ids)].tolist() == first.prompt_ids.tolist()
    assert second.prompt_ids[len(first.prompt_ids) : at].tolist() == said[0].ids.tolist()
    again = speaker.tok.encode(CALL, add_special_tokens=False)
    assert again != said[0].ids[:-1].tolist()  # what decoding and encoding would have made of it
    assert made.context.tolist() == [*second.prompt_ids, *said[1].ids]


async def test_only_what_the_policy_said_is_trained_on_with_its_own_versions() -> None:
    speaker = Speaker(calculating, version=7)
    rollout = (await play(agent(speaker))).rollout({})
    said = rollout.loss_mask == 1
    prompt, glue = len(speaker.asked[0].prompt_ids), len(speaker.asked[1].prompt_ids)
    words = [len(CALL) + 1, len("the answer is 408") + 1]
    assert np.flatnonzero(said).tolist() == [
        *range(prompt, prompt + words[0]),
        *range(glue, glue + words[1]),
    ]
    assert rollout.versions[said].tolist() == [7] * words[0] + [8] * words[1]
    assert (rollout.versions[~said] == NO_VERSION).all()
    assert (rollout.logprobs[~said] == 0).all()
    expected = np.concatenate([-np.arange(1, n + 1) / 8 for n in words])
    np.testing.assert_allclose(rollout.logprobs[said], expected)
    assert {len(column) for column in (rollout.token_ids, *rollout.columns.values())} == {len(said)}


async def test_turns_are_steps_with_their_states_and_rewards() -> None:
    speaker = Speaker(lambda so_far: "go")
    made = await play(agent(speaker, lambda: Counting(3)))
    rollout = made.rollout({"alive": 2.0})
    assert rollout.reward_parts == {"alive": 1.5}
    assert rollout.reward == 3.0
    said = rollout.loss_mask == 1
    assert rollout.columns["step"][said].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert (rollout.columns["step"][~said] == -1).all()
    assert (rollout.columns["anchor"][~said] == 0).all()
    assert rollout.columns["step_rewards"][said].tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 1]
    other = (await play(agent(speaker, lambda: Counting(2)))).rollout({})
    mine, its = (r.columns["anchor"][r.loss_mask == 1] for r in (rollout, other))
    assert mine[:6].tolist() == its.tolist()  # the same states
    assert len(set(mine)) == 3


async def test_a_call_that_cannot_be_done_is_answered_and_counted() -> None:
    def clumsy(so_far: str) -> str:
        turns = so_far.count("<tool_response>")
        return ["<tool_call>{a</tool_call>", CALL.replace("34", '"x"'), CALL.replace("mult", "div"), "408"][
            turns
        ]

    speaker = Speaker(clumsy)
    made = agent(speaker)
    shown = text_of(speaker, await play(made))
    for problem in (
        "Error: The tool call is not valid JSON",
        "Error: b: 'x' is not of type 'integer'",
        "Error: There is no",
    ):
        assert problem in shown
    stats = made.stats()
    assert {name: stats[f"agent/{name}"] for name in ("calls", "malformed", "tool_errors", "turns")} == {
        "calls": 3,
        "malformed": 1,
        "tool_errors": 2,
        "turns": 4,
    }
    assert stats["agent/ended/done"] == 1


@pytest.mark.parametrize("interrupt", [(), (len("let me thi"),)], ids=["whole", "interrupted in the text"])
async def test_a_turn_that_a_text_ended_gets_the_token_that_ends_turns_from_the_template(
    interrupt: Sequence[int],
) -> None:
    def policy(so_far: str) -> str:
        return "done. so" if "assistant" in so_far else "let me think. so"

    speaker, spoken = Speaker(policy, interrupt=interrupt), list[str]()

    class Listening(Counting):
        async def step(self, action: Action) -> Observation:
            spoken.append(action.text)
            return await super().step(action)

    stopping = StoppingSampler(speaker, lambda ids: str(speaker.tok.decode(ids, skip_special_tokens=True)))
    player = agent(speaker, lambda: Listening(2), sampler=stopping)
    made = await player.play(TASK, "r", replace(SAMPLING, stop=("think.",)))
    assert text_of(speaker, made).split("<|im_start|>assistant\n")[1:] == [
        "let me think.<|im_end|>\n<|im_start|>user\nturn 1<|im_end|>\n",
        "done. so<|im_end|>",
    ]
    assert spoken == ["let me think.", "done. so"]
    assert made.rollout({}).loss_mask.sum() == len("let me think.") + len("done. so") + 1


async def test_several_calls_of_a_turn_are_answered_in_order() -> None:
    two = CALL + CALL.replace("12", "2")
    speaker = Speaker(lambda so_far: "done" if "<tool_response>" in so_far else two)
    shown = text_of(speaker, await play(agent(speaker)))
    assert "<tool_response>\n408\n</tool_response>\n<tool_response>\n68\n</tool_response><|im_end|>" in shown


@pytest.mark.parametrize(
    ("options", "why", "turns"),
    [
        ({"max_turns": 2}, "max_turns", 2),
        ({"max_tokens": 400}, "total_tokens", 2),  # the second turn is cut
        ({"max_tokens": 300}, "total_tokens", 1),  # no room for what the tool says
        ({"max_length": 230}, "total_tokens", 1),
    ],
)
async def test_limits_end_a_rollout(options: dict[str, Any], why: str, turns: int) -> None:
    speaker = Speaker(lambda so_far: CALL)
    options = {"max_turns": 99, **options}
    made = await play(agent(speaker, **options))
    assert (made.ended, made.turns, made.rollout({}).finish) == (why, turns, "length")
    assert len(speaker.asked) == turns
    assert made.length <= options.get("max_tokens", options.get("max_length", 2000))


async def test_a_turn_that_is_cut_ends_the_rollout() -> None:
    speaker = Speaker(lambda so_far: "x" * 300)
    made = await play(agent(speaker))
    assert (made.ended, made.length - len(speaker.asked[0].prompt_ids)) == (
        "turn_tokens",
        SAMPLING.max_tokens,
    )


@pytest.mark.parametrize(
    ("max_turns", "room", "why", "parts"),
    [
        (2, 500, "max_turns", {"alive": 0.75, "turns": 2.0}),
        (9, 20, "total_tokens", {"alive": 0.75, "turns": 1.0}),  # no room for the second turn
        (9, 5, "total_tokens", {"alive": 0.25, "turns": 0.0}),  # the first turn is cut, and comes to no step
    ],
)
async def test_a_limit_adds_a_reward_to_that_of_the_last_step(
    max_turns: int, room: int, why: str, parts: dict[str, float], tmp_path: Path
) -> None:
    """room: tokens behind the prompt; a turn has 11."""
    speaker = Speaker(lambda so_far: "x" * 10)
    make = partial(Steps, str(tmp_path), at=-1)
    await play(agent(speaker, make, max_turns=1))
    prompt = len(speaker.asked[0].prompt_ids)
    made = await play(agent(speaker, make, max_turns=max_turns, max_tokens=prompt + room))
    assert made.entries[-1] == TrajectoryEnd(why, parts)


async def test_a_prompt_without_room_for_a_turn_is_too_long() -> None:
    speaker = Speaker(calculating)
    with pytest.raises(PromptTooLongError, match="task 3"):
        await play(agent(speaker, max_length=20))


async def test_an_interrupted_turn_goes_on_from_its_tokens() -> None:
    """Aborted twice, once before its first token: the text is that of an undisturbed one, the versions tell."""
    speaker = Speaker(calculating, interrupt=[5, 0, 9])
    made = await play(agent(speaker))
    undisturbed = await play(agent(Speaker(calculating)))
    assert made.context.tolist() == undisturbed.context.tolist()
    assert made.turns == 2
    said = made.rollout({}).loss_mask == 1
    first, second = len(CALL) + 1, len("the answer is 408") + 1
    assert made.rollout({}).versions[said].tolist() == ([0] * 5 + [2] * 9 + [3] * (first - 14) + [4] * second)
    assert made.rollout({}).columns["step"][said].tolist() == [0] * first + [1] * second
    assert [r.sampling.max_tokens for r in speaker.asked] == [200, 195, 195, 186, 200]


async def test_no_two_requests_draw_alike() -> None:
    """Engines draw by (seed, ordinal, index in the request, position in the turn)."""
    speaker = Speaker(calculating)
    made = agent(speaker)
    for sample in range(3):
        await play(made, sample=sample, of=3)
    assert len({request.sampling.seed for request in speaker.asked}) == 6
    assert {request.place for request in speaker.asked} == {9, 10, 11}
    assert len({request.request_id for request in speaker.asked}) == 6
    assert all(0 <= request.sampling.seed < 2**63 for request in speaker.asked)


# ---------------------------------------------------------------------- going on from what is kept


async def kept_after(made: Agent, notes: int) -> bytes:
    """What is left of a rollout that was killed after so many notes."""
    growing, packed = Trajectory(), list[bytes]()
    await play(made, growing, changed=lambda: packed.append(bytes(growing.packed)))
    return packed[notes - 1]


@pytest.mark.parametrize("notes", range(1, 5))
async def test_a_rollout_goes_on_from_its_finished_turns(notes: int) -> None:
    left = await kept_after(agent(Speaker(calculating)), notes)
    speaker = Speaker(calculating, version=10)
    made = agent(speaker)
    whole = await play(made, Trajectory.unpack(left))
    undisturbed = await play(agent(Speaker(calculating)))
    assert whole.context.tolist() == undisturbed.context.tolist()
    assert len(speaker.asked) == {1: 1, 2: 1, 3: 0, 4: 0}[notes]
    versions = whole.rollout({}).versions
    assert set(versions[versions != NO_VERSION]) == ({0, 10} if notes < 3 else {0, 1})
    assert made.stats().get("agent/resumed", 0) == (notes < 4)


class Piecing(Speaker):
    """Gives pieces of 7 and 14 tokens of each turn before it ends."""

    async def sample(self, request: SampleRequest) -> list[Turn]:
        (turn,) = await super().sample(request)
        for size in (7, 14) if request.pieces is not None else ():
            columns = turn.output_ids[:size], turn.logprobs[:size], turn.versions[:size]
            request.pieces.take(0, request.turn(*columns, "abort"))
        return [turn]


async def test_a_turn_that_is_not_over_is_kept_in_pieces() -> None:
    growing, packed = Trajectory(), list[bytes]()
    made = agent(Piecing(calculating))
    made._piece_tokens = 7
    await play(made, growing, grown=lambda every: packed.append(bytes(growing.packed)))
    undisturbed = await play(agent(Speaker(calculating)))
    assert growing.packed == undisturbed.packed
    assert len(packed) == 4
    for left, first, turns in zip(packed, (193, 186, 193, 186), (2, 2, 1, 1), strict=True):
        speaker = Speaker(calculating, version=10)
        whole = await play(agent(speaker), Trajectory.unpack(left))
        assert whole.context.tolist() == undisturbed.context.tolist()
        assert [request.sampling.max_tokens for request in speaker.asked] == [first, 200][:turns]


async def test_nobody_is_asked_for_pieces_that_nobody_keeps() -> None:
    speaker = Piecing(calculating)
    made = agent(speaker)
    made._piece_tokens = 7
    await play(made)
    assert [request.pieces for request in speaker.asked] == [None, None]


@pytest.mark.parametrize("drift", [False, True])
async def test_an_environment_with_a_state_is_taken_through_the_turns_again(drift: bool) -> None:
    left = await kept_after(agent(Speaker(lambda so_far: "go"), lambda: Counting(3, drift)), 4)
    speaker = Speaker(lambda so_far: "go", version=10)
    made = agent(speaker, lambda: Counting(3, drift))
    whole = (await play(made, Trajectory.unpack(left))).rollout({})
    assert whole.reward_parts == {"alive": 1.5}
    said = whole.versions[whole.loss_mask == 1].tolist()
    if drift:  # it says something else: what was kept cannot be gone on with
        assert said == [10] * 3 + [11] * 3 + [12] * 3
        assert made.stats()["agent/diverged"] == 1
    else:
        assert said == [0] * 3 + [1] * 3 + [10] * 3
        assert made.stats()["agent/resumed"] == 1


async def test_a_kept_rollout_of_another_prompt_begins_anew() -> None:
    left = Trajectory.unpack(await kept_after(agent(Speaker(calculating)), 2))
    speaker = Speaker(calculating)
    made = agent(speaker)
    whole = await made.play(Task(3, "another prompt"), "r", SAMPLING, trajectory=left)
    assert "another prompt" in text_of(speaker, whole)
    assert "the product of" not in text_of(speaker, whole)


entries = st.lists(
    st.one_of(
        st.builds(
            ContextEntry,
            st.lists(st.integers(0, 2**40), max_size=4).map(lambda i: np.array(i, np.int64)),
            st.integers(-(2**63), 2**63 - 1),
            st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=2),
            st.none() | st.integers(0, 3),
        ),
        st.integers(0, 4).flatmap(
            lambda n: st.builds(
                PolicyEntry,
                st.just(np.arange(n)),
                st.just(np.linspace(-1, 0, n, dtype=np.float32)),
                st.just(np.full(n, 3, np.int32)),
                st.sampled_from(["stop", "length", "abort"]),
            )
        ),
        st.builds(TrajectoryEnd, st.sampled_from(["done", "max_turns"]), st.just({"right": 1.0})),
    ),
    max_size=6,
)


@settings(max_examples=50)
@given(entries)
def test_bytes_hold_all_of_a_trajectory(of: list[Any]) -> None:
    made = Trajectory()
    for entry in of:
        made.add(entry)
    again = Trajectory.unpack(bytes(made.packed))
    assert again.packed == made.packed
    assert (again.length, again.turns, again.ended) == (made.length, made.turns, made.ended)
    assert [type(entry) for entry in again.entries] == [type(entry) for entry in of]
    assert [len(segment.ids) for segment in again.segments()] == [
        len(segment.ids) for segment in made.segments()
    ]


@pytest.mark.parametrize(
    "packed", [b"\x91\xa4what", b"\xc1", b"\x00", b"\x91\xa4said", bytes(PACKED.packed[:-1])]
)
def test_bytes_that_are_no_trajectory_are_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match="no trajectory"):
        Trajectory.unpack(packed)


def with_experts(*shapes: tuple[int, int]) -> bytes:
    """A context of 3 tokens, and turns of 2 tokens that have experts of these shapes."""
    made = Trajectory()
    made.add(ContextEntry(np.arange(3), 0))
    for shape in shapes:
        logprobs, versions = np.zeros(2, np.float32), np.zeros(2, np.int32)
        made.add(PolicyEntry(np.arange(2), logprobs, versions, "stop", np.ones(shape, np.int16)))
    return bytes(made.packed)


def test_experts_of_its_own_tokens_are_read() -> None:
    experts = recorded_experts(Trajectory.unpack(with_experts((5, 4), (3, 4))).segments())
    assert experts is not None
    assert experts.shape == (7, 4)


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param([(0, 1 << 40)], id="a width without a row"),
        pytest.param([(5, WIDEST + 1)], id="too wide"),
        pytest.param([(1, 4)], id="fewer rows than tokens"),
        pytest.param([(6, 4)], id="more rows than tokens"),
        pytest.param([(5, 4), (3, 1)], id="two widths"),
    ],
)
def test_experts_of_other_tokens_are_refused(shapes: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"no trajectory: .* experts of "):
        Trajectory.unpack(with_experts(*shapes))


# ---------------------------------------------------------------------- environments


class Broken(Environment):
    closed = 0

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how

    async def reset(self, task: Task) -> Sequence[Message]:
        return [{"role": "user", "content": "go"}]

    async def step(self, action: Action) -> Observation:
        if self._how == "raises":
            raise KeyError("no such room")
        if self._how == "hangs":
            await asyncio.Event().wait()
        if self._how == "mute":
            return Observation([{"role": "user"}])
        if self._how == "text":
            return Observation(reward="1.5")  # type: ignore[arg-type]
        return Observation(reward=float("nan"))

    async def close(self) -> None:
        Broken.closed += 1


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raises", "step of task 3's environment raised KeyError: 'no such room'"),
        ("hangs", r"step of task 3's environment took longer than agent.deadline_s=0.01"),
        ("nan", "raised ValueError: its reward 'steps' is nan, not a finite number"),
        ("text", "raised TypeError: str is no number"),
        ("mute", "raised KeyError|raised UndefinedError|raised TypeError"),
    ],
)
async def test_an_environment_that_fails_says_how_and_is_closed(how: str, why: str) -> None:
    Broken.closed = 0
    with pytest.raises(EnvironmentFailedError, match=why):
        await play(
            agent(Speaker(lambda so_far: "go"), lambda: Broken(how), deadline_s=0.01, environment_retries=0)
        )
    assert Broken.closed == 1


async def test_methods_are_tools_with_a_state() -> None:
    class Purse(ToolEnvironment):
        def __init__(self) -> None:
            super().__init__([self.take])
            self._left = 10

        async def reset(self, task: Task) -> Sequence[Message]:
            self._left = 10
            return await super().reset(task)

        def take(self, coins: int) -> str:
            """Take coins.

            Args:
                coins: how many
            """
            self._left -= coins
            return f"left: {self._left}"

    take = '<tool_call>{"name": "take", "arguments": {"coins": 3}}</tool_call>'
    speaker = Speaker(lambda so_far: "all" if "left: 4" in so_far else take)
    made = agent(speaker, Purse)
    assert not Purse().stateless
    assert ToolEnvironment([multiply]).stateless
    assert text_of(speaker, await play(made)).count("left: ") == 2
    assert text_of(speaker, await play(made)).count("left: ") == 2  # a new one for each rollout


# ---------------------------------------------------------------------- configuration


def config(**chosen: Any) -> Config:
    return Config(model=ModelConfig(path="unused"), agent=AgentConfig(**chosen))


def test_without_tools_and_environment_there_is_no_agent() -> None:
    assert Agent.from_config(Speaker(calculating), tokenizer("bytes", None), config()) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"tools": ["agent_cases:nothing"]}, "^agent.tools = .*has no function 'nothing'"),
        (
            {"environment": "agent_cases:Speaker"},
            "^agent.environment = .* is no asyncrl.generator.agents.env.Environment",
        ),
        (
            {"environment": "agent_cases:Counting", "options": {"rounds": 2}},
            "^agent.options = .* takes turns, drift",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_at_the_start(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Agent.from_config(Speaker(calculating), tokenizer("bytes"), config(**chosen))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chosen", "key"),
    [
        ({"tools": ["a:b"], "environment": "c:d"}, "agent.tools"),
        ({"tools": ["a:b"], "tool_deadline_s": 200.0}, "agent.tool_deadline_s"),
        ({"max_turns": 0}, "agent.max_turns"),
        ({"max_tokens": 5000}, "agent.max_tokens"),
    ],
)
def test_settings_that_do_not_fit_are_refused(chosen: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**chosen)
    assert caught.value.key == key


async def test_turns_steps_and_tools_are_spans_of_the_trace(trace: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(tracing, "RESOLUTION_S", 0.0)
    await play(agent(Speaker(calculating)))
    lanes = trace().lanes
    about = [{"task": TASK.ordinal, "sample": 0, "turn": turn} for turn in (0, 1)]
    assert [(span.name, span.about) for span in lanes["turns"].spans] == [("turn", each) for each in about]
    assert [span.name for span in lanes["environments"].spans] == ["making", "reset", "step", "step", "close"]
    (tool,) = lanes["tools"].spans
    step = lanes["environments"].spans[2]
    assert tool.name == "multiply"
    assert step.start <= tool.start <= tool.end <= step.end
