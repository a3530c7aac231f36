"""A whole run, resumed, in every tracker at once; its profile and its exported trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from processes import ran, rows, started, succeeded


@pytest.mark.slow
def test_a_resumed_run_is_whole_in_each_tracker(config_file: Path) -> None:
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = config_file.parent / "it"
    env = {
        "WANDB_MODE": "offline",
        "MLFLOW_DISABLE_TELEMETRY": "1",
        "TRACKIO_DIR": str(run.parent / "trackio"),
    }
    words = (
        "telemetry.trackers=[tensorboard,wandb,mlflow,trackio]",
        "telemetry.rollouts_every=2",
        "learner.profile_versions=[2,3]",
        "telemetry.trace_mb=8",
        "launch.stop_deadline_s=180",  # MLflow makes its database meanwhile
    )
    for more in (("run.versions=4",), ("run.versions=6", "run.resume=true")):
        with started("asyncrl", "train", str(config_file), *words, *more, env=env) as launcher:
            succeeded(launcher)
    assert "lacks" not in (run / "logs" / "learner.log").read_text()
    losses = {row["version"]: row["train/loss"] for row in rows(run) if "train/loss" in row}
    assert losses.keys() == set(range(1, 7))
    read = EventAccumulator(str(run / "tensorboard"))
    read.Reload()
    assert {each.step: each.value for each in read.Scalars("train/loss")} == pytest.approx(losses)
    client = MlflowClient(f"sqlite:///{run / 'mlflow.db'}")
    history = client.get_metric_history((run / "mlflow_id").read_text(), "train/loss")
    assert {each.step: each.value for each in history} == pytest.approx(losses)
    assert len([*(run / "wandb").glob("offline-run-*/*.wandb")]) == 2
    assert (run.parent / "trackio" / "asyncrl.db").exists()
    (profile,) = (run / "profile").iterdir()
    assert profile.name == "learner-rank-0.v000002-v000003.json.gz"
    ran("asyncrl", "trace", str(run), "--output", str(run / "t.json.gz"))
    events = json.loads(gzip.decompress((run / "t.json.gz").read_bytes()))["traceEvents"]
    assert {"weights", "group"} <= {event["name"] for event in events if event["ph"] == "f"}
