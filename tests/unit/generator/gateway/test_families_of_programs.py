"""Programs get the calls of each family's chat template as calls of their API, with `agent.tool_format=auto`."""

from __future__ import annotations

from typing import Any

import pytest
from agent_cases import Speaker
from gateway_cases import harness, played
from missing import needs_vllm
from template_cases import FAMILIES, SAYING, family_tokenizer
from test_gateway import using_the_tool

from asyncrl.generator.agents import call_parsers
from asyncrl.generator.agents.chat import Chat
from asyncrl.types import Task

READ_BY_OURS = ("gpt_oss", "llama3_1", "qwen3")
THOUGHTS = {
    "gpt_oss": "<|channel|>analysis<|message|>multiply<|end|><|start|>assistant",
    "qwen3": "<think>multiply</think>",
}


async def calls_of_programs(family: str, broken: bool = False) -> None:
    tok = family_tokenizer(family)
    call = Chat(tok).turn_with_call("multiply", {"a": 12, "b": 34})
    turns = [THOUGHTS.get(family, "") + call, SAYING.get(family, "") + "the answer is 408"]
    if broken:
        turns = [turns[0].replace("34}", "34")]
    left, seen = list(turns), list[dict[str, float]]()
    talker = Speaker(lambda so_far: left.pop(0), tok=tok)

    async def run(url: str, key: str, task: Task) -> dict[str, float]:
        seen.append(await using_the_tool(url, key, task))
        return seen[0]

    made: Any = harness(talker, run, tool_format="auto")
    record = await played(made)
    assert seen == [{"right": float(not broken)}]
    assert (made.stats()["agent/turns"], made.stats().get("agent/malformed", 0)) == (len(turns), int(broken))
    rollout = record.rollout({})
    assert "segment" not in rollout.columns
    first, last = talker.asked[0], talker.asked[-1]
    assert last.prompt_ids[: len(first.prompt_ids)].tolist() == first.prompt_ids.tolist()
    assert rollout.token_ids[: len(last.prompt_ids)].tolist() == last.prompt_ids.tolist()


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "broken"])
@pytest.mark.parametrize("family", READ_BY_OURS)
async def test_a_program_gets_the_calls_that_ours_read(
    family: str, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a call that cannot be read is text."""
    monkeypatch.setattr(call_parsers, "find_spec", lambda name: None)
    await calls_of_programs(family, broken)


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in READ_BY_OURS])
async def test_a_program_gets_the_calls_that_the_parsers_of_vllm_read(family: str) -> None:
    await calls_of_programs(family)
