"""The trackers of `telemetry.trackers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from asyncrl.system.packages import check_package
from asyncrl.telemetry.trackers.background import Trackers
from asyncrl.telemetry.trackers.mlflow_tracker import MlflowTracker
from asyncrl.telemetry.trackers.tensorboard_tracker import TensorboardTracker
from asyncrl.telemetry.trackers.tracker import TrackedRun, Tracker
from asyncrl.telemetry.trackers.trackio_tracker import TrackioTracker
from asyncrl.telemetry.trackers.wandb_tracker import WandbTracker, kill_service

MAKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}
"""By their names in `telemetry.trackers`, which are those of their packages and of our extras."""

BESIDE = {"mlflow": ("sqlalchemy", "alembic")}
"""Packages that one needs and does not require."""


def open_trackers(run: TrackedRun, names: Iterable[str]) -> Trackers:
    opened = {name: partial(MAKERS[name], run) for name in names}
    return Trackers(opened, abandon={"wandb": kill_service})


def check_tracker(name: str) -> None:
    """Raise ConfigError if the package of a tracker is missing."""
    for module in (name, *BESIDE.get(name, ())):
        check_package(module, name, "telemetry.trackers", name)
