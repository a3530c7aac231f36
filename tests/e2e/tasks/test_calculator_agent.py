"""A model learns to call a tool, which asyncrl calls, or a program: by OpenAI's client, its Agents SDK, or curl."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import asyncrl
from asyncrl.config.functions.function_spec import load_function

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
OPENAI = "examples/openai_agent.yaml"
VERSIONS = {"asyncrl": 50, "openai": 6, "openai-agents": 6, "curl": 6}
"""The one with 50 learns; the others show that their conversations are trained on."""

PLAYERS = {
    "asyncrl": ["examples/calculator_agent.yaml"],
    "openai": [OPENAI],
    "openai-agents": [OPENAI, f"agent.function={ROOT}/tests/e2e/sdk_agent.py:run"],
    "curl": [OPENAI, "agent.function=null", f"agent.program=bash {ROOT}/tests/data/gateway/calculator.sh"],
}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that has seen some conversations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        warm_up = load_function("examples/calculator_agent.py:warm_up", "example")
        return Path(warm_up([f"run.dir={tmp_path_factory.mktemp('calculator')}"]))


@pytest.mark.parametrize("player", PLAYERS)
def test_an_agent_learns_to_use_its_tool(
    player: str, warm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config, *words = PLAYERS[player]
    ours = [f"model.path={warm}", f"run.dir={tmp_path}", "run.name=it", f"run.versions={VERSIONS[player]}"]
    summary = asyncrl.train(config, [*ours, *words])
    start, end = summary["heldout_accuracy_start"], summary["heldout_accuracy_end"]
    assert start < 0.6  # the warm-up ends at the first look that finds a fifth
    assert end > start + 0.12 or VERSIONS[player] < 50
    rows = [json.loads(line) for line in (tmp_path / "it" / "metrics.jsonl").read_text().splitlines()]
    told = [row for row in rows if "rollout/agent/rollouts" in row][-1]
    assert told["rollout/agent/rollouts"] >= VERSIONS[player] * 16 * 8
    assert told["rollout/agent/turns"] > told["rollout/agent/rollouts"]
    if player == "asyncrl":
        assert told["rollout/agent/calls"] > told["rollout/agent/malformed"]
    else:
        assert told["rollout/agent/segments"] == told["rollout/agent/rollouts"]
