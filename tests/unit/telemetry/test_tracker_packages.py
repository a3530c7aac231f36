"""Rows and rollouts come back from the real packages, by their own readers, also after a resume. Nothing is sent."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import until

from asyncrl.telemetry.trackers import mlflow_tracker
from asyncrl.telemetry.trackers.open import open_trackers
from asyncrl.telemetry.trackers.tracker import TrackedRun

ROLLOUT = {"prompt": "4+5=|", "answer": "9\n", "reward": 1.0, "tokens": 2, "finish": "stop"}
LOSSES = {1: 0.5, 2: 0.25, 3: 0.125}
PART = "rollout/reward/part/right(x)"
CLOSE_S = 120.0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrackedRun:
    for name, value in (
        ("WANDB_MODE", "offline"),
        ("WANDB_SILENT", "true"),
        ("MLFLOW_DISABLE_TELEMETRY", "1"),
    ):
        monkeypatch.setenv(name, value)
    queue = {"depth": 8, "address": "tcp://me:secret@host", "lease_s": 5.0}
    settings = {"queue": queue, "tasks": {"source": "x" * 600}}
    return TrackedRun("it", tmp_path, None, settings, "sums", "small", ("first", "cpu"), "a note")


def write(run: TrackedRun, name: str) -> None:
    """Versions 1 and 2, with the evaluation of 1 in a row of its own behind them."""
    trackers = open_trackers(run, [name])
    trackers.write({"version": 1, "train/loss": LOSSES[1], PART: 1.0})
    trackers.write_rollouts(1, [ROLLOUT])
    trackers.write({"version": 2, "train/loss": LOSSES[2], "train/ratio/max": math.nan})
    trackers.write({"version": 1, "eval/accuracy": 0.75})
    trackers.close(CLOSE_S)


def resume(run: TrackedRun, name: str) -> None:
    """At 2, with version 3."""
    trackers = open_trackers(replace(run, resume_at=2), [name])
    trackers.write({"version": 3, "train/loss": LOSSES[3]})
    trackers.close(CLOSE_S)


def test_tensorboard(run: TrackedRun) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(run, "tensorboard")
    resume(run, "tensorboard")
    read = EventAccumulator(str(run.folder / "tensorboard"))
    read.Reload()
    assert {each.step: each.value for each in read.Scalars("train/loss")} == LOSSES
    assert [(each.step, each.value) for each in read.Scalars("eval/accuracy")] == [(1, 0.75)]
    assert [each.value for each in read.Scalars(PART)] == [1.0]
    (table,) = read.Tensors("rollouts/text_summary")
    (text,) = table.tensor_proto.string_val
    assert text.decode().splitlines()[-1] == "| 4+5=\\| | 9 ⏎  | 1.0 | 2 | stop |"


def test_a_resumed_tensorboard_hides_later_rows(run: TrackedRun) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_at, versions in ((None, (1, 2, 3)), (1, (2,))):
        trackers = open_trackers(replace(run, resume_at=resume_at), ["tensorboard"])
        for version in versions:
            trackers.write({"version": version, "train/loss": LOSSES[version]})
        trackers.close(CLOSE_S)
    read = EventAccumulator(str(run.folder / "tensorboard"))
    read.Reload()
    assert [each.step for each in read.Scalars("train/loss")] == [1, 2]


def test_wandb(run: TrackedRun) -> None:
    write(run, "wandb")
    before = (run.folder / "wandb").rename(run.folder / "before")  # folders have names of seconds
    resume(run, "wandb")
    (file,), (after,) = (folder.glob("offline-run-*/*.wandb") for folder in (before, run.folder / "wandb"))
    first, second = _whole_wandb_records(file), _whole_wandb_records(after)
    (made,) = [record.run for record in first if record.HasField("run")]
    assert (made.project, made.run_group, [*made.tags], made.notes) == (
        "sums",
        "small",
        ["first", "cpu"],
        "a note",
    )
    assert made.display_name == "it"
    assert {record.run.run_id for record in second if record.HasField("run")} == {made.run_id}
    assert [one.metric.step_metric for one in first if one.metric.glob_name == "*"] == ["version"]
    settings = {each.key: json.loads(each.value_json) for each in made.config.update}
    assert settings["queue.depth"] == 8
    assert "secret" not in str(settings)
    rows = [_wandb_row(record) for record in (*first, *second) if record.HasField("history")]
    assert {row["version"]: row["train/loss"] for row in rows if "train/loss" in row} == LOSSES
    assert [row["version"] for row in rows if row.get("eval/accuracy") == 0.75] == [1]
    (table,) = [row["rollouts/path"] for row in rows if "rollouts/path" in row]
    data = json.loads((file.parent / "files" / table).read_text())
    assert (data["columns"], data["data"]) == ([*ROLLOUT], [[*ROLLOUT.values()]])


WANDB_HEAD, WANDB_BLOCK, WANDB_PIECE = 7, 32768, struct.Struct("<IHB")
"""Of a .wandb file: bytes before its records; of a block; checksum, length and kind of a piece of a record."""


def _whole_wandb_records(file: Path) -> list[Any]:
    """Up to that of the run's end, which the package's service may write after the tracker has closed."""
    from google.protobuf.message import DecodeError

    def ended() -> bool:
        with suppress(struct.error, DecodeError):  # the last record is half written
            return any(record.HasField("exit") for record in _wandb_records(file))
        return False

    until(ended, f"the end of {file.name}")
    return list(_wandb_records(file))


def _wandb_records(file: Path) -> Iterator[Any]:
    """The package has no reader any more: a log in LevelDB's format, of messages that the package defines."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = file.read_bytes(), WANDB_HEAD, b""
    while at < len(data):
        if WANDB_BLOCK - at % WANDB_BLOCK < WANDB_PIECE.size:
            at += WANDB_BLOCK - at % WANDB_BLOCK  # the rest of a block is empty
        _, size, kind = WANDB_PIECE.unpack_from(data, at)
        record += data[at + WANDB_PIECE.size : (at := at + WANDB_PIECE.size + size)]
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(record)
            record = b""


STOPPED_SERVICE = """
import signal, sys
from pathlib import Path
import psutil
from asyncrl.telemetry.trackers.background import Trackers
from asyncrl.telemetry.trackers.tracker import TrackedRun
from asyncrl.telemetry.trackers.wandb_tracker import WandbTracker, kill_service

opened = WandbTracker(TrackedRun("it", Path(sys.argv[1])))
(service,) = (child for child in psutil.Process().children() if "wandb" in child.name())
service.send_signal(signal.SIGSTOP)
trackers = Trackers({"wandb": lambda: opened}, abandon={"wandb": kill_service})
trackers.write({"version": 1, "train/loss": 0.5})
trackers.close(1.0)
"""


@pytest.mark.slow
def test_a_process_ends_though_the_service_of_wandb_stands_still(run: TrackedRun) -> None:
    words = [sys.executable, "-c", STOPPED_SERVICE, str(run.folder)]
    env = {
        name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"
    }  # the one of these tests
    ended = subprocess.run(words, capture_output=True, text=True, timeout=CLOSE_S, env=env)
    assert ended.returncode == 0, ended.stderr
    assert "tracker wandb does not end in time" in ended.stderr


def _wandb_row(record: Any) -> dict[str, Any]:
    return {
        each.key or "/".join(each.nested_key): json.loads(each.value_json) for each in record.history.item
    }


def test_mlflow(run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setattr(mlflow_tracker, "AT_ONCE", 2)
    write(run, "mlflow")
    resume(run, "mlflow")
    client = MlflowClient(f"sqlite:///{run.folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    (made,) = client.search_runs([experiment.experiment_id])
    assert (made.info.run_name, made.info.status, made.data.params) == (
        "it",
        "FINISHED",
        {"queue.depth": "8", "queue.lease_s": "5.0", "tasks.source": "x" * 500},
    )
    tags = {"group": "small", "first": "true", "cpu": "true", "mlflow.note.content": "a note"}
    assert tags.items() <= made.data.tags.items()

    def of(name: str) -> dict[int, float]:
        return {each.step: each.value for each in client.get_metric_history(made.info.run_id, name)}

    assert of("train/loss") == LOSSES
    assert of("eval/accuracy") == {1: 0.75}
    assert of("rollout/reward/part/right_x_") == {1: 1.0}
    table = json.loads(Path(client.download_artifacts(made.info.run_id, "rollouts/000001.json")).read_text())
    assert table == {"columns": [*ROLLOUT], "data": [[*ROLLOUT.values()]]}


@pytest.mark.slow
def test_an_mlflow_that_has_lost_the_run_gets_a_new_one(run: TrackedRun) -> None:
    from mlflow import MlflowClient

    (run.folder / "mlflow_id").write_text("0" * 32)
    resume(run, "mlflow")
    known = (run.folder / "mlflow_id").read_text()
    client = MlflowClient(f"sqlite:///{run.folder / 'mlflow.db'}")
    assert [each.value for each in client.get_metric_history(known, "train/loss")] == [LOSSES[3]]


def test_trackio(run: TrackedRun, trackio_storage: Callable[..., list[dict[str, Any]]]) -> None:
    write(run, "trackio")
    resume(run, "trackio")
    rows = trackio_storage("sums", "it")
    assert {row["step"]: row["train/loss"] for row in rows if "train/loss" in row} == LOSSES
    assert [row["step"] for row in rows if row.get("eval/accuracy") == 0.75] == [1]
    (table,) = [row["rollouts"] for row in rows if "rollouts" in row]
    assert table["_value"] == [ROLLOUT]


def test_a_new_run_of_trackio_is_another_one(
    run: TrackedRun, trackio_storage: Callable[..., list[dict[str, Any]]]
) -> None:
    """Although it has the same name."""
    for _ in range(2):
        trackers = open_trackers(run, ["trackio"])
        trackers.write({"version": 1, "train/loss": LOSSES[1]})
        trackers.close(CLOSE_S)
    assert [row["step"] for row in trackio_storage("sums", "it")] == [1]


@pytest.fixture
def trackio_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Reads rows of a run. The folder is chosen when the package is imported."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    return sqlite_storage.SQLiteStorage.get_logs
