"""The doctor of real runs: a healthy one, a slow generator, stale data, a hacked reward; and warnings of a live one."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import FOR_EVER, finished, started

from asyncrl import demo
from asyncrl.observability.doctor.facts import Finding
from asyncrl.observability.doctor.rules import diagnose
from asyncrl.observability.run_files import RunFiles
from bench.screenshots.runs import make

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, warmed up."""
    planned = demo.demo(str(tmp_path_factory.mktemp("demo")), [], "addition")
    demo.warm_up(planned)
    return Path(planned.warm)


HELD_UP = {"stall", "silent"}
"""Rules about waits: other tests run beside a run, and its processes wait for cores."""


def found(folder: Path, warm: Path, name: str) -> list[Finding]:
    """Findings of a run of bench/screenshots/runs.py that are no notes, but for those of HELD_UP."""
    make(name, folder, f"model.path={warm}")
    run = RunFiles(folder / name)
    run.read()
    return [one for one in diagnose(run) if one.severity != "note" and one.rule not in HELD_UP]


def test_a_healthy_run_has_none(tmp_path: Path, warm: Path) -> None:
    """But for a generator that stands behind the other because the cores are taken."""
    assert [one for one in found(tmp_path, warm, "healthy") if one.rule != "straggler"] == []


def test_a_slow_generator_is_named(tmp_path: Path, warm: Path) -> None:
    findings = {(one.rule, one.about, one.key) for one in found(tmp_path, warm, "slow-generator")}
    assert ("straggler", "generator-1", "queue.hedge_s") in findings
    others = {about for _, about, _ in findings} - {"generator-1"}
    assert others <= {"generator-1 is", "sync/lag"}, "it may hold the learner up, and takes versions late"


def test_stale_data_is_named(tmp_path: Path, warm: Path) -> None:
    keys = {one.rule: one.key for one in found(tmp_path, warm, "stale-data")}
    assert keys["stale data"] == "queue.max_staleness"


def test_a_hacked_reward_is_named_with_its_part(tmp_path: Path, warm: Path) -> None:
    first = found(tmp_path, warm, "hacked-reward")[0]
    assert (first.rule, first.severity, first.key) == ("hacked reward", "wrong", "reward.weights.tidy")
    assert "eval/accuracy" in first.sentence


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
