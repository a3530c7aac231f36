"""Presets that need more than the policy, in real processes: the models come, learn, and come back after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import rows

from asyncrl.config.load import load_config
from asyncrl.launch.local_run import train

pytestmark = pytest.mark.slow

STEPWISE = "reward.function='asyncrl.tasks.addition:stepwise'"
COSTLY = "reward.function='asyncrl.tasks.addition:with_cost'"

CASES = {
    "ppo": (
        ["learner.processes=2", "learner.mini_batches=2"],
        {"train/critic/loss", "train/kl/reward", "train/critic/grad_norm"},
    ),
    "prime": ([], {"train/reward_model/loss", "train/reward_model/accuracy"}),
    "gigpo": ([STEPWISE], {"rollout/reward/part/steps"}),
    "off_policy_step_baseline": ([STEPWISE], {"rollout/reward/part/steps", "train/rejected_fraction"}),
    "remax": ([], {"rollout/reward/mean"}),
    "safe_rlhf": ([COSTLY, "learner.mini_batches=2"], {"train/cost_critic/loss", "train/cost_multiplier"}),
}


@pytest.mark.parametrize("preset", CASES)
def test_a_run_and_its_resumption(preset: str, config_file: Path) -> None:
    overrides, metrics = CASES[preset]
    top = config_file.with_name("top.yaml")
    top.write_text(f"include: [algorithms/{preset}.yaml, {config_file.name}]\n", encoding="utf-8")
    assert train(load_config(top, [*overrides, "run.versions=2"]))["versions"] == 2
    assert train(load_config(top, [*overrides, "run.resume=true"]))["versions"] == 4
    steps = [row for row in rows(config_file.parent / "it") if "perf/step_s" in row]
    assert [row["version"] for row in steps] == [1, 2, 3, 4]
    assert all(metrics <= set(row) for row in steps), json.dumps(sorted(steps[0]))
    assert max(row["train/staleness/max"] for row in steps) <= 2
