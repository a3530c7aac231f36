"""The example of docs/data.md: a mixture of a JSONL file and a Parquet folder, and two evaluation sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
import yaml
from pyarrow import parquet

from asyncrl import evaluate
from asyncrl.config.load import load_config
from asyncrl.launch.local_run import train
from asyncrl.launch.preflight import preflight
from asyncrl.tasks.addition import Problems, heldout
from asyncrl.tasks.addition import train as training
from asyncrl.telemetry.sinks import read_rows
from asyncrl.types import Scored, Task

DOCS = Path(__file__).parents[3] / "docs" / "data.md"
REST = {
    "batch": {"groups": 4, "group_size": 2},
    "generator": {"slots": 32, "max_tokens": 8, "max_length": 32, "threads": 1, "heartbeat_s": 0.2},
    "learner": {"threads": 1, "micro_batch_tokens": 128, "groups_deadline_s": 60},
    "launch": {"quiet": True},
}


def odd(task: Task, text: str, *, after: int) -> Scored:
    """Whether the first letters say a word of odd length."""
    return Scored(float(len(text[after:]) % 2), answer=str(len(text) % 3))


def write_jsonl(path: Path, made: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in made))


def write_parquet(path: Path, problems: Problems) -> None:
    table = pyarrow.Table.from_pylist(
        [{"question": p["prompt"], "answer": p["answer"]} for p in problems[:10]]
    )
    parquet.write_table(table, path)


@pytest.fixture
def config_file(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    known, unseen = training(digits=1, held_out=20), heldout(digits=1, size=20)
    long = {"prompt": "0000001+1=", "result": {"text": "2"}}
    rows_of = [{"prompt": row["prompt"], "result": {"text": row["answer"]}} for row in known]
    write_jsonl(tmp_path / "sums.jsonl", [*rows_of[:4], long, long])
    write_jsonl(tmp_path / "hard.jsonl", unseen[:5])
    (tmp_path / "sums").mkdir()
    write_parquet(tmp_path / "sums" / "train.parquet", known)
    write_parquet(tmp_path / "sums" / "test.parquet", unseen)
    example = yaml.safe_load(DOCS.read_text().split("```yaml")[1].split("```")[0])
    run = {"name": "it", "dir": str(tmp_path), "versions": 3}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**example, **REST, "run": run, "model": {"path": str(model_folder)}}))
    return path


@pytest.mark.slow
def test_the_example_runs_and_reports_both_sets(config_file: Path) -> None:
    preflight(load_config(config_file))
    # What a random model says earns something of this reward.
    config = load_config(config_file, [f"reward.function='{__file__}:odd'", "reward.options={after: 1}"])
    summary = train(config)
    assert (summary["versions"], summary["groups_trained"]) == (3, 12)
    table = list(read_rows(config_file.parent / "it" / "metrics.jsonl"))
    evaluated = [row for row in table if "eval/accuracy" in row]
    assert [row["version"] for row in evaluated] == [0, 2, 3]
    assert all(
        row["eval/sampled/pass@2"] <= row["eval/sampled/pass@4"] <= row["eval/sampled/pass@8"]
        for row in evaluated
    )
    assert all(0 < row["eval/sampled/maj@8"] < 1 for row in evaluated)
    # Of six tasks of `small` two are too long.
    assert [row for row in table if "perf/step_s" in row][-1]["queue/dropped/too_long"] >= 1
    scored = evaluate.evaluate(config, str(config_file.parent / "it" / "final"))
    last = evaluated[-1]
    assert scored["accuracy"] == pytest.approx(last["eval/accuracy"])
    assert scored["sets"]["sampled"]["pass@8"] == pytest.approx(last["eval/sampled/pass@8"])
    assert (scored["tasks"], scored["sets"]["sampled"]["tasks"]) == (10, 5)
