"""From YAML files and `key=value` words to one checked `Config`, and back to YAML that explains itself.

    file ──include──▸ file ──▸ settings (key, value, where it was written) ──▸ schema ──▸ Config
    command line ───────────▸ settings ────────────────────────────────────────▴

Every source becomes a flat list of settings, applied in order: included files first, then the file itself,
then the command line. A setting remembers its file and line, so an error can name them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrl.config import remedies
from asyncrl.config.commented_yaml import key_comments, render
from asyncrl.config.rules import Section, value_errors
from asyncrl.config.schema import Config
from asyncrl.config.yaml_values import LONGEST, parse_with_lines, parse_yaml, with_references
from asyncrl.errors import ConfigError, call_all, raise_all
from asyncrl.system.disk import replace_text

PACKAGE = Path(__file__).parents[1]
CONFIGS = (PACKAGE if (PACKAGE / "configs").is_dir() else PACKAGE.parent) / "configs"
"""The configurations of the project, in an installed package or beside it in a checkout. An `include` that is not next
to its file is looked up here."""

INSTEAD = {"reward.function": "reward.functions"}
"""Required keys that are none where another one is set."""

OWN_EYES = 0o600
"""Permissions of a configuration with a password in it."""

LONGEST_LINE = 400

MOST_FILES = 64
"""Files of one configuration, with all that they include."""

_SECTIONS = frozenset(field.name for field in dataclasses.fields(Config))

_BAD_VALUES = (OmegaConfBaseException, TypeError, ValueError, OverflowError, AttributeError, RecursionError)
"""Errors of OmegaConf for values that do not fit."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of one source, e.g. Setting("batch.groups", 64, "configs/recipes/demo.yaml:12")."""

    key: str
    value: Any
    where: str


def load_config(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    settings: Sequence[Setting] = (),
    optional: Collection[str] = (),
) -> Config:
    """Read, merge, check.

    The file may begin with `include: [file, …]`: files merged before it, found next to it or in `configs/`.
    `overrides` are words such as 'batch.groups=32'; their values are YAML. A mapping is merged with what it was
    before, `key=null` empties it. What `${…}` means: `yaml_values`.
    `settings` come between the file, if there is one, and `overrides`: those of a Python caller (`settings_of`).
    `optional`: keys that are required elsewhere, and null here where they are not set.

    Raises ConfigError: a file that cannot be read or parsed; else all keys that do not exist (with their nearest
    neighbours), values of the wrong type or out of their limits, and required keys without a value; if there are none
    of these, all rules that do not hold.
    """
    of_file = [] if path is None else _settings_of_file(Path(path), (), [])
    tree = copy.deepcopy(_unset())
    every = _last_ones([*of_file, *settings, *map(setting_of_word, overrides)])
    try:
        _apply_all(tree, every, optional)
        return typing.cast(Config, OmegaConf.to_object(tree))
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", None) or "config file"
        refers = "nterpolation" in type(error).__name__ + str(error)
        remedy = "correct the ${…} in this value" if refers else f"give {remedies.in_words(hint_of(key))}"
        raise ConfigError(key, str(path), _first_line(error), remedy) from None


def _apply_all(tree: Any, settings: Iterator[Setting], optional: Collection[str]) -> None:
    """Raise ConfigError for all keys and values that are wrong by themselves, if one of them cannot be applied."""
    try:
        call_all(
            [
                *(partial(_apply, tree, setting) for setting in settings),
                partial(_check_required, tree, optional),
            ]
        )
    except ConfigError as error:
        made = {name: typing.cast(Section, OmegaConf.to_object(tree[name])) for name in sections(Config)}
        out_of_limits = (wrong for name, section in made.items() for wrong in value_errors(section, name))
        raise_all([*error.each, *out_of_limits])


def _check_required(tree: Any, optional: Collection[str]) -> None:
    errors = []
    for key in sorted(OmegaConf.missing_keys(tree)):
        if key in optional or (key in INSTEAD and OmegaConf.select(tree, INSTEAD[key])):
            OmegaConf.update(tree, key, None)
            continue
        about = key_comments().get(key, "it has no default")
        remedy = f"set {key}, in the file or on the command line ({about})"
        errors.append(ConfigError(key, "???", "must be set", remedy))
        OmegaConf.update(tree, key, "")
    raise_all(errors)


def settings_of(tree: Mapping[str, Any], where: str, prefix: str = "") -> Iterator[Setting]:
    """The settings of nested mappings in the shape of a YAML file; a key may be dotted, as on the command line.

    >>> [(one.key, one.value) for one in settings_of({"queue": {"depth": 8}, "batch.groups": 4}, "here")]
    [('queue.depth', 8), ('batch.groups', 4)]
    """
    if not prefix:
        for file in _includes({"include": tree.get("include")}, Path(where)):
            yield from _settings_of_file(_find_include(file, Path(where)), (), [])
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key == "include":
            continue
        if key not in _section_keys():
            yield Setting(key, value, where)
        elif isinstance(value, Mapping):
            yield from settings_of(value, where, f"{key}.")
        elif value is not None:
            yield Setting(key, value, where)


def save_config(config: Config, path: str | Path) -> None:
    """Write what `load_config` reads back as the same `Config`: every key, with its comment.

    The file is replaced whole. Where it holds a password, only its owner may read it.
    """
    text = render(config)
    replace_text(Path(path), text, mode=OWN_EYES if render(config, show_passwords=False) != text else 0o666)


def _settings_of_file(path: Path, including: tuple[Path, ...], read: list[Path]) -> Iterator[Setting]:
    """including: the files that lead here. read: all files so far."""
    if path in including:
        chain = " → ".join(str(p) for p in (*including, path))
        raise ConfigError("include", str(path), f"files include each other: {chain}", "take one include out")
    read.append(path)
    if len(read) > MOST_FILES:
        raise ConfigError(
            "include", str(path), f"is one of more than {MOST_FILES} files", "include fewer files"
        )
    tree, node = parse_file(path)
    for name in _includes(tree, path):
        yield from _settings_of_file(_find_include(name, path), (*including, path), read)
    yield from _leaves(Config, tree, node, "", path)


def _includes(tree: dict[str, Any], path: Path) -> list[str]:
    """The files under `include`, which is taken out of `tree`."""
    includes = tree.pop("include", None) or []
    names = includes if isinstance(includes, list) else [includes]
    if not all(isinstance(name, str) for name in names):
        rule = f"{path} includes what is no file"
        raise ConfigError("include", includes, rule, "write e.g. include: [algorithms/grpo.yaml]")
    return names


def parse_file(path: Path) -> tuple[dict[str, Any], yaml.Node | None]:
    """The file's values, and its YAML nodes, which have line numbers. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST + 1)
        parsed, node = parse_with_lines(text)
        tree = {} if parsed is None else parsed
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            reason = "is no text in UTF-8"
        else:
            reason = getattr(error, "strerror", None) or str(error)  # ValueError: \0 in the path
        raise ConfigError("config file", str(path), reason, "give the path of a YAML file") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            "config file", where, f"is not valid YAML: {problem}", "correct this line"
        ) from None
    if not isinstance(tree, dict):
        raise ConfigError(
            "config file", str(path), "must hold sections, not a list or a word", "see configs/"
        )
    return typing.cast(dict[str, Any], tree), node


def _find_include(name: str, path: Path) -> Path:
    for folder in (path.parent, CONFIGS):
        if (folder / name).is_file():
            return (folder / name).resolve()
    raise ConfigError(
        "include",
        name,
        f"{path} includes a file that is neither in {path.parent} nor in {CONFIGS}",
        remedies.for_include(name, (path.parent, CONFIGS)),
    )


def _leaves(
    schema: type, tree: dict[str, Any], node: yaml.Node | None, prefix: str, path: Path
) -> Iterator[Setting]:
    """Settings of one section and the sections in it; what is no section of the schema is a leaf."""
    nodes = (
        {key.value: (key, value) for key, value in node.value} if isinstance(node, yaml.MappingNode) else {}
    )
    for name, value in tree.items():
        key_node, value_node = nodes.get(str(name), (None, None))
        where = f"{path}:{key_node.start_mark.line + 1}" if key_node else str(path)
        section = sections(schema).get(str(name))
        if section is None:
            yield Setting(f"{prefix}{name}", value, where)
        elif isinstance(value, dict):
            yield from _leaves(section, value, value_node, f"{prefix}{name}.", path)
        elif value is not None:
            yield Setting(f"{prefix}{name}", value, where)


def setting_of_word(word: str) -> Setting:
    """The setting in a word such as 'batch.groups=32'. Raises ConfigError."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError("command line", word, "is not of the form key=value", "write e.g. batch.groups=32")
    try:
        parsed: Any = parse_yaml(f"value: {text}")
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "cannot be read"
        raise ConfigError(key, text, f"is not a YAML value: {problem}", "quote it") from None
    if parsed.keys() != {"value"}:
        raise ConfigError(key, text, "is more than one value", "set each key by a word of its own")
    return Setting(key, parsed["value"], "command line")


def _last_ones(settings: Sequence[Setting]) -> Iterator[Setting]:
    """Without those that a later one of the same key replaces: a wrong value that is mended counts no more. Mappings
    are merged, so all of theirs count."""
    last = {setting.key: index for index, setting in enumerate(settings)}
    for index, setting in enumerate(settings):
        replaced = last[setting.key] > index and setting.key in all_keys()
        if not replaced or any(
            typing.get_origin(kind) is dict for kind in remedies.kinds(hint_of(setting.key))
        ):
            yield setting


@functools.cache
def _unset() -> Any:
    """The tree of all keys without a setting. To make it takes six times as long as to copy it."""
    return _writable(OmegaConf.structured(Config))


def _writable(section: Any) -> Any:
    """OmegaConf makes frozen dataclasses read-only; here they are still being filled in."""
    OmegaConf.set_readonly(section, False)
    for name in sections(typing.cast(type, OmegaConf.get_type(section))):
        _writable(section[name])
    return section


def _apply(tree: Any, setting: Setting) -> None:
    key, value = setting.key, setting.value
    if key in _section_keys():
        remedy = remedies.for_section(key, value, _section_keys()[key])
        raise ConfigError(key, value, f"is a section, not a key ({setting.where})", remedy)
    if key not in all_keys() and not (key.startswith(free_prefixes()) and all(key.split("."))):
        raise ConfigError(key, value, f"no such key ({setting.where})", remedies.for_unknown(key, all_keys()))
    hint = hint_of(key)
    if value is None and typing.get_origin(hint) is dict:
        OmegaConf.update(tree, key, {}, merge=False)  # null empties a mapping, anything else is merged in
        return
    if isinstance(value, float) and value.is_integer() and int in remedies.kinds(hint):  # 1e3
        value = int(value)
    try:
        OmegaConf.update(tree, key, with_references(value, _SECTIONS), merge=True)
    except _BAD_VALUES as error:
        rule = f"{'must have a value' if value is None else _first_line(error)} ({setting.where})"
        remedy = remedies.for_value(hint, value, key_comments().get(key))
        raise ConfigError(key, setting.value, rule, remedy) from error


def hint_of(key: str) -> Any:
    """The type of a key; Any for one below a free-form key."""
    schema: type = Config
    *outer, name = key.split(".")
    for section in outer:
        if section not in sections(schema):
            return Any
        schema = sections(schema)[section]
    return _hints(schema).get(name, Any)


@functools.cache
def _hints(schema: type) -> dict[str, Any]:
    return typing.get_type_hints(schema)


@functools.cache
def sections(schema: type) -> Mapping[str, type]:
    """The keys of a section that are sections themselves. Every setting is looked up here, so it is computed once."""
    return types.MappingProxyType(
        {
            name: hint
            for name, hint in _hints(schema).items()
            if dataclasses.is_dataclass(hint) and isinstance(hint, type)
        }
    )


@functools.cache
def all_keys(schema: type = Config, prefix: str = "") -> tuple[str, ...]:
    """Every dotted key that takes a value."""
    keys: list[str] = []
    for field in dataclasses.fields(schema):
        section = sections(schema).get(field.name)
        keys += all_keys(section, f"{prefix}{field.name}.") if section else [f"{prefix}{field.name}"]
    return tuple(keys)


@functools.cache
def _section_keys() -> dict[str, str]:
    """Dotted name of every section → its first key."""
    found: dict[str, str] = {}
    for key in all_keys():
        parts = key.split(".")
        for depth in range(1, len(parts)):
            found.setdefault(".".join(parts[:depth]), key)
    return found


@functools.cache
def free_prefixes() -> tuple[str, ...]:
    """The keys that hold mappings, each with a dot behind it: below them stand a user's own keys."""
    return tuple(f"{key}." for key in all_keys() if typing.get_origin(hint_of(key)) is dict)


def _first_line(error: Exception) -> str:
    """OmegaConf repeats the value, which may be long."""
    line = str(error).partition("\n")[0].rstrip(".")
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…"
