"""Rows and functions of a Python caller, where the processes of a run find them: <run folder>/inputs/.

    rows       tasks-<digest>.jsonl
    functions  <name>-<digest>.py, of notebook cells

A file is named by its content: the same inputs have the same names when a run is resumed, and never change under a
run that still reads them. Only their owner can write them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.load import OWN_EYES
from asyncrl.errors import TaskError
from asyncrl.system.disk import replace_text
from asyncrl.types import Task

FOLDER = "inputs"


class Inputs:
    """The inputs of one run. folder: of the run, whose lock the caller holds; none: nothing is written, and the paths
    are only named."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else folder.resolve() / FOLDER
        self._made: list[Path] = []
        self._names: dict[Path, str] = {}

    def rows(self, name: str, rows: Sequence[Any]) -> Path:
        """A .jsonl file of these rows. Raises TaskError for a row that is none, by its index."""
        lines = (_line(name, index, row) for index, row in enumerate(rows))
        path = self._keep(name, ".jsonl", "".join(lines))
        self._names[path] = name
        return path

    def as_given(self, text: str) -> str:
        """A text with places in files of rows, 'inputs/tasks-….jsonl:1', by the caller's names: 'row 1 of tasks'."""
        for path, name in self._names.items():
            text = re.sub(rf"{re.escape(str(path))}:(\d+)", rf"row \1 of {name}", text)
        return text

    def module(self, name: str, text: str) -> Path:
        """A Python file of this text."""
        return self._keep(name, ".py", text)

    def discard(self) -> None:
        """Take back what was written for a run that does not begin."""
        for path in self._made:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # files of an earlier run are in it
                path.parent.rmdir()

    def _keep(self, name: str, suffix: str, text: str) -> Path:
        digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        path = (self._folder or Path(FOLDER)) / f"{name}-{digest}{suffix}"
        if self._folder is None:
            return path
        there = os.path.lexists(path)
        if there and path.is_file() and not path.is_symlink() and path.read_bytes() == text.encode():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text, mode=OWN_EYES)
        if not there:
            self._made.append(path)
        return path


def _line(name: str, index: int, row: Any) -> str:
    if isinstance(row, Task):
        row = {**row.data, "prompt": row.prompt}
    if is_dataclass(row) and not isinstance(row, type):
        row = asdict(row)
    if not isinstance(row, Mapping):
        rule = f"{name}[{index}] is a {type(row).__name__}, not a mapping"
        raise TaskError(f'{rule}; write rows such as {{"prompt": "1+1=", "answer": "2"}}')
    try:
        line = json.dumps(dict(row), ensure_ascii=False, default=_plain) + "\n"
        line.encode()  # no file can hold half of a surrogate pair
    except (TypeError, ValueError, RecursionError) as error:
        raise TaskError(f"{name}[{index}] cannot be written as JSON: {error}") from None
    return line


def _plain(value: Any) -> Any:
    """A scalar or an array of NumPy as Python has it."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}, {value!r:.60}, is no text, number, list or mapping")
