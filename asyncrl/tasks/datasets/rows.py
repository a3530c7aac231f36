"""The rows of a source, read from disk on access, and the `Task` of each: selected fields and a framed prompt.

A JSONL file and a data set of the package `datasets` give any row by its number in constant time and memory: the one at
the row's offset, the other from a memory-mapped Arrow table.
"""

from __future__ import annotations

import difflib
import json
import os
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack

from asyncrl.config.sections.tasks import SourceConfig
from asyncrl.errors import ConfigError, TaskError
from asyncrl.system.packages import imported
from asyncrl.tasks.datasets.images import with_images
from asyncrl.telemetry.bars import bars_wanted
from asyncrl.types import Task

Row = Task | Mapping[str, Any]
PromptValue = str | list[dict[str, Any]]
Check = Callable[[Task], None]

HUB = "hf:"
"""'hf:openai/gsm8k' is a data set of the Hugging Face hub."""

DEFAULT_SPLIT = "train"
"""The split that is read unless options name another."""

FOLDER_OPTIONS = ("split", "subset", "revision")


class JsonlRows:
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

    def __getitem__(self, index: int) -> Any:
        start, end = self._starts[index], self._starts[index + 1]
        try:
            return json.loads(os.pread(self._file.fileno(), end - start, start).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise TaskError(f"{self.place(index)}: not UTF-8: {error.reason}") from None
        except json.JSONDecodeError as error:
            raise TaskError(f"{self.place(index)}: not JSON: {error.msg} at column {error.colno}") from None

    def place(self, index: int) -> str:
        """'file:line'"""
        return f"{self._path}:{self._lines[index]}"


def data_set(source: str, options: Mapping[str, Any], section: str) -> Any:
    """Load a `datasets.Dataset`. Raises ConfigError if it cannot be loaded.

    source   a .parquet file, a hub name, a folder made by `save_to_disk`, or one of .parquet, .jsonl, .csv, … files
    options  split; for a folder of files or a hub name also subset and revision
    """
    for name in options:
        if name not in FOLDER_OPTIONS:
            rule = f"is no option of {source}"
            remedy = f"the options are {', '.join(FOLDER_OPTIONS)}"
            raise ConfigError(f"{section}.options.{name}", options[name], rule, remedy)
    datasets = imported("datasets", "data", f"{section}.source", source)
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


# ---- tasks


@dataclass(frozen=True, slots=True)
class RowReader:
    """(ordinal, index of the row in its source, row) → Task. Raises TaskError for a row without a valid task.

    config: the source's configuration · section: its name · place: the file and line of a row, for errors
    check: raises TaskError for a task that its reader cannot use
    """

    config: SourceConfig
    section: str
    place: Callable[[int], str]
    check: Check | None = None

    def __call__(self, ordinal: int, index: int, row: Row) -> Task:
        try:
            if isinstance(row, Task):
                task = replace(row, ordinal=ordinal)
            elif isinstance(row, Mapping):
                task = Task(ordinal, self._prompt(row), self._data(row))
            else:
                key = self.config.prompt_key
                raise TaskError(f"is a {type(row).__name__}, not a mapping with the key {key!r}")
            if not _is_prompt(task.prompt):
                raise TaskError("the prompt must be a text or a list of messages with role and content")
            task = replace(task, prompt=with_images(task.prompt, self._images(row), self._folder))
            self._check_can_be_sent(task)
            task = replace(task, prompt=framed(task.prompt, self.config))
            if self.check is not None:
                self.check(task)
        except TaskError as error:
            raise TaskError(f"{self.place(index)}: {error}") from None
        return task

    def _prompt(self, row: Mapping[str, Any]) -> Any:
        key = self.config.prompt_key
        try:
            return self._field(row, key)
        except TaskError as error:
            near = difflib.get_close_matches(key, [str(name) for name in row], n=1)
            if not near:
                raise TaskError(f"{error}; {self.section}.prompt_key names the field of the prompt") from None
            meant = (
                f"did you mean {near[0]!r}? Rename it to {key!r}, or set {self.section}.prompt_key={near[0]}"
            )
            raise TaskError(f"{error}; {meant}") from None

    def _images(self, row: Row) -> Any:
        """A list, or None for a row without the field."""
        key = self.config.images_key
        found = row.get(key) if key is not None and isinstance(row, Mapping) else None
        return found if found is None or isinstance(found, list | tuple) else [found]

    @property
    def _folder(self) -> Path:
        """The folder where relative paths begin: that of a file of rows."""
        source = Path(self.config.source or "")
        return source.parent if source.suffix in (".jsonl", ".parquet") else Path()

    def _data(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if self.config.fields:
            return {name: self._field(row, field) for name, field in self.config.fields.items()}
        apart = {self.config.prompt_key, self.config.images_key}
        return {name: value for name, value in row.items() if name not in apart}

    def _field(self, row: Mapping[str, Any], name: str) -> Any:
        if name in row:
            return row[name]
        outer, dot, inner = name.partition(".")
        if dot and isinstance(row.get(outer), Mapping):
            return self._field(row[outer], inner)
        raise TaskError(f"has no {name!r}, only {', '.join(map(repr, row)) or 'nothing'}")

    def _check_can_be_sent(self, task: Task) -> None:
        for part, value, remedy in (
            ("prompt", task.prompt, "keep texts and numbers in its messages"),
            ("data", dict(task.data), f"select fields that can with {self.section}.fields"),
        ):
            try:
                msgpack.packb(value)
            except (TypeError, ValueError, OverflowError) as error:
                raise TaskError(f"its {part} cannot be sent to another process: {error}; {remedy}") from None


def framed(prompt: PromptValue, config: SourceConfig) -> PromptValue:
    """Messages if a chat template is used, with the configured system prompt unless the row has one."""
    if isinstance(prompt, str):
        if config.system is None and not config.chat:
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    # In a table all messages have all fields. Empty ones would confuse a chat template.
    messages = [{name: value for name, value in m.items() if value is not None} for m in prompt]
    if config.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": config.system})
    return messages


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in prompt)
    )
