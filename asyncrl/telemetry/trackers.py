"""Sinks for TensorBoard and Weights & Biases, whose packages are imported on use.

Rows of one version may arrive in parts, and those of an evaluation after rows of later versions.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.system.disk import replace_text
from asyncrl.telemetry.sinks import Sink


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
