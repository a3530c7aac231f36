"""Configs small enough that a whole run takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from metrics_page import unlisted

from asyncrl.telemetry.sinks import read_rows

CONFIG = """
run: {{name: it, dir: {folder}, versions: 4, seed: 3}}
model: {{path: {model}}}
tasks: {{source: asyncrl.tasks.addition:train, options: {{digits: 1, held_out: 20}}}}
evaluation: {{source: asyncrl.tasks.addition:heldout, options: {{digits: 1, size: 20}}, every: 2, chunk: 10}}
reward: {{function: "asyncrl.tasks.addition:reward"}}
batch: {{groups: 4, group_size: 4}}
generator: {{slots: 32, max_tokens: 8, max_length: 16, threads: 1, heartbeat_s: 0.2}}
queue: {{max_staleness: 2, lease_s: 5}}
learner: {{threads: 1, micro_batch_tokens: 128, groups_deadline_s: 60, optimizer: {{lr: 1e-3}}}}
checkpoint: {{every: 2}}
launch: {{quiet: true}}
"""


@pytest.fixture(autouse=True)
def rows_are_explained(tmp_path: Path) -> Iterator[None]:
    """Whatever a run has written into metrics.jsonl is on the page of the keys."""
    yield
    for path in tmp_path.rglob("metrics.jsonl"):
        assert unlisted({key for row in read_rows(path) for key in row}) == [], path


@pytest.fixture
def config_file(tmp_path: Path, model_folder: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(folder=tmp_path, model=model_folder), encoding="utf-8")
    return path
