"""code.json of a run folder: a digest of each file with functions of the user's, so that a resume notices new code.

runs/demo/code.json   {"rewards.py:right": {"file": "/home/me/rewards.py", "digest": "…", "keys": ["reward.function"]}}
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.system.disk import replace_text

FILE = "code.json"
PACKAGE = Path(__file__).parents[2]


def keep_code(config: Config, folder: Path) -> list[str]:
    """Write code.json. Where a run goes on with other code, name on stderr what has changed.

    Returns:
        The lines that were written to stderr.
    """
    path = folder / FILE
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
    yield "generator.own_engine", config.generator.own_engine or ""
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
