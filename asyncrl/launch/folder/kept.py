"""A run folder keeps the configuration of each start and digests of the user's code: a resume notices changes of both.

runs/demo/config.yaml            of now
runs/demo/config.v000012.yaml    up to version 12, from which the run went on with the next one
runs/demo/decisions/config-4f1c….yaml    of a process whose decisions are recorded
runs/demo/code.json              {"rewards.py:right": {"file": "/home/me/rewards.py", "digest": "…",
                                  "keys": ["reward.function"]}}
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.config.commented_yaml import VERSION_LINE
from asyncrl.config.config_consistency import as_texts, differences, is_agreed
from asyncrl.config.load import load_config, save_config
from asyncrl.config.schema import Config
from asyncrl.config.sections.generator import key_of_pool
from asyncrl.errors import ConfigError
from asyncrl.system.disk import replace_text

FILE = "config.yaml"
ANEW = "queue_anew"
"""There from a change of the rules until the queue has begun anew."""

OF_THE_START = ("run.resume", "run.resume_changed", "queue.address")
"""Keys that decide how a run is started, not what it computes."""

SAME_TASKS = ("tasks.", "run.seed", "model.path")
"""With another value of these a run does not go on: what follows is not what would have followed."""

Change = tuple[str, str, str]
"""Key, value before, value now."""


def keep_config(config: Config, folder: Path) -> bool:
    """Write config.yaml. Where a run goes on with another one, print the differences on stderr and keep the old one.

    Returns whether groups that the run has not trained yet were made by other rules, or by another asyncrl: then again
    until `queue_begins_anew`, whoever is killed in between. Raises ConfigError, and leaves everything as it was, for
    changes of SAME_TASKS without run.resume_changed.
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
            replace_text(before, path.read_text(encoding="utf-8"), mode=path.stat().st_mode & 0o777)
        for key, was, now in changes:
            print(f"{folder} goes on from {version} with {key}: {now}, not {was}", file=sys.stderr)
        print(f"{before} is the configuration up to there", file=sys.stderr, flush=True)
    if goes_on and (not same_package or any(is_agreed(key) for key, *_ in changes)):
        (folder / ANEW).touch()
    elif not config.run.resume:
        queue_begins_anew(folder)
    save_config(config, path)
    return (folder / ANEW).exists()


def keep_of_process(config: Config, folder: Path) -> str:
    """Write the configuration of this process, which may have keys of its own, into `folder`. Returns the name of the
    file; processes with equal configurations share it."""
    digest = hashlib.blake2b(json.dumps(as_texts(config)).encode(), digest_size=6).hexdigest()
    path = folder / f"config-{digest}.yaml"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_config(config, path)
    return path.name


def queue_begins_anew(folder: Path) -> None:
    """The queue has forgotten the groups that were made by other rules."""
    (folder / ANEW).unlink(missing_ok=True)


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
            rule = f"the run was begun with {was}: other tasks, or another order or model, is another run"
            remedy = "leave it as it was, or set run.resume_changed=true if that is what you want"
            raise ConfigError(key, now, rule, remedy)


PACKAGE = Path(__file__).parents[2]


def keep_code(config: Config, folder: Path) -> list[str]:
    """Write code.json. Where a run goes on with other code, name what has changed on stderr; returns these lines."""
    path = folder / "code.json"
    now = _digests(config)
    before: dict[str, str] = {}
    if config.run.resume and path.exists():
        before = _read(path)
    lines = [
        f"{folder} goes on with other code: {' and '.join(entry['keys'])} = {spec}, whose file {entry['file']} has "
        "changed since the run was last started; groups that wait in the queue were made by the code before"
        for spec, entry in now.items()
        if spec in before and before[spec] != entry["digest"]
    ]
    for line in lines:
        print(line, file=sys.stderr, flush=True)
    replace_text(path, json.dumps(now, indent=2) + "\n")
    return lines


def _read(path: Path) -> dict[str, str]:
    """The digest of each function's file. A damaged code.json is named on stderr, and no code is compared."""
    try:
        return {spec: entry["digest"] for spec, entry in json.loads(path.read_text(encoding="utf-8")).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        print(
            f"{path} cannot be read ({error}): changes of your code since the last start are not noticed",
            file=sys.stderr,
        )
        return {}


def _digests(config: Config) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key, spec in _functions(config):
        file = _file_of(spec)
        if file is None or file.is_relative_to(PACKAGE):
            continue
        digest = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
        found.setdefault(spec, {"file": str(file), "digest": digest, "keys": []})["keys"].append(key)
    return found


def _functions(config: Config) -> Iterator[tuple[str, str]]:
    """(key, spec) of each function that the configuration names."""
    for name in config.reward.functions or ("",):
        key = f"reward.functions.{name}.function" if name else "reward.function"
        yield key, config.reward.of(name).function or ""
    for source in config.tasks.sources or ("",):
        key = f"tasks.mixture.{source}.source" if source else "tasks.source"
        yield key, (config.tasks.sources[source] if source else config.tasks).source or ""
    for name, chosen in config.evaluation.named_sets.items():
        yield f"evaluation.sets.{name}.source" if name else "evaluation.source", chosen.source or ""
    for tool in config.agent.tools:
        yield "agent.tools", tool
    yield "agent.environment", config.agent.environment or ""
    yield "agent.function", config.agent.function or ""
    for name, generators in config.generator_pools.items():
        yield f"{key_of_pool(name)}.own_engine", generators.own_engine or ""
    yield "learner.own_backend", config.learner.own_backend or ""
    yield "algorithm.own_advantage", config.algorithm.own_advantage or ""
    yield "algorithm.own_loss", config.algorithm.own_loss or ""


def _file_of(spec: str) -> Path | None:
    """The source file of 'file.py:function' or 'package.module:function'; None for what is no function."""
    where, _, name = spec.rpartition(":")
    if not name.isidentifier() or not where or ("/" in where and not where.endswith(".py")):
        return None
    if where.endswith(".py"):
        path = Path(where).resolve()
        return path if path.is_file() else None
    try:
        module = importlib.util.find_spec(where)
    except (ImportError, ValueError):
        return None
    return Path(module.origin) if module is not None and module.origin and module.has_location else None
