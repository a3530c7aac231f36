"""`bench.chaos` on the smallest task: a random policy still learns under faults of every kind."""

from __future__ import annotations

import shutil
from pathlib import Path

import missing
import pytest
import yaml

from asyncrl.tasks.addition import write_model_folder
from bench.chaos.faults import KINDS
from bench.chaos.runs import FaultyRun
from bench.chaos.verdict import broken

VERSIONS, FAULTS = 150, 9
CONFIG = {
    "include": ["tasks/echo.yaml", "algorithms/grpo.yaml"],
    "run": {"name": "it", "versions": VERSIONS},
    "batch": {"groups": 20, "group_size": 8},
    "generator": {"slots": 160, "threads": 1},
    "learner": {"threads": 1, "optimizer": {"lr": 1e-2, "warmup_steps": 2}},
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("redis-server") is None, reason=missing.REDIS)
def test_it_climbs_and_every_task_ends_once(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", hidden_size=32, layers=1)
    here = {"run": {**CONFIG["run"], "dir": str(tmp_path)}, "model": {"path": str(tmp_path / "model")}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**CONFIG, **here}), encoding="utf-8")
    outcome = FaultyRun(str(tmp_path / "config.yaml"), [], KINDS, every=0.5, seed=8, most=FAULTS).live()
    assert broken(outcome, max_staleness=2) == []
    assert {*outcome.struck} == {*KINDS}
    assert outcome.summary["versions"] == VERSIONS
    assert outcome.summary["reward_end"] > 0.5 > 0.2 > outcome.summary["reward_start"]
