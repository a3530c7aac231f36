"""Rows that are read from disk on access: a JSONL file, or a data set of the package `datasets`.

Both read any row by its number in constant time and memory: a JSONL file at the row's offset, a data set from a
memory-mapped Arrow table.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from asyncrl.errors import ConfigError, TaskError
from asyncrl.telemetry.bars import bars_wanted

HUB = "hf:"
"""'hf:openai/gsm8k' is a data set of the Hugging Face hub."""

DEFAULT_SPLIT = "train"
"""The split that is read unless options name another."""

FOLDER_OPTIONS = ("split", "subset", "revision")


class JsonlRows(Sequence[Any]):
    """One row per line, without empty lines. It takes 16 bytes of memory per row.

    Access raises TaskError, with file and line, for a row that is not JSON.
    """

    def __init__(self, path: Path, section: str) -> None:
        """
        Raises:
            ConfigError: The file of `section`.source cannot be read.
            TaskError: The file has no rows.
        """
        self._path, self._starts, self._lines = path, array("q"), array("q")
        start = 0
        try:
            self._file = path.open("rb")
            for number, line in enumerate(self._file, start=1):
                if line.strip():
                    self._starts.append(start)
                    self._lines.append(number)
                start += len(line)
        except OSError as error:
            rule = error.strerror or "cannot be read"
            raise ConfigError(
                f"{section}.source", str(path), rule, "give the path of a .jsonl file"
            ) from None
        if not self._lines:
            raise TaskError(f"{path}: holds no tasks")
        self._starts.append(start)

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        start, end = self._starts[at], self._starts[at + 1]
        try:
            return json.loads(os.pread(self._file.fileno(), end - start, start).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise TaskError(f"{self.place(at)}: not UTF-8: {error.reason}") from None
        except json.JSONDecodeError as error:
            raise TaskError(f"{self.place(at)}: not JSON: {error.msg} at column {error.colno}") from None

    def place(self, index: int) -> str:
        """'file:line'"""
        return f"{self._path}:{self._lines[index]}"


def data_set(source: str, options: Mapping[str, Any], section: str) -> Any:
    """Load a `datasets.Dataset`.

    Args:
        source: a .parquet file, a hub name, a folder made by `save_to_disk`, or one of .parquet, .jsonl, .csv, … files.
        options: split; for a folder of files or a hub name also subset and revision.

    Raises:
        ConfigError: The source cannot be loaded.
    """
    for name in options:
        if name not in FOLDER_OPTIONS:
            rule = f"is no option of {source}"
            remedy = f"the options are {', '.join(FOLDER_OPTIONS)}"
            raise ConfigError(f"{section}.options.{name}", options[name], rule, remedy)
    try:
        import datasets
    except ImportError:
        rule, remedy = (
            "is read by the package datasets, which is not installed",
            "pip install 'asyncrl[data]'",
        )
        raise ConfigError(f"{section}.source", source, rule, remedy) from None
    if not bars_wanted():
        datasets.disable_progress_bars()
    try:
        return _load(datasets, source, **options)
    except Exception as error:
        rule = f"cannot be loaded ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        remedy = f"check the path or name, and {section}.options.split and .subset"
        raise ConfigError(f"{section}.source", source, rule, remedy) from error


def _load(
    datasets: Any,
    source: str,
    split: str | None = None,
    subset: str | None = None,
    revision: str | None = None,
) -> Any:
    if source.startswith(HUB):
        name = source.removeprefix(HUB)
        return datasets.load_dataset(name, subset, split=split or DEFAULT_SPLIT, revision=revision)
    path = Path(source)
    if path.is_file():
        return datasets.load_dataset(
            "parquet", data_files={DEFAULT_SPLIT: source}, split=split or DEFAULT_SPLIT
        )
    if (path / "dataset_dict.json").exists():
        return datasets.load_from_disk(source)[split or DEFAULT_SPLIT]
    if (path / "state.json").exists():
        if split or subset or revision:
            raise ValueError("a single data set made by save_to_disk has no split, subset or revision")
        return datasets.load_from_disk(source)
    return datasets.load_dataset(source, subset, split=split or DEFAULT_SPLIT)
