"""`bench.chaos` on the smallest task: a random policy still learns while its processes are killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from processes import versions

from asyncrl.tasks.addition import write_model_folder
from bench.chaos.runs import KilledRun

VERSIONS = 60
CONFIG = {
    "include": ["tasks/echo.yaml", "algorithms/grpo.yaml"],
    "run": {"name": "it", "versions": VERSIONS},
    "batch": {"groups": 20, "group_size": 8},
    "generator": {"slots": 160, "threads": 1},
    "learner": {"threads": 1, "optimizer": {"lr": 1e-2, "warmup_steps": 2}},
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_climbs_and_every_task_ends_once(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", hidden_size=32, layers=1)
    here = {"run": {**CONFIG["run"], "dir": str(tmp_path)}, "model": {"path": str(tmp_path / "model")}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**CONFIG, **here}), encoding="utf-8")
    outcome = KilledRun(str(tmp_path / "config.yaml"), [], every=1.0, seed=8, most=3).live()
    assert outcome.kills == {"generator": 1, "queue": 1, "learner": 1}
    assert outcome.restarts == 3
    assert (outcome.history.twice, outcome.history.unended) == ([], [])
    assert versions(tmp_path / "it") == list(range(1, VERSIONS + 1))
    assert outcome.summary["groups_trained"] == 20 * VERSIONS == len(outcome.history.trained)
    assert outcome.summary["reward_end"] > 0.6 > 0.2 > outcome.summary["reward_start"]
