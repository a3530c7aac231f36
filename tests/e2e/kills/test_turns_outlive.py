"""A generator is killed in the middle of rollouts of several turns; another one goes on from their finished turns."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import own_functions
import pytest
from processes import queue_address, rows, runs, started, succeeded, until

from asyncrl.config.functions.function_spec import load_function

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

CONFIG = """
run: {{name: it, dir: {folder}, versions: 2, seed: 3}}
model: {{path: {folder}/model}}
tasks: {{source: "{own}:squares"}}
reward: {{function: "asyncrl.generator.agents.env:of_the_environment"}}
agent: {agent}
batch: {{groups: 2, group_size: 2}}
generator: {{slots: 16, max_tokens: 300, max_length: 1000, threads: 1, heartbeat_s: 0.2}}
queue: {{max_staleness: 0, lease_s: 4}}
learner: {{threads: 1, micro_batch_tokens: 4000, groups_deadline_s: 90}}
"""


PROGRAM = f"bash {ROOT}/tests/data/gateway/three_turns.sh"


SHORTENING = """\
{%- for message in messages %}{{- '<|' + message.role + '|>' }}
{{- message.content[-2:] + '<|end|>' if message.role == 'assistant' else message.content }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
"""A template that leaves two letters of an earlier turn, as others drop its thoughts."""


@pytest.mark.parametrize("played", ["environment", "program", "as_template"])
def test_finished_turns_outlive_the_generator_that_made_them(tmp_path: Path, played: str) -> None:
    """Also where each turn reads a prompt of its own, and engine and learner agree on log-probs (or the run ends)."""
    environment = {
        "environment": f"{own_functions.__file__}:ThreeTurns",
        "options": {"folder": str(tmp_path)},
    }
    agent = {"program": f"{PROGRAM} {tmp_path}"} if played == "program" else environment
    load_function(f"{ROOT}/examples/calculator_agent.py:write_model_folder", "example")(tmp_path / "model")
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(folder=tmp_path, own=own_functions.__file__, agent=json.dumps(agent)))
    words = [str(config)]
    if played == "as_template":
        (tmp_path / "shortening.jinja").write_text(SHORTENING)
        words += ["agent.history_thoughts=as_template", f"tasks.chat_template={tmp_path}/shortening.jinja"]
    run = tmp_path / "it"

    def told() -> list[dict[str, Any]]:
        path = tmp_path / "said"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def lines(pid: int, turns: int) -> list[tuple[int, tuple[str, ...]]]:
        """(ordinal, the texts of the turns) of each rollout that was said so far in this process."""
        return [
            (e["ordinal"], tuple(e["said"])) for e in told() if e["pid"] == pid and len(e["said"]) == turns
        ]

    with started("asyncrl", "queue", *words) as queue:
        address = queue_address(run, queue)
        with started("asyncrl", "learner", *words, address) as learner:
            with started("asyncrl", "generator", *words, address, "--name", "first") as first:
                until(lambda: len(lines(first.pid, 2)) == 4, "second turns", queue, learner, first)
                first.send_signal(signal.SIGKILL)
            until(
                lambda: not any(runs(e["program"]) for e in told() if "program" in e),
                "programs that end",
                queue,
            )
            (tmp_path / "gate").touch()
            with started("asyncrl", "generator", *words, address, "--name", "second") as second:
                succeeded(learner)
                succeeded(second)
        succeeded(queue)
    begun, ended = lines(first.pid, 2), lines(second.pid, 3)
    went_on = [each for each in ended if each[0] in {ordinal for ordinal, _ in begun}]
    assert Counter((ordinal, said[:2]) for ordinal, said in went_on) == Counter(begun)
    assert len({said for _, said in begun}) > 1
    _, row = rows(run)  # the first may be older than the last figures of its rollouts
    assert (row["rollout/agent/resumed"], row.get("rollout/agent/diverged", 0)) == (4, 0)
    assert row.get("rollout/agent/given_again", 0) == (8 if played == "program" else 0)
    if played == "as_template":
        assert row["rollout/segments/mean"] == 3
        assert 0 <= row["train/logprob_gap/train/max"] < 1e-3
