from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError
from asyncrl.launch.views.start_table import StartTable

LAUNCHER: list[dict[str, Any]] = [
    {"t": 102.5, "process": "launcher", "role": "launcher", "host": "a", "pid": 1},
    {"t": 102.6, "event": "started", "process": "queue"},
    {"t": 106.0, "event": "imported", "process": "fork server", "seconds": 5.5},
    {"t": 106.1, "event": "started", "process": "learner"},
    {"t": 106.2, "event": "started", "process": "generator-0"},
    {"t": 109.0, "event": "started", "process": "generator-0"},
]
QUEUE: list[dict[str, Any]] = [{"t": 103.0, "process": "queue", "role": "queue", "host": "a", "pid": 2}]
LEARNER: list[dict[str, Any]] = [
    {"t": 106.5, "process": "learner", "role": "learner", "host": "a", "pid": 3},
    {"t": 106.6, "lane": "learner", "do": "compute/predict"},
    {"t": 106.7, "took": 0.1, "lane": "weights", "do": "snapshot", "version": 0},
    {"t": 106.8, "lane": "learner", "do": "wait/groups"},
    {"t": 107.9, "lane": "learner", "do": "wait/groups"},
]
TRAINED = {"t": 108.4, "took": 0.4, "lane": "weights", "do": "snapshot", "version": 1}
GENERATOR: list[dict[str, Any]] = [
    {"t": 106.6, "process": "generator-0", "role": "generator", "host": "a", "pid": 4},
    {"t": 106.9, "lane": "engine", "do": "wait/tasks"},
    {"t": 107.4, "took": 0.2, "lane": "rollouts", "do": "generate", "task": 3},
]

TABLE = """\
process      stage of the start               from  to (s)
launcher     imports, configuration, checks    0.0     2.5
fork server  imports                           0.5     6.0
queue        begins                            2.6     3.0
learner      begins                            6.1     6.5
generator-0  begins                            6.2     6.6
learner      loads the model                   6.5     6.8
generator-0  loads the model                   6.6     6.9
learner      trains the first version          6.8     8.0
generator-0  makes the first group             6.9     7.4"""


def write(folder: Path, **traces: list[dict[str, Any]]) -> None:
    (folder / "trace").mkdir(exist_ok=True)
    for name, rows in traces.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "trace" / f"{name.replace('_', '-')}.jsonl").write_text(text)


def test_each_stage_is_there_once_the_first_version_is(tmp_path: Path) -> None:
    table = StartTable(tmp_path, 100.0)
    assert table.lines() == []
    write(tmp_path, launcher=LAUNCHER, queue=QUEUE, learner=LEARNER, generator_0=GENERATOR)
    assert table.lines() == []
    write(tmp_path, learner=[*LEARNER, TRAINED])
    assert "\n".join(table.lines()) == TABLE


def test_the_run_that_a_run_goes_on_with_is_not_read(tmp_path: Path) -> None:
    def earlier(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**row, "t": row["t"] - 50} for row in rows]

    both = {name: [*earlier(rows), *rows] for name, rows in (("launcher", LAUNCHER), ("queue", QUEUE))}
    write(tmp_path, **both, learner=[*earlier([*LEARNER, TRAINED]), *LEARNER], generator_0=GENERATOR)
    table = StartTable(tmp_path, 100.0)
    assert table.lines() == []
    write(tmp_path, learner=[*earlier([*LEARNER, TRAINED]), *LEARNER, TRAINED])
    assert "\n".join(table.lines()) == TABLE


def test_timings_need_traces(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"launch\.timings .*telemetry\.trace_mb=0 turns them off"):
        load_config(str(base), ["launch.timings=true", "telemetry.trace_mb=0"])


BASE = """
model: {path: somewhere}
tasks: {source: "asyncrl.tasks.addition:train"}
reward: {function: "asyncrl.tasks.addition:reward"}
"""
