"""Each turn reads a prompt of its own, and the policy learns the way; a generator is killed on it."""

from __future__ import annotations

import signal
from pathlib import Path

import grid_world
import pytest
from processes import queue_address, rows, started, succeeded, until

from asyncrl.config.load import load_config
from asyncrl.offline.process import train_supervised

pytestmark = pytest.mark.slow

CONFIG = """
run: {{name: it, dir: {folder}, seed: 3}}
model: {{path: {folder}/warm}}
tasks: {{source: "{own}:walks"}}
reward: {{function: "asyncrl.generator.agents.env:of_the_environment"}}
agent: {{environment: "{own}:Grid", max_turns: {turns}}}
batch: {{groups: 8, group_size: 8}}
generator: {{slots: 64, max_tokens: 3, max_length: 32, threads: 1, heartbeat_s: 0.2}}
queue: {{max_staleness: 1, lease_s: 4}}
learner: {{threads: 1, micro_batch_tokens: 8192, groups_deadline_s: 90, mini_batches: 2,
          optimizer: {{lr: 1e-3, warmup_steps: 2}}}}
algorithm: {{loss: ppo, aggregation: token-mean, gamma: 0.9, clip_high: 0.28}}
checkpoint: {{every: 1000}}
sft: {{output: {folder}/warm, batch_size: 32, optimizer: {{lr: 5e-3, warmup_steps: 5}}}}
"""


@pytest.mark.parametrize(("advantage", "composed", "count"), [("gigpo", True, 24), ("hgpo", False, 6)])
def test_a_policy_trains_on_prompts_of_its_turns(
    tmp_path: Path, advantage: str, composed: bool, count: int
) -> None:
    """The environment composes them (gigpo, which learns the way in 24 versions), or agent.history cuts them (hgpo). A
    generator is killed at third turns of tasks of the fourth version; another one goes on from the first two."""
    grid_world.write_model_folder(tmp_path / "random")
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(folder=tmp_path, own=grid_world.__file__, turns=grid_world.TURNS))
    of_a_turn = [f"agent.options.composed={str(composed).lower()}"] + ["agent.history=1"] * (not composed)
    shown = ["sft.steps=40" if count == 24 else "sft.steps=10", f"model.path={tmp_path}/random"]
    train_supervised(load_config(config, [*of_a_turn, *shown]))
    held = [f"agent.options.folder={tmp_path}", "agent.options.held=24", f"algorithm.advantage={advantage}"]
    words = [str(config), *of_a_turn, *held, f"run.versions={count}"]
    run = tmp_path / "it"
    with started("asyncrl", "queue", *words) as queue:
        address = queue_address(run, queue)
        with started("asyncrl", "learner", *words, address) as learner:
            with started("asyncrl", "generator", *words, address, "--name", "first") as first:
                until(lambda: len([*tmp_path.glob("waits-*")]) > 8, "third turns", queue, learner, first)
                first.send_signal(signal.SIGKILL)
            (tmp_path / "gate").touch()
            with started("asyncrl", "generator", *words, address, "--name", "second") as second:
                succeeded(learner)
                succeeded(second)
        succeeded(queue)
    told = rows(run)
    assert told[-1]["rollout/agent/resumed"] > 0
    assert told[-1].get("rollout/agent/diverged", 0) == 0
    assert told[0]["rollout/segments/mean"] > 1
    rewards = [round(row["rollout/reward/mean"], 2) for row in told]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.45 or count < 24, rewards
