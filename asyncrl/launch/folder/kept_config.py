"""config.yaml of a run folder: what the run was begun with, and what it went on with after each resume.

runs/demo/config.yaml            of now
runs/demo/config.v000012.yaml    up to version 12, from which the run went on with the next one
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from asyncrl.config.config_consistency import as_texts, differences, is_agreed
from asyncrl.config.docs import VERSION_LINE
from asyncrl.config.load import load_config, save_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError

FILE = "config.yaml"

OF_THE_START = ("run.resume", "run.resume_changed", "queue.address")
"""Keys that decide how a run is started, not what it computes."""

SAME_TASKS = ("tasks.", "run.seed", "model.path")
"""With another value of these a run does not go on: what follows is not what would have followed."""

Change = tuple[str, str, str]
"""Key, value before, value now."""


def keep_config(config: Config, folder: Path) -> bool:
    """Write config.yaml. Where a run goes on with another one, print the differences on stderr and keep the old one.

    Returns whether groups that the run has not trained yet were made by other rules, or by another asyncrl. Raises
    ConfigError, and leaves everything as it was, for changes of SAME_TASKS without run.resume_changed.
    """
    path = folder / FILE
    folder.mkdir(parents=True, exist_ok=True)
    goes_on = config.run.resume and path.exists()
    same_package = goes_on and path.read_text(encoding="utf-8").startswith(VERSION_LINE + "\n")
    changes = _changes(path, config) if goes_on else []
    if changes:
        _refuse_other_tasks(changes, config)
        version = max((one.name for one in folder.glob("checkpoints/v*")), default="v0")
        before = path.with_suffix(f".{version}.yaml")
        if not before.exists():  # nothing is left of what was trained with one between
            os.replace(path, before)
        for key, was, now in changes:
            print(f"{folder} goes on from {version} with {key}: {now}, not {was}", file=sys.stderr)
        print(f"{before} is the configuration up to there", file=sys.stderr, flush=True)
    save_config(config, path)
    return goes_on and (not same_package or any(is_agreed(key) for key, *_ in changes))


def _changes(path: Path, config: Config) -> list[Change]:
    try:
        before = load_config(path)
    except ConfigError as error:  # of another version of asyncrl
        return [(str(path), f"a configuration that this version does not take ({error})", "of this version")]
    return [
        change for change in differences(as_texts(before), as_texts(config)) if change[0] not in OF_THE_START
    ]


def _refuse_other_tasks(changes: list[Change], config: Config) -> None:
    for key, was, now in changes:
        if key.startswith(SAME_TASKS) and not config.run.resume_changed:
            raise ConfigError(
                key,
                now,
                f"the run was begun with {was}: other tasks, or another order or model, is another run",
                "leave it as it was, or set run.resume_changed=true if that is what you want",
            )
