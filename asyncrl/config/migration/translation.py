"""The engine of `asyncrl import`: keys and values of another trainer become settings, or lines that say why not.

    file, words ──▸ given {their key: value} ──▸ rows of a table ──▸ settings {our key: (value, their keys)}
                                             └▸ `together`: keys that count together ─┘   └▸ left {their key: why}

A key that the file leaves out has the other trainer's default, which becomes a setting if asyncrl's default differs.
Every given key is named in the text that comes out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrl.config.load import all_keys, load_config, parse_file, setting_of_word, settings_of
from asyncrl.config.schema import Config
from asyncrl.config.sections.run import TRACKERS
from asyncrl.config.yaml_values import one_line, parse_yaml
from asyncrl.errors import ConfigError

VERSIONS = "set run.versions, which counts batches, to the rows, divided by batch.groups, times"
FEW = 3
"""Keys of one pattern that are listed with their values; more are listed by name."""

LISTED = textwrap.TextWrapper(width=110, break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True)
class KeyRow:
    """A row of a table; the head of `verl.yaml` explains the fields."""

    to: str | None = None
    default: Any = None
    values: Mapping[Any, Any] = field(default_factory=dict)
    when: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    beside: str | None = None
    why: str = "has no effect beside the other keys"


UNKNOWN = KeyRow(why="no key is known that stands for it: look for what it does in docs/keys.md")


@dataclass
class Translation:
    """given: values by key, as the file has them · rows: of the other trainer's keys, and of patterns of keys."""

    trainer: str
    given: Mapping[str, Any]
    rows: Mapping[str, KeyRow]
    settings: dict[str, tuple[Any, list[str]]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)

    def __getitem__(self, key: str) -> Any:
        """The value of one of their keys, or its default there. Raises ConfigError for a text in place of a number."""
        self._read.add(key)
        value, default = self.given.get(key), self.rows[key].default
        if isinstance(value, str) and isinstance(default, int | float) and not self.rows[key].values:
            raise ConfigError(key, value, "must be a number", "write it without quotes")
        return default if value is None else value

    def set(self, ours: str, value: Any, *theirs: str) -> None:
        self.settings[ours] = value, [key for key in dict.fromkeys(theirs) if key in self.given]

    def set_some(self, ours: str, values: Mapping[str, Any], *theirs: str) -> None:
        """Set a mapping without its empty values."""
        self.set(ours, {name: value for name, value in values.items() if value}, *theirs)

    def leave(self, why: str, *theirs: str, default_too: bool = False) -> None:
        """Note why these keys have no counterpart, for those of them that the file gives. default_too: for the others
        as well."""
        self.left.update({key: why for key in theirs if default_too or key in self.given})

    def set_trackers(self, key: str) -> None:
        """Set the trackers that a key names: one, or several."""
        names = [self[key]] if isinstance(self[key], str) else self[key] or []
        self.set("telemetry.trackers", [name for name in names if name in TRACKERS], key)
        if not {*names} <= {*TRACKERS, "console", "none"}:
            self.leave(f"there are {', '.join(TRACKERS)}", key)

    def apply_rows(self) -> None:
        for key, row in self.rows.items():
            if row.to is not None and (value := self[key]) is not None:
                self._apply(key, row, value)

    def _apply(self, key: str, row: KeyRow, value: Any) -> None:
        for other, counts in row.when.items():
            if self[other] not in counts:
                return self.leave(f"counts only with {other}={one_line(counts[0])}", key)
        if isinstance(value, Hashable) and value in row.values:
            value = row.values[value]
        elif row.values and isinstance(value, str | bool):
            return self.leave(row.why, key)
        several = value if isinstance(value, dict) and row.values else {str(row.to): value}
        for ours, one in several.items():
            if one is not None:
                self.set(ours, one if row.beside is None else [one, self[row.beside]], key, row.beside or key)
        return None

    def leave_the_rest(self) -> None:
        """All given keys that nothing has read."""
        for key in self.given.keys() - self._read:
            self.left[key] = self.rows.get(self._row_of(key), UNKNOWN).why

    def _row_of(self, key: str) -> str:
        """The key itself, or the first pattern that fits; empty for none."""
        return key if key in self.rows else next((row for row in self.rows if fnmatchcase(key, row)), "")

    @property
    def tree(self) -> dict[str, Any]:
        """The settings by key, in the order of docs/keys.md; without those that only repeat a default."""
        ours, ordered = Config(), [key for key in all_keys() if key in self.settings]
        chosen = {key: self.settings[key] for key in ordered}
        return {
            key: value for key, (value, theirs) in chosen.items() if theirs or value != attrgetter(key)(ours)
        }

    def text(self, where: str) -> str:
        """The configuration as YAML, each key with its origin, and what was not translated."""
        named = {key for ours in self.tree for key in self.settings[ours][1]} | self.left.keys()
        parts = {
            "Not translated": self._left_lines(),
            "Read, without a setting of their own": (
                f"{key} = {one_line(value)}" for key, value in self.given.items() if key not in named
            ),
            "To be corrected": self._faults(where),
        }
        lines = [f"# Made of {where} of {self.trainer} by `asyncrl import`", *self._setting_lines()]
        for title, entries in parts.items():
            if found := [f"#   {entry}".replace("\n", " ") for entry in entries]:
                lines += ["", f"# {title}:", *found]
        return "\n".join(lines) + "\n"

    def _setting_lines(self) -> Iterator[str]:
        before: list[str] = []
        for key, value in self.tree.items():
            *sections, name = key.split(".")
            for depth, section in enumerate(sections):
                if sections[: depth + 1] != before[: depth + 1]:
                    yield f"{'  ' * depth}{section}:"
            before = sections
            origin = ", ".join(self.settings[key][1]) or f"{self.trainer}'s default"
            yield f"{'  ' * len(sections)}{name}: {one_line(value)}  # {origin}"

    def _left_lines(self) -> Iterator[str]:
        alike: dict[str, list[str]] = {}
        for key in sorted(self.left):
            alike.setdefault(self._row_of(key) or key, []).append(key)
        for row, keys in alike.items():
            if len(keys) > FEW:
                yield f"{row}: {self.left[keys[0]]}"
                yield from (f"  {line}" for line in LISTED.wrap(", ".join(keys)))
                continue
            for key in keys:
                yield f"{key} = {one_line(self.given.get(key, 'unset'))}: {self.left[key]}"

    def _faults(self, where: str) -> Iterator[str]:
        try:
            load_config(None, settings=[*settings_of(self.tree, where)])
        except ConfigError as error:
            yield from map(str, error.each)


def translate(
    trainer: str, together: Callable[[Translation], None], path: Path, words: Sequence[str]
) -> Translation:
    """Translate a file of `trainer`, with key=value words over it. Raises ConfigError if it cannot be read."""
    table = parse_yaml(Path(__file__).with_name(f"{trainer.lower()}.yaml").read_text("utf-8"))
    rows = {key: KeyRow(**row) for key, row in table["rows"].items()}

    def named(key: str) -> str:
        """The newest name of a key."""
        for old, new in table["aliases"].items():
            if key.startswith(old):
                return f"{new}{key.removeprefix(old)}"
        return key

    given: dict[str, Any] = {}
    for key, value in _leaves(_parsed(path, words), lambda key: named(key) in rows):
        if named(key) == key:
            given.setdefault(key, value)
        elif value is not None:  # verl itself has its old names beside the new ones, as null
            given[named(key)] = value
    unresolved = {key: value for key, value in given.items() if isinstance(value, str) and "${" in value}
    translation = Translation(trainer, {key: given[key] for key in given if key not in unresolved}, rows)
    for key, value in unresolved.items():
        translation.leave(f"{value} refers to what the file lacks: give its value", key, default_too=True)
    translation.apply_rows()
    together(translation)
    translation.leave_the_rest()
    return translation


def _parsed(path: Path, words: Sequence[str]) -> Any:
    tree = OmegaConf.create(parse_file(path)[0])
    for setting in map(setting_of_word, words):
        OmegaConf.update(tree, setting.key.lstrip("+"), setting.value, force_add=True)
    return tree


def _leaves(node: Any, is_leaf: Callable[[str], bool], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) with `${…}` resolved as far as the file goes. is_leaf: of a mapping that is a value."""
    plain: Any = OmegaConf.to_container(node)
    for name, value in plain.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and not is_leaf(key):
            yield from _leaves(node[name], is_leaf, f"{key}.")
        elif value != MISSING:
            with suppress(OmegaConfBaseException):
                resolved: Any = OmegaConf.to_container(OmegaConf.create([node[name]]), resolve=True)
                value = resolved[0]
            yield key, value
