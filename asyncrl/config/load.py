"""From YAML files and `key=value` words to one checked `Config`, and back to YAML that explains itself.

    file ──include──▸ file ──▸ settings (key, value, where it was written) ──▸ schema ──▸ Config
    command line ───────────▸ settings ────────────────────────────────────────▴

Every source becomes a flat list of settings, applied in order: included files first, then the file itself,
then the command line. A setting remembers its file and line, so an error can name them.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asyncrl.config.docs import key_comments, render
from asyncrl.config.schema import Config
from asyncrl.config.yaml_values import parse, with_references
from asyncrl.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
CONFIGS = (PACKAGE if (PACKAGE / "configs").is_dir() else PACKAGE.parent) / "configs"
"""The configurations of the project, in an installed package or beside it in a checkout. An `include` that is not next
to its file is looked up here."""

FREE = (
    "tasks.options.",
    "agent.options.",
    "evaluation.options.",
    "tasks.fields.",
    "tasks.mixture.",
    "evaluation.fields.",
    "evaluation.sets.",
    "reward.options.",
    "reward.weights.",
    "reward.functions.",
    "generator.vllm.extra.",
)
"""Below these, a user's own keys."""

INSTEAD = {"reward.function": "reward.functions"}
"""Required keys that are none where another one is set."""


IN_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    type(None): "null",
}

_SECTIONS = frozenset(field.name for field in dataclasses.fields(Config))


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of one source, e.g. Setting("batch.groups", 64, "configs/recipes/demo.yaml:12")."""

    key: str
    value: Any
    where: str


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, merge, check.

    The file may begin with `include: [file, …]`: files merged before it, found next to it or in `configs/`.
    `overrides` are words such as 'batch.groups=32'; their values are YAML. A mapping is merged with what it was
    before, `key=null` empties it. What `${…}` means: `yaml_values`.

    Raises ConfigError: a file that cannot be read or parsed, a key that does not exist (with its nearest
    neighbour), a value of the wrong type, a required key without a value, a rule that does not hold.
    """
    settings = [*_settings_of_file(Path(path), ()), *map(_setting_of_word, overrides)]
    tree = _writable(OmegaConf.structured(Config))
    for setting in settings:
        _apply(tree, setting)
    try:
        for key in sorted(OmegaConf.missing_keys(tree)):
            if key in INSTEAD and OmegaConf.select(tree, INSTEAD[key]):
                OmegaConf.update(tree, key, None)
                continue
            about = key_comments().get(key, "it has no default")
            remedy = f"set {key}, in the file or on the command line ({about})"
            raise ConfigError(key, "???", "must be set", remedy)
        return typing.cast(Config, OmegaConf.to_object(tree))
    except OmegaConfBaseException as error:
        key = error.full_key or "config file"
        raise ConfigError(key, str(path), _first_line(error), "correct the ${…} in this value") from None


def save_config(config: Config, path: str | Path) -> None:
    """Write what `load_config` reads back as the same `Config`: every key, with its comment."""
    Path(path).write_text(render(config), encoding="utf-8")


def _settings_of_file(path: Path, including: tuple[Path, ...]) -> Iterator[Setting]:
    if path in including:
        chain = " → ".join(str(p) for p in (*including, path))
        raise ConfigError("include", str(path), f"files include each other: {chain}", "take one include out")
    tree, node = _parse(path)
    for name in _includes(tree, path):
        yield from _settings_of_file(_find_include(name, path), (*including, path))
    yield from _leaves(Config, tree, node, "", path)


def _includes(tree: dict[str, Any], path: Path) -> list[str]:
    """What a file names under `include`, which is taken out of `tree`."""
    includes = tree.pop("include", None) or []
    names = includes if isinstance(includes, list) else [includes]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            "include",
            includes,
            f"{path} includes what is no file",
            "write e.g. include: [algorithms/grpo.yaml]",
        )
    return names


def _parse(path: Path) -> tuple[dict[str, Any], yaml.Node | None]:
    """The file's values, and its YAML nodes, which know their lines."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = parse(text) or {}
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        reason = error.strerror or "cannot be read"
        raise ConfigError("config file", str(path), reason, "give the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
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
        "give a path relative to one of the two",
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


def _setting_of_word(word: str) -> Setting:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError("command line", word, "is not of the form key=value", "write e.g. batch.groups=32")
    try:
        parsed: Any = parse(f"value: {text}")
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "cannot be read"
        raise ConfigError(key, text, f"is not a YAML value: {problem}", "quote it") from None
    return Setting(key, parsed["value"], "command line")


def _writable(section: Any) -> Any:
    """OmegaConf makes frozen dataclasses read-only; here they are still being filled in."""
    OmegaConf.set_readonly(section, False)
    for name in sections(OmegaConf.get_type(section) or dict):
        _writable(section[name])
    return section


def _apply(tree: Any, setting: Setting) -> None:
    if setting.key in _section_keys():
        remedy = f"set the keys below it, e.g. {_section_keys()[setting.key]}"
        raise ConfigError(setting.key, setting.value, f"is a section, not a key ({setting.where})", remedy)
    if not _known(setting.key):
        near = _nearest(setting.key)
        raise ConfigError(
            setting.key,
            setting.value,
            f"no such key ({setting.where})",
            f"did you mean {near}?" if near else "`asyncrl config CONFIG --print` shows every key",
        )
    hint, value = _hint(setting.key), setting.value
    if value is None and typing.get_origin(hint) is dict:
        OmegaConf.update(
            tree, setting.key, {}, merge=False
        )  # null empties a mapping, anything else is merged in
        return
    if isinstance(value, float) and value.is_integer() and int in _kinds(hint):  # 1e3
        value = int(value)
    try:
        OmegaConf.update(tree, setting.key, with_references(value, _SECTIONS), merge=True)
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        rule = f"{'must have a value' if value is None else _first_line(error)} ({setting.where})"
        raise ConfigError(setting.key, setting.value, rule, _remedy(setting.key, hint)) from error


def _remedy(key: str, hint: Any) -> str:
    about = key_comments().get(key)
    return f"give {_in_words(hint)}" + (f": {about}" if about else "")


def _in_words(hint: Any) -> str:
    """What a value of this type is.

    >>> _in_words(int), _in_words(float | None), _in_words(typing.Literal["stop", "skip"])
    ('a whole number', 'a number, or null', 'stop or skip')
    """
    *firsts, last = [
        " or ".join(map(str, typing.get_args(kind)))
        if typing.get_origin(kind) is typing.Literal
        else IN_WORDS.get(typing.get_origin(kind) or kind, "a value of this type")
        for kind in _kinds(hint)
    ]
    return f"{', '.join(firsts)}, or {last}" if firsts else last


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The types that a union is of; of no union itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _hint(key: str) -> Any:
    """The type of a leaf; Any for a key below a free-form one."""
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


def sections(schema: type) -> dict[str, type]:
    """The keys of a section that are sections themselves."""
    hints = _hints(schema)
    return {
        name: hint
        for name, hint in hints.items()
        if dataclasses.is_dataclass(hint) and isinstance(hint, type)
    }


def all_keys(schema: type = Config, prefix: str = "") -> list[str]:
    """Every dotted key that takes a value."""
    keys: list[str] = []
    for field in dataclasses.fields(schema):
        section = sections(schema).get(field.name)
        keys += all_keys(section, f"{prefix}{field.name}.") if section else [f"{prefix}{field.name}"]
    return keys


@functools.cache
def _section_keys() -> dict[str, str]:
    """Dotted name of every section → its first key."""
    found: dict[str, str] = {}
    for key in all_keys():
        parts = key.split(".")
        for depth in range(1, len(parts)):
            found.setdefault(".".join(parts[:depth]), key)
    return found


def _known(key: str) -> bool:
    """A leaf of the schema, or a key below a free-form leaf."""
    return key in all_keys() or key.startswith(FREE)


def _nearest(key: str) -> str | None:
    """The key with the same last name in another section, else the one spelled most alike."""
    name = key.rpartition(".")[2]
    same = [known for known in all_keys() if known.rpartition(".")[2] == name]
    spelled = difflib.get_close_matches(key, all_keys(), n=1, cutoff=0.6)
    alike = [k for k in all_keys() if difflib.get_close_matches(name, [k.rpartition(".")[2]], cutoff=0.8)]
    return next(iter([*same, *spelled, *alike]), None)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
