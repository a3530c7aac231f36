"""Makes a `Task` of a row: selects its fields and frames the prompt."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgpack

from asyncrl.config.sections.tasks import SourceConfig
from asyncrl.errors import TaskError
from asyncrl.types import Task

Row = Task | Mapping[str, Any]
Prompt = str | list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class RowReader:
    """(ordinal, index of the row in its source, row) → Task. Raises TaskError for a row without a valid task.

    config: the source's configuration · section: its name · place: the file and line of a row, for errors
    """

    config: SourceConfig
    section: str
    place: Callable[[int], str]

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
            self._check_can_be_sent(task.data)
        except TaskError as error:
            raise TaskError(f"{self.place(index)}: {error}") from None
        return replace(task, prompt=framed(task.prompt, self.config))

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

    def _data(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if self.config.fields:
            return {name: self._field(row, field) for name, field in self.config.fields.items()}
        return {name: value for name, value in row.items() if name != self.config.prompt_key}

    def _field(self, row: Mapping[str, Any], name: str) -> Any:
        if name in row:
            return row[name]
        outer, dot, inner = name.partition(".")
        if dot and isinstance(row.get(outer), Mapping):
            return self._field(row[outer], inner)
        raise TaskError(f"has no {name!r}, only {', '.join(map(repr, row)) or 'nothing'}")

    def _check_can_be_sent(self, data: Mapping[str, Any]) -> None:
        try:
            msgpack.packb(dict(data))
        except (TypeError, ValueError, OverflowError) as error:
            rule = f"its data cannot be sent to another process: {error}"
            raise TaskError(f"{rule}; select fields that can with {self.section}.fields") from None


def framed(prompt: Prompt, config: SourceConfig) -> Prompt:
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
        and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in prompt)
    )
