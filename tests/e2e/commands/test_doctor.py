"""The doctor of real runs: a healthy one, a slow generator, stale data, a hacked reward; and warnings of a live one."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import FOR_EVER, STARTS_S, finished, started, succeeded

from asyncrl.observability.doctor.facts import Finding
from asyncrl.observability.doctor.rules import diagnose
from asyncrl.observability.run_files import RunFiles
from asyncrl.tasks.addition import write_model_folder
from bench.screenshots.runs import command, slowed_down

pytestmark = pytest.mark.slow


CONFIG = """
include: [tasks/echo.yaml]
model: {{path: {model}}}
batch: {{groups: 20, group_size: 8}}
evaluation: {{source: "asyncrl.tasks.echo:rows"}}
generator: {{slots: 160, threads: 1}}
learner: {{threads: 1, optimizer: {{lr: 5e-3, warmup_steps: 2}}}}
algorithm: {{advantage: dr_grpo, loss: ppo, aggregation: token-mean, clip_low: 0.2, clip_high: 0.28}}
"""
FLAWED = Path(__file__).parents[1] / "flawed_echo.py"

CUT_OFF = "rollout/length/truncated"
"""Answers of the task end after their three places."""

LONG = ("generator.max_tokens=96", "generator.max_length=100", "learner.optimizer.lr=1e-6")
"""Answers that stay long: a model that learns the task answers in three tokens."""

HELD_UP, WAITS = {"stall", "silent", "bottleneck"}, "perf/wait_fraction/"
"""Rules and figures about waits: other tests run beside a run, and its processes wait for cores."""

LATE = "sync/lag"
"""A generator that stands still takes versions late."""


def found(folder: Path, name: str, *keys: str) -> list[Finding]:
    """Findings of a run of bench/screenshots/runs.py that are no notes, but for those about waits and CUT_OFF. Its task
    is echo, which needs no warm-up."""
    write_model_folder(folder / "model", hidden_size=32, layers=1)
    (folder / "config.yaml").write_text(CONFIG.format(model=folder / "model"), encoding="utf-8")
    words = [*command(name, folder, str(folder / "config.yaml")), *keys]
    with slowed_down(name, folder), started(*words) as launcher:
        succeeded(launcher, STARTS_S)
    run = RunFiles(folder / name)
    run.read()
    severe = (one for one in diagnose(run) if one.severity != "note")
    ours = (one for one in severe if one.rule not in HELD_UP and not one.about.startswith(WAITS))
    return [one for one in ours if one.about != CUT_OFF]


def test_a_healthy_run_has_none(tmp_path: Path) -> None:
    """But for a generator that stands behind the other because the cores are taken."""
    findings = found(tmp_path, "healthy")
    assert [one for one in findings if one.rule != "straggler" and one.about != LATE] == []


def test_a_slow_generator_is_named(tmp_path: Path) -> None:
    """Answers are and stay long enough that no group fits between two stops, however fast the machine is."""
    findings = {(one.rule, one.about, one.key) for one in found(tmp_path, "slow-generator", *LONG)}
    assert ("straggler", "generator-1", "queue.hedge_s") in findings
    assert {about for _, about, _ in findings} <= {"generator-1", LATE}


def test_stale_data_is_named(tmp_path: Path) -> None:
    far = ("learner.optimizer.lr=2e-2", "algorithm.clip_low=0.9", "algorithm.clip_high=9")
    keys = {one.rule: one.key for one in found(tmp_path, "stale-data", *far)}
    assert keys["stale data"] == "queue.max_staleness"


def test_a_reward_of_which_one_part_grows_is_named(tmp_path: Path) -> None:
    """Commas are paid, and answers become wrong."""
    ours = (f"reward.function={FLAWED}:reward", f"evaluation.source={FLAWED}:heldout")
    first = found(tmp_path, "hacked-reward", *ours, "run.versions=80")[0]
    assert (first.rule, first.key) == ("one part", "reward.weights.tidy")
    assert "right falls" in first.sentence


def test_a_live_run_warns_once(config_file: Path) -> None:
    """Answers of one digit and more are cut off at the first token."""
    keys = (FOR_EVER, "generator.max_tokens=1", "launch.quiet=true")
    with started("asyncrl", "train", str(config_file), *keys) as launcher:
        assert launcher.stdout is not None
        seen = []
        while "A limit cuts off" not in (line := launcher.stdout.readline()):
            assert line, "".join(seen)
            seen.append(line)
        assert line.startswith("warning: ")
        launcher.terminate()
        code, rest = finished(launcher)
    assert code == 10, rest
    assert "A limit cuts off" not in rest
