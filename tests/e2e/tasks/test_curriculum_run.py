"""A run whose solved tasks rest, also after its queue was killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from processes import kill_after, rows, started, succeeded, versions

from asyncrl.launch.folder.run_folder import config_of
from asyncrl.tasks.curriculum import CurriculumStream
from asyncrl.tasks.source import tasks_of_run

CODE = """
def rows():
    return [{"prompt": f"{index % 10}+1=", "solved": index >= 64} for index in range(80)]


def reward(task, text):
    return 1.0 if task.data.get("solved") else len(text) / 100
"""


@pytest.mark.parametrize("filtered", ["none", "no_spread"])
def test_solved_tasks_rest(config_file: Path, filtered: str) -> None:
    """With the filter, no group of a solved task reaches the learner. An epoch has 64 tasks at least."""
    code = config_file.parent / "code.py"
    code.write_text(CODE)
    config = yaml.safe_load(config_file.read_text())
    config_file.write_text(yaml.safe_dump({**config, "tasks": {"source": f"{code}:rows"}}))
    keys = (
        f"reward.function={code}:reward",
        "tasks.curriculum.solved=0.9",
        "tasks.curriculum.revisit=0",
        f"algorithm.filter={filtered}",
        "queue.max_staleness=1",
        "run.versions=50",
    )
    with started("asyncrl", "train", str(config_file), *keys) as launcher:
        kill_after(config_file.parent / "it", (8,), launcher, "asyncrl", "queue")
        succeeded(launcher)
    run = config_file.parent / "it"
    assert versions(run) == list(range(1, 51))
    tasks = tasks_of_run(config_of(run), run)
    assert isinstance(tasks, CurriculumStream)
    tasks.read()
    last = [tasks.task_at(ordinal) for ordinal in range(tasks.end - 64, tasks.end)]
    assert sorted(int(tasks.place_of(task.ordinal).split()[-1]) for task in last) == list(range(64))
    assert all(not task.data["solved"] for task in last)
    assert rows(run)[-1]["rollout/reward/mean"] < 0.5
