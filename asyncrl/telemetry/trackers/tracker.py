"""The seam of trackers: one run, as a package for experiments sees it, and the calls that its tracker gets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from asyncrl.masking import masked_url
from asyncrl.system.disk import replace_text

ROLLOUTS = "rollouts"
"""The name of the table of rollouts."""

COLUMNS = ("prompt", "answer", "reward", "tokens", "finish")
"""Its columns, which are keys of the rows of rollouts.jsonl."""

SECRET = re.compile(
    r"(urls?|address|api_?key|token|secret|password|authorization|headers?|credentials?)$", re.IGNORECASE
)
"""Ends of keys whose values may be or contain passwords; options of the user's own functions have any name."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """resume_at: the version at which the run resumes; None for a new one · settings: its configuration by section"""

    name: str
    folder: Path
    resume_at: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    project: str | None = None
    group: str | None = None
    tags: Sequence[str] = ()
    notes: str | None = None

    def project_or(self, variable: str) -> str:
        """The project, else the one of an environment variable, else asyncrl."""
        return self.project or os.environ.get(variable) or "asyncrl"

    def public_settings(self) -> dict[str, Any]:
        """The settings by dotted key, without addresses."""
        return dict(_leaves(self.settings, ""))


class Tracker(Protocol):
    """Used by one thread. Each call may fail or wait for long; see `background.py`."""

    def write(self, version: int, numbers: Mapping[str, float]) -> None:
        """A version may come in parts, and an evaluation after later versions."""

    def write_rollouts(self, version: int, table: Sequence[Sequence[Any]]) -> None:
        """table: rows of `COLUMNS`"""

    def close(self) -> None: ...


class KeptId:
    """The name of a run in its tracker, which a resumed run goes on with. In RUN/<tracker>_id."""

    def __init__(self, run: TrackedRun, tracker: str) -> None:
        self._path = run.folder / f"{tracker}_id"
        self.known = None
        if run.resume_at is not None and self._path.exists():
            self.known = self._path.read_text(encoding="utf-8")

    def keep(self, name: str) -> None:
        replace_text(self._path, name)


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row, without the version.

    >>> numbers({"version": 3, "loss": 0.5, "late": True, "note": "no number"})
    {'loss': 0.5}
    """
    return {
        name: value
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "version"
    }


def _leaves(section: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in section.items():
        if isinstance(value, Mapping):
            found += _leaves(value, f"{prefix}{name}.")
        elif not SECRET.search(name):
            found.append((f"{prefix}{name}", _public(value)))
    return found


def _public(value: Any) -> Any:
    """A value without secrets, those inside lists too."""
    if isinstance(value, Mapping):
        return {name: _public(each) for name, each in value.items() if not SECRET.search(name)}
    if isinstance(value, list | tuple):
        return [_public(each) for each in value]
    return masked_url(value) if isinstance(value, str) else value
