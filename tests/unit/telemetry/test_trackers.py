"""Rows go to TensorBoard and Weights & Biases by name; their packages, here made up, are imported when asked for."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from asyncrl.config.schema import SINKS, Config, TelemetryConfig
from asyncrl.errors import ConfigError
from asyncrl.telemetry import sinks
from asyncrl.telemetry.sinks import TRACKERS, JsonlSink, Sinks, TrackedRun, read_rows

ROW = {"version": 3, "loss": 0.5, "groups": 2, "note": "ü", "flag": True}


class Recorder:
    """Remembers every call of every method."""

    def __init__(self, calls: list[tuple[Any, ...]], **made_with: Any) -> None:
        self._calls = calls
        calls.append(("made", made_with))

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self._calls.append((name, *args, *kwargs.items()))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    tensorboard, wandb = ModuleType("torch.utils.tensorboard"), ModuleType("wandb")
    tensorboard.SummaryWriter = lambda **made_with: Recorder(calls, **made_with)  # type: ignore[attr-defined]
    wandb.init = lambda **made_with: Recorder(calls, **made_with)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return calls


def test_every_sink_of_the_configuration_is_there() -> None:
    assert tuple(TRACKERS) == SINKS


def test_tensorboard_has_each_number_over_its_version(tmp_path: Path, calls: list[tuple[Any, ...]]) -> None:
    sink = TRACKERS["tensorboard"](TrackedRun("it", tmp_path, resume_at=7))
    sink.write(ROW)
    sink.close()
    assert calls == [
        ("made", {"log_dir": str(tmp_path / "tensorboard"), "purge_step": 8}),
        ("add_scalar", "loss", 0.5, 3),
        ("add_scalar", "groups", 2, 3),
        ("flush",),
        ("close",),
    ]


def test_wandb_goes_on_with_the_same_run_and_hears_no_password(
    tmp_path: Path, calls: list[tuple[Any, ...]]
) -> None:
    settings = {"queue": {"redis_url": "redis://me:secret@host", "address": "tcp://host", "lease_s": 5.0}}
    for resume_at in (None, 2, None):
        sink = TRACKERS["wandb"](TrackedRun("it", tmp_path, resume_at, settings))
        sink.write(ROW)
        sink.close()
    made = [fields for name, fields in (call[:2] for call in calls if len(call) > 1) if name == "made"]
    assert all(one["config"] == {"queue": {"lease_s": 5.0}} and one["resume"] == "allow" for one in made)
    first, second, anew = (one["id"] for one in made)
    assert first == second != anew
    assert calls[1:4] == [
        ("define_metric", "*", ("step_metric", "version")),
        ("log", {"version": 3, "loss": 0.5, "groups": 2}),
        ("finish",),
    ]


@pytest.mark.parametrize("name", SINKS)
def test_a_sink_without_its_package_is_refused_by_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = rf"telemetry\.sinks = '{name}': needs the package {name}\. Remedy: pip install {name}"
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), None)
    with pytest.raises(ConfigError, match=says):
        TRACKERS[name](TrackedRun("it", tmp_path))
    monkeypatch.setattr(sinks, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=says):
        sinks.check_tracker(name)


def test_sinks_that_are_none_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"telemetry\.sinks = 'mlflow': is no sink.*choose from tensorboard"
    ):
        Config(telemetry=TelemetryConfig(sinks=("mlflow",)))
    with pytest.raises(ConfigError, match="names a sink twice"):
        Config(telemetry=TelemetryConfig(sinks=("wandb", "wandb")))


def test_a_row_goes_to_all_sinks(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    sinks = Sinks([JsonlSink(path) for path in paths])
    sinks.write(ROW)
    sinks.close()
    for path in paths:
        (row,) = read_rows(path)
        assert {**row, "time": 0} == {"time": 0, **ROW}
        assert "ü" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("last", [b"{}garbage\n", b"[1]\n", b"\0\0\n", b"\xff\n", b'{"half": '])
def test_a_damaged_last_row_is_left_out(tmp_path: Path, last: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"version": 1}\n' + last)
    assert list(read_rows(path)) == [{"version": 1}]


def test_a_damaged_row_before_the_last_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('garbage\n{"version": 1}\n')
    with pytest.raises(ConfigError, match=rf"^line = '{path}:1': is no JSON object"):
        list(read_rows(path))
