"""The folder of one run: its lock, and the places of its files.

<run.dir>/<run.name>/  config.yaml  config.<version>.yaml (before a resume that changed it)  lock  address
                       metrics.jsonl  rollouts.jsonl  summary.json  logs/  trace/  checkpoints/  final/
                       inputs/ (rows and functions that a Python caller gave)
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from asyncrl.config.commented_yaml import WRITTEN_BY
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.folder.inputs import FOLDER as INPUTS
from asyncrl.launch.folder.kept import FILE, keep_code, keep_config, queue_begins_anew
from asyncrl.system.disk import remove_partials, replace_text
from asyncrl.tasks.curriculum import FILE as CURRICULUM
from asyncrl.telemetry.decisions import FOLDER as DECISIONS
from asyncrl.telemetry.sinks import read_rows
from asyncrl.telemetry.trace_file import FOLDER as TRACES

RUNS = Path("runs")
OF_VERSION_0 = "v000000"
"""The checkpoint of a run that was stopped before its first step."""
OF_A_LEARNER = (
    FILE,
    "metrics.jsonl",
    "rollouts.jsonl",
    "summary.json",
    "checkpoints",
    "final",
    "groups",
    "images",
    "reference_margins.msgpack",
)
REMOVED = ("logs", TRACES, DECISIONS, "prometheus", "profile")
"""Folders that a new run removes."""

OF_A_RUN = (*OF_A_LEARNER, "code.json", "address", CURRICULUM, *REMOVED)
"""Names that a new run replaces."""

MOST_TRIES = 20
"""To take the lock of a folder that others remove meanwhile."""

_held: ContextVar[tuple[Path, ...]] = ContextVar("held", default=())
"""Folders that this thread has locked, and in which it may begin one run."""


def run_folder(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name


@contextmanager
def claimed_run_folder(config: Config) -> Iterator[tuple[Path, bool]]:
    """(the run's folder, locked while inside, with config.yaml written; the result of `keep_config`).

    Raises ConfigError (key run.name) if a live run uses the folder, or if it holds a run not to be resumed, or not with
    this configuration (`keep_config`), or files that are not of asyncrl.
    """
    with locked_run_folder(config) as folder, _sharing():
        if not config.run.resume:
            refuse_a_past_run(folder, config)
            for old in REMOVED:
                shutil.rmtree(folder / old, ignore_errors=True)
            (folder / CURRICULUM).unlink(missing_ok=True)
        for written in (folder, folder / "logs", folder / INPUTS):
            remove_partials(written)
        changed = keep_config(config, folder)
        keep_code(config, folder)
        for stale in ("address", "summary.json"):
            (folder / stale).unlink(missing_ok=True)
        yield folder, changed


@contextmanager
def locked_run_folder(config: Config) -> Iterator[Path]:
    """The run's folder, which no other run takes while this one is inside. A thread that has locked it may claim it
    inside. Raises ConfigError if a live run uses it, it cannot be made, or it holds files that are not of asyncrl.
    """
    folder = run_folder(config)
    if folder.absolute() in _held.get():
        yield folder
        return
    refuse_foreign_files(folder, config, OF_A_RUN, with_lock=True)
    with _open_lock(folder, config) as lock:
        _write_owner(lock)
        with _sharing(*_held.get(), folder.absolute()):
            yield folder


@contextmanager
def claimed_by_learner(config: Config, file: str | Path) -> Iterator[None]:
    """The folder of a run whose processes are started one by one: checked, locked while inside, with config.yaml and
    code.json. Raises ConfigError as `claimed_run_folder`.

    file: where `config` was read from. The config.yaml of the folder itself is not written again.
    """
    folder = run_folder(config)
    refuse_foreign_files(folder, config, OF_A_LEARNER)
    with _open_lock(folder, config) as lock:
        _write_owner(lock)
        if not config.run.resume:
            refuse_a_past_run(folder, config)
        if Path(file).resolve() != (folder / FILE).resolve():
            keep_config(config, folder)
            queue_begins_anew(folder)  # `asyncrl queue --anew` is the user's to call
            keep_code(config, folder)
        yield


@contextmanager
def _sharing(*folders: Path) -> Iterator[None]:
    token = _held.set(folders)
    try:
        yield
    finally:
        _held.reset(token)


def refuse_foreign_files(folder: Path, config: Config, names: Iterable[str], with_lock: bool = False) -> None:
    """Raise ConfigError if a new run would replace files that no run has written. A run that is resumed replaces less:
    only a config.yaml of the user's is in its way.

    names: the files and folders that the run replaces
    with_lock: whether the lock of a run must be there too. The queue of a run in separate processes writes before its
        learner takes the lock.
    """
    found = [name for name in ((FILE,) if config.run.resume else names) if os.path.lexists(folder / name)]
    if not _is_free_or_lock(folder / "lock"):
        found.append("lock")
    elif _is_written(folder / FILE) and (config.run.resume or not with_lock or (folder / "lock").is_file()):
        return
    if found:
        raise ConfigError(
            "run.name",
            config.run.name,
            f"{folder} holds {', '.join(found)}, and not the lock and the {FILE} of a run of asyncrl; a run would "
            "replace them",
            "set another run.name or run.dir, or move the files away; a run whose processes were started one by one "
            "by an earlier version left no lock: set run.resume=true to go on with it",
        )


def refuse_own_config(file: str | Path, config: Config) -> None:
    """Raise ConfigError if a new run would write over its own configuration, `file`."""
    folder = run_folder(config)
    if not config.run.resume and Path(file).resolve() == (folder / FILE).resolve():
        rule = f"{file} is where the new run in {folder} would write its own configuration"
        remedy = "set run.resume=true to go on with the run of this folder, or another run.name or run.dir"
        raise ConfigError("run.name", config.run.name, rule, remedy)


def remove_empty(folder: Path) -> None:
    """Remove the folder of a run that has not begun, if nothing but its lock is in it. The caller holds the lock."""
    with suppress(OSError):
        if {path.name for path in folder.iterdir()} <= {"lock"}:
            (folder / "lock").unlink(missing_ok=True)
            folder.rmdir()


def find_run(target: str) -> Path:
    """The folder of a run, given as such or by its name under runs/."""
    return next((path for path in (Path(target), RUNS / target) if path.is_dir()), Path(target))


def config_of(folder: Path) -> Config:
    """The configuration of the run. ConfigError (key run) if the folder has none."""
    written = folder / "config.yaml"
    if not written.exists():
        remedy = "give the folder of a run, or its name under runs/"
        raise ConfigError("run", str(folder), "holds no config.yaml", remedy)
    return load_config(written)


def read_summary(folder: Path) -> dict[str, Any]:
    """The learner's summary of a run that is over; empty if there is none. ConfigError for a damaged file."""
    path = folder / "summary.json"
    if not path.exists():
        return {}
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(summary, dict):
            raise ValueError(f"it is no mapping but of type {type(summary).__name__}")
    except ValueError as error:
        remedy = "remove it: metrics.jsonl holds the figures of each version"
        raise ConfigError("run", str(folder), f"{path} cannot be read ({error})", remedy) from None
    return summary


def write_address(folder: Path, address: str) -> None:
    """Write the address of this run's broker, for people and processes that come later. Whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "address", address + "\n")


def read_address(folder: Path) -> str:
    """The address of the run's broker. ConfigError (key run) if the folder has none."""
    try:
        return (folder / "address").read_text(encoding="utf-8").strip()
    except OSError:
        remedy = "give the folder of a run that has started, or an address"
        raise ConfigError("run", str(folder), "holds no address of a queue", remedy) from None


def _is_written(path: Path) -> bool:
    """Whether asyncrl has written this configuration."""
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(len(WRITTEN_BY)) == WRITTEN_BY
    except (OSError, UnicodeDecodeError):
        return False


def _is_free_or_lock(path: Path) -> bool:
    """Whether nothing is there, or the lock of a run: empty, or a process number."""
    if not os.path.lexists(path):
        return True
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(32)
    except (OSError, UnicodeDecodeError):
        return False
    return not path.is_symlink() and (not text or text.isdigit())


@contextmanager
def _open_lock(folder: Path, config: Config) -> Iterator[TextIO]:
    """The lock file of a folder, which is made where there is none."""
    path = folder / "lock"
    for _ in range(MOST_TRIES):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = path.open("a+", encoding="utf-8")
        except FileNotFoundError:
            continue  # another run, which did not begin, has removed the folder in between
        except OSError as error:
            rule = f"{folder} cannot be made or written: {error.strerror}"
            raise ConfigError("run.dir", config.run.dir, rule, "give a folder that you may write") from None
        with lock:
            _take(lock, config)
            if _is_at(lock, path):
                yield lock
                return
    rule = f"{folder} was removed {MOST_TRIES} times while its lock was taken"
    raise ConfigError("run.dir", config.run.dir, rule, "give a folder that nothing else removes")


def _is_at(lock: TextIO, path: Path) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _take(lock: TextIO, config: Config) -> None:
    # The kernel frees the lock when the process ends, however it ends: there are no stale locks.
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        rule = f"a live run uses {run_folder(config)} (process {owner})"
        remedy = "stop it first, or set another run.name"
        raise ConfigError("run.name", config.run.name, rule, remedy) from None


def _write_owner(lock: TextIO) -> None:
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()


def remove_run(config: Config) -> None:
    """Remove the run's folder with all that is in it. ConfigError if a live run uses it."""
    folder = run_folder(config)
    with _open_lock(folder, config):
        shutil.rmtree(folder)


def refuse_a_past_run(folder: Path, config: Config) -> None:
    """Raise ConfigError (key run.name) if the folder holds anything of a run that has trained.

    A run that was stopped at version 0 has learned nothing: its rows and its checkpoint make room for the new run.
    """
    trained = any(row.get("version", 0) > 0 for row in read_rows(folder / "metrics.jsonl"))
    saved = {path.name for path in folder.glob("checkpoints/*")} - {OF_VERSION_0}
    if trained or saved or (folder / "final").exists():
        remedy = f"set run.resume=true to go on with it, or another run.name, or remove {folder}"
        raise ConfigError("run.name", config.run.name, f"{folder} holds a run already", remedy)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "checkpoints" / OF_VERSION_0, ignore_errors=True)
