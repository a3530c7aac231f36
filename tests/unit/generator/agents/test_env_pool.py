"""Environments in processes of their own: the same rollouts, whatever becomes of a process."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from agent_cases import SAMPLING, Speaker
from chat_cases import tokenizer
from env_cases import Echo

from asyncrl.config.schema import Config, GeneratorConfig, ModelConfig
from asyncrl.config.sections.agent import AgentConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.agents import agent as agent_module
from asyncrl.generator.agents.agent import Agent, EnvironmentFailedError, check_agent
from asyncrl.generator.agents.chat import Chat
from asyncrl.generator.agents.env import Action
from asyncrl.generator.agents.env_child import LARGEST_ANSWER
from asyncrl.generator.agents.env_pool import EnvironmentPool, RaisedError
from asyncrl.generator.agents.tool_formats import BadCall, ToolCall
from asyncrl.generator.agents.trajectory import Trajectory
from asyncrl.generator.agents.trajectory_entries import TrajectoryEnd
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.types import Task, Turn

STEPS = "env_cases:Steps"
PATIENCE_S = 60.0


def turn(so_far: str) -> str:
    return f"go {so_far.count('<|im_start|>assistant')}"


def config_of(**chosen: Any) -> Config:
    agent = AgentConfig(**{"environment": STEPS, "environment_processes": 1, **chosen})
    return Config(model=ModelConfig(path="x"), agent=agent, generator=GeneratorConfig(max_length=2000))


@asynccontextmanager
async def playing(folder: Path, processes: int = 1, **chosen: Any) -> AsyncIterator[Agent]:
    options = {"folder": str(folder), **chosen.pop("options", {})}
    config = config_of(options=options, environment_processes=processes, **chosen)
    speaker = Speaker(turn, newer=0)
    agent = Agent.from_config(speaker, speaker.tok, config)
    assert agent is not None
    try:
        yield agent
    finally:
        await agent.close()


async def played(agent: Agent, *ordinals: int) -> list[Trajectory]:
    return await asyncio.gather(*(agent.play(Task(o, "x"), f"r{o}", SAMPLING) for o in ordinals))


@pytest.mark.parametrize(
    ("how", "deadline_s", "close_s", "restarts"),
    [
        ("sleeps", 1.0, 0.2, range(1, 9)),
        pytest.param("exits", PATIENCE_S, PATIENCE_S, [1], marks=pytest.mark.slow),
        pytest.param("waits", 1.0, PATIENCE_S, [0], marks=pytest.mark.slow),
        pytest.param("raises", PATIENCE_S, PATIENCE_S, [0], marks=pytest.mark.slow),
    ],
)
async def test_rollouts_go_on_in_new_environments(
    how: str,
    deadline_s: float,
    close_s: float,
    restarts: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of the environment that fails, and those whose environments its process held."""
    monkeypatch.setattr(agent_module, "CLOSE_S", close_s)
    async with playing(tmp_path, 0, options={"at": -1}) as agent:
        undisturbed = [bytes(one.packed) for one in await played(agent, 0, 1, 2)]
    async with playing(tmp_path, options={"how": how}, deadline_s=deadline_s, environment_retries=9) as agent:
        rollouts = await played(agent, 0, 1, 2)
        stats = agent.stats()
    assert [bytes(one.packed) for one in rollouts] == undisturbed
    assert stats["agent/environment_restarts"] in restarts
    assert stats["agent/environment_retries"] >= 1
    assert (stats["agent/rollouts"], stats.get("agent/diverged")) == (3, None)


@pytest.mark.parametrize("processes", [0, 1])
async def test_after_its_retries_a_rollout_fails(processes: int, tmp_path: Path) -> None:
    options = {"how": "raises", "times": 3}
    async with playing(tmp_path, processes, options=options, environment_retries=2) as agent:
        why = "step of task 0's environment raised KeyError: 'no such room'"
        with pytest.raises(EnvironmentFailedError, match=why):
            await played(agent, 0)
        assert agent.stats()["agent/environment_retries"] == 2
        (whole,) = await played(agent, 0)
    assert (whole.ended, whole.rollout({}).reward) == ("done", 1.5)


@pytest.mark.parametrize("processes", [0, 1])
async def test_a_limit_ends_a_rollout_with_the_environments_last_reward(
    processes: int, tmp_path: Path
) -> None:
    async with playing(tmp_path, processes, options={"at": -1}, max_turns=2) as agent:
        (cut,) = await played(agent, 0)
    assert cut.entries[-1] == TrajectoryEnd("max_turns", {"alive": 0.75, "turns": 2.0})


async def test_a_lost_environment_is_no_failure_of_its_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with playing(tmp_path, options={"at": -1}, environment_retries=0) as agent:
        sample, turns = agent._engine.sample, []

        async def killing(request: SampleRequest) -> list[Turn]:
            """Each turn is made while no call is under way, and the process ends meanwhile."""
            (process,) = [slot.process for slot in agent._environments._slots]
            if len(turns) < 3:
                process.kill()
            turns.append(request)
            return await sample(request)

        monkeypatch.setattr(agent._engine, "sample", killing)
        (whole,) = await played(agent, 0)
    assert (whole.turns, whole.ended, len(turns)) == (3, "done", 3)


async def test_an_answer_that_is_too_large_or_none_fails_its_call_at_once() -> None:
    pool = EnvironmentPool("env_cases:Flood", {}, 1, None)
    try:
        environment = await pool.make()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(RaisedError, match=f"{LARGEST_ANSWER} are allowed"):
                await environment.step(Action(str(LARGEST_ANSWER)))
            with pytest.raises(RaisedError, match="ended its process"):
                await environment.step(Action("0"))
    finally:
        pool.close()


async def test_calls_and_data_arrive_as_a_model_writes_them() -> None:
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    calls = (ToolCall("a\ud800", {"n": 10**30, "s": "\udfff"}), BadCall("no"), ToolCall("deep", {"x": deep}))
    pool = EnvironmentPool("env_cases:Echo", {}, 1, None)
    try:
        environment = await pool.make()
        (opening,) = await environment.reset(Task(0, "x", {"b": b"\xff"}))
        observed = await environment.step(Action("text", calls))
    finally:
        pool.close()
    assert opening["content"] == "{'b': b'\\xff'}"
    same = await Echo().step(
        Action("text", (*calls[:2], BadCall("The arguments of deep are nested too deeply.")))
    )
    assert observed.messages == same.messages


PARENT = """
import asyncio, sys
from asyncrl.generator.agents.env_pool import EnvironmentPool
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.types import Task, Turn

async def main():
    environment = await EnvironmentPool("env_cases:Steps", {"folder": sys.argv[1]}, 1, None).make()
    await environment.reset(Task(0, "x"))
    print("up", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_killed_generator_takes_its_processes_along(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        (mark,) = tmp_path.glob("process*")
        child = os.pidfd_open(int(mark.name.removeprefix("process")))
        parent.send_signal(signal.SIGKILL)
    assert select.select([child], [], [], PATIENCE_S)[0], "it lives on without its generator"
    os.close(child)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            {"environment_python": "/no/such/python"},
            "^agent.environment_python = '/no/such/python': no process",
        ),
        pytest.param(
            {"environment_python": sys.executable, "options": {"rounds": 1}},
            "^agent.options = .*takes folder, how, at, times",
            marks=pytest.mark.slow,
        ),
        ({"environment": None}, "^agent.environment_processes = 1: .* Remedy: set agent.environment"),
        (
            {"environment_processes": 0, "environment_python": "python"},
            "^agent.environment_python = 'python': .* Remedy: set agent.environment_processes=4",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(
    chosen: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    with pytest.raises(ConfigError, match=message):
        check_agent(Chat(tokenizer("bytes")), config_of(**chosen).agent)
