"""Examples of supervised training: targets, and turns in the environment of the run."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import Any

import pytest
from agent_cases import CALL
from chat_cases import tokenizer

from asyncrl.config.schema import Config
from asyncrl.config.sections.agent import AgentConfig
from asyncrl.config.sections.generator import GeneratorConfig
from asyncrl.errors import TaskError
from asyncrl.models.prompts import ImageReader
from asyncrl.offline.examples import Demonstration, Examples, demonstrations, one_by_one
from asyncrl.types import Task

PATIENCE_S = 60.0

CONFIG = Config(agent=AgentConfig(tools=["agent_cases:multiply"]))


def task(target: Any) -> Task:
    return Task(0, "12 times 34", {"target": target})


def test_a_target_follows_its_prompt_and_ends() -> None:
    tok = tokenizer("merges")
    rollout = Examples(tok, ImageReader(CONFIG.model), CONFIG).demonstrated(task("408"))
    prompt = tok.encode("12 times 34", add_special_tokens=False)
    assert rollout.token_ids.tolist() == [*prompt, *tok.encode("408"), tok.eos_token_id]
    assert rollout.loss_mask.tolist() == [0] * len(prompt) + [1] * (len(rollout.token_ids) - len(prompt))


def test_errors_name_the_place_of_the_row() -> None:
    def make(task: Task) -> Any:
        raise TaskError("is bad")

    with pytest.raises(TaskError, match=r"^rows\.jsonl:8: is bad"):
        one_by_one(make, lambda ordinal: f"rows.jsonl:{ordinal + 1}")([Task(7, "a")])


async def test_each_turn_says_its_target_and_tools_answer_themselves() -> None:
    tok = tokenizer("merges")
    rollout = await Demonstration(tok, CONFIG).rollout(task([CALL, "408"]))
    said = tok.decode(rollout.token_ids[rollout.loss_mask == 1])
    assert said == f"{CALL}<|im_end|>408<|im_end|>"
    assert "<tool_response>\n408\n</tool_response>" in tok.decode(rollout.token_ids[rollout.loss_mask == 0])


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("408", "has no list of texts under 'target'"),
        ([CALL, 408], "has no list of texts"),
        (["408", "and more"], "was over before its last 1 targets"),
        ([CALL], "goes on after its last target"),
    ],
)
async def test_targets_that_do_not_fit_are_refused(target: Any, problem: str) -> None:
    with pytest.raises(TaskError, match=f"task 0 {problem}"):
        await Demonstration(tokenizer("merges"), CONFIG).rollout(task(target))


def test_the_processes_of_environments_end_with_the_examples(tmp_path: Path) -> None:
    options = {"folder": str(tmp_path), "at": -1}
    agent = AgentConfig(environment="env_cases:Steps", environment_processes=1, options=options)
    config = Config(agent=agent, generator=GeneratorConfig(max_length=2000))
    with demonstrations(tokenizer("merges"), config) as make:
        make([task(["one", "two", "three"])])
        (mark,) = tmp_path.glob("process*")
        child = os.pidfd_open(int(mark.name.removeprefix("process")))
    assert select.select([child], [], [], PATIENCE_S)[0], "it lives on"
