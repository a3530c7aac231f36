"""The folder of one run: who may use it, and what lies where.

<run.dir>/<run.name>/  config.yaml  config.<version>.yaml (before a resume that changed it)  lock  address
                       metrics.jsonl  rollouts.jsonl  summary.json  logs/  checkpoints/  final/
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.kept_config import keep_config

RUNS = Path("runs")


def run_folder(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name


@contextmanager
def claimed_run_folder(config: Config) -> Iterator[tuple[Path, bool]]:
    """(the run's folder, locked while inside, with config.yaml written; what `keep_config` says).

    Raises ConfigError (key run.name) if a live run uses the folder, or if it holds a run not to be resumed, or not with
    this configuration (`keep_config`).
    """
    folder = run_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a+", encoding="utf-8") as lock:
        _take(lock, config)
        if not config.run.resume:
            refuse_a_past_run(folder, config)
            shutil.rmtree(folder / "logs", ignore_errors=True)
        changed = keep_config(config, folder)
        for stale in ("address", "summary.json"):
            (folder / stale).unlink(missing_ok=True)
        yield folder, changed


def find_run(target: str) -> Path:
    """The folder of a run, given as such or by its name under runs/."""
    return next((path for path in (Path(target), RUNS / target) if path.is_dir()), Path(target))


def config_of(folder: Path) -> Config:
    """What the run was started with. ConfigError (key run) if the folder does not say."""
    written = folder / "config.yaml"
    if not written.exists():
        raise ConfigError(
            "run",
            str(folder),
            "holds no config.yaml",
            "give the folder of a run, or the run's configuration with --config",
        )
    return load_config(written)


def read_summary(folder: Path) -> dict[str, Any]:
    """What the learner says of the whole run when it is over; empty if it did not get that far."""
    path = folder / "summary.json"
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return summary


def write_address(folder: Path, address: str) -> None:
    """Where the broker of this run listens, for people and processes that come later. Whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "address.partial"
    partial.write_text(address + "\n", encoding="utf-8")
    os.replace(partial, folder / "address")


def read_address(folder: Path) -> str:
    """Where the broker of a run listens. ConfigError (key run) if the folder does not say."""
    try:
        return (folder / "address").read_text(encoding="utf-8").strip()
    except OSError:
        raise ConfigError(
            "run",
            str(folder),
            "holds no address of a queue",
            "give the folder of a run that has started, or an address",
        ) from None


def _take(lock: TextIO, config: Config) -> None:
    # The kernel frees the lock when the process ends, however it ends: there are no stale locks.
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        raise ConfigError(
            "run.name",
            config.run.name,
            f"a live run uses {run_folder(config)} (process {owner})",
            "stop it first, or set another run.name",
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()


def refuse_a_past_run(folder: Path, config: Config) -> None:
    """ConfigError (key run.name) if there is something in the folder that a new run would overwrite."""
    metrics = folder / "metrics.jsonl"
    if (metrics.exists() and metrics.stat().st_size) or any(folder.glob("checkpoints/*")):
        raise ConfigError(
            "run.name",
            config.run.name,
            f"{folder} holds a run already",
            f"set run.resume=true to go on with it, or another run.name, or remove {folder}",
        )
