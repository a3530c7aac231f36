"""Sinks of metrics, which take one flat row of names and values at a time: JSON lines, TensorBoard, Weights & Biases.

Rows of one version may arrive in parts, and those of an evaluation after rows of later versions.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from asyncrl.errors import ConfigError
from asyncrl.system.disk import replace_text, writing


class Sink(Protocol):
    def write(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """A file with one JSON object per line, flushed at once. A kill can damage the last line only.

    Each row gets `time`, seconds since the epoch. With `resume_at`, rows of later versions are removed first, so that a
    resumed run has one row per version.
    """

    def __init__(self, path: Path, resume_at: int | None = None) -> None:
        if resume_at is not None and path.exists():
            kept = [row for row in read_rows(path) if row.get("version", 0) <= resume_at]
            replace_text(path, "".join(map(_line, kept)))
        self._path = path
        self._file = path.open("a" if resume_at is not None else "w", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        with writing(self._path):
            self._file.write(_line({"time": round(time.time(), 3), **row}))
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class Sinks:
    """Several sinks as one."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks

    def write(self, row: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(row)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file, if it is there, without a last line that a kill or a full disk damaged. Raises
    ConfigError if a line before the last one is no row."""
    if not path.exists():
        return
    damaged = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if damaged:
                rule = "is no JSON object, and lines follow it"
                raise ConfigError("line", f"{path}:{damaged}", rule, "remove the line, or the file")
            try:
                row = json.loads(line) if line.endswith("\n") else None
            except ValueError:
                row = None
            if isinstance(row, dict):
                yield row
            else:
                damaged = number


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(json_numbers(row), ensure_ascii=False, allow_nan=False) + "\n"


def json_numbers(value: Any) -> Any:
    """`value` with None for numbers that JSON does not have.

    >>> json_numbers({"loss": float("nan"), "parts": [1, float("inf")]})
    {'loss': None, 'parts': [1, None]}
    """
    if isinstance(value, Mapping):
        return {name: json_numbers(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_numbers(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """resume_at: the version at which the run resumes; None for a new one · settings: its configuration by section"""

    name: str
    folder: Path
    resume_at: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


class TensorboardSink:
    """Writes each number of a row over its version to RUN/tensorboard."""

    def __init__(self, run: TrackedRun) -> None:
        module = _imported("tensorboard", "torch.utils.tensorboard")
        purge = None if run.resume_at is None else run.resume_at + 1
        self._writer = module.SummaryWriter(log_dir=str(run.folder / "tensorboard"), purge_step=purge)

    def write(self, row: Mapping[str, Any]) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["version"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases, which a resumed run continues. WANDB_… variables set project, entity and mode. Rows of
    versions above `resume_at` stay there."""

    def __init__(self, run: TrackedRun) -> None:
        kept = run.folder / "wandb_id"
        if run.resume_at is None or not kept.exists():
            replace_text(kept, secrets.token_hex(4))
        self._run = _imported("wandb", "wandb").init(
            id=kept.read_text(encoding="utf-8"),
            name=run.name,
            dir=str(run.folder),
            config={name: _public(section) for name, section in run.settings.items()},
            resume="allow",
        )
        self._run.define_metric("*", step_metric="version")

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log({"version": row["version"], **_numbers(row)})

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[TrackedRun], Sink]] = {"tensorboard": TensorboardSink, "wandb": WandbSink}
"""The sinks by their names in `telemetry.sinks`, which are the names of the packages."""


def check_tracker(name: str) -> None:
    """Raises ConfigError if the package of a tracker is missing."""
    if find_spec(name) is None:
        raise _missing(name)


def _imported(package: str, module: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise _missing(package) from error


def _missing(package: str) -> ConfigError:
    return ConfigError(
        "telemetry.sinks", package, f"needs the package {package}", f"pip install {package}, or take it out"
    )


def _public(section: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without addresses, which may contain passwords."""
    return {key: value for key, value in section.items() if not key.endswith(("_url", "address"))}


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row, without the version."""
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "version"
    }
