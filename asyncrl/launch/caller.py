"""From the arguments of `asyncrl.train` to settings, as a YAML file and a command line would have them.

model, tasks, reward, max_staleness ─┐
**keys, a mapping as `config`        ├──▸ (key, value) ──▸ values in place: functions by name, rows in a file
a mapping as `overrides`             ┘
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.functions.function_spec import name_function
from asyncrl.config.load import Setting, all_keys, load_config, settings_of
from asyncrl.config.remedies import nearest
from asyncrl.config.schema import Config
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.config.yaml_values import DEEPEST
from asyncrl.errors import ConfigError
from asyncrl.launch.folder.inputs import Inputs

WHERE = "asyncrl.train"
"""The place of a setting in errors."""

OF_REWARD = frozenset(field.name for field in dataclasses.fields(RewardConfig))

ARGUMENTS = {"model.path": "model", "tasks.source": "tasks", "reward.function": "reward"}
"""Keys that a run cannot do without, and the arguments that set them."""


@dataclass(frozen=True, slots=True)
class TrainCall:
    """One call of `asyncrl.train`. settings: over the file, if there is one. words: over both."""

    file: Path | None
    settings: Sequence[Setting]
    words: Sequence[str]

    def load(self, inputs: Inputs) -> Config:
        """The configuration; rows and functions that no process could import are written by `inputs`. Raises
        ConfigError and TaskError."""
        settings = [
            dataclasses.replace(one, value=_in_place(one.key, one.value, inputs)) for one in self.settings
        ]
        try:
            return load_config(self.file, self.words, settings=settings)
        except ConfigError as error:
            argument = ARGUMENTS.get(error.key)
            if self.file is not None or argument is None or error.value != "???":
                raise
            remedy = f"give {argument}=…; help(asyncrl.train) has an example"
            raise ConfigError(error.key, None, "must be set", remedy) from None

    def in_folder(self, draft: Config) -> tuple[TrainCall, Config]:
        """The call and the draft of its configuration with the run's name.

        If neither file nor caller names the run, a folder of its own is made: run, run-2, …
        """
        given = [*(one.key for one in self.settings), *(word.partition("=")[0] for word in self.words)]
        runs, name = Path(draft.run.dir), draft.run.name
        if self.file is not None or "run.name" in given:
            return self, draft
        if draft.run.resume:
            rule, remedy = "does not name the run to go on with", 'give run={"name": …, "resume": True}'
            raise ConfigError("run.resume", True, rule, remedy)
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        free = next(one for one in itertools.chain([name], numbered) if _is_made(runs / one))
        named = dataclasses.replace(draft, run=dataclasses.replace(draft.run, name=free))
        return dataclasses.replace(self, settings=[*self.settings, Setting("run.name", free, WHERE)]), named


def _is_made(folder: Path) -> bool:
    """Make a folder, unless it is there already. Raises ConfigError where there can be none."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        if isinstance(error, FileExistsError) and folder.parent.is_dir():
            return False
        rule = f"{folder} cannot be made: {error.strerror}"
        raise ConfigError("run.dir", str(folder.parent), rule, "give a folder that you may write") from None
    return True


def call_of(config: Any, overrides: Any, arguments: Mapping[str, Any], keys: Mapping[str, Any]) -> TrainCall:
    """arguments: model, tasks, reward and max_staleness, None where they were not given. Raises ConfigError."""
    for name, value in {"config": config, "overrides": overrides, **arguments, **keys}.items():
        _check_depth(name, value)
    _refuse_misspelt(keys, arguments)
    given = [*settings_of(_sections(keys), WHERE), *_given(arguments)]  # `include` is among the keys
    _refuse_twice(given)
    base, last = (
        config if isinstance(config, Mapping) else {},
        overrides if isinstance(overrides, Mapping) else {},
    )
    settings = [*settings_of(base, WHERE), *given, *settings_of(last, WHERE)]
    return TrainCall(_file(config), settings, _words(overrides))


def _refuse_misspelt(keys: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """ConfigError for a key that is no section, but nearly an argument."""
    known = {"include", *(key.partition(".")[0] for key in all_keys())}
    for name, value in keys.items():
        if name in known or "." in name:
            continue
        if near := difflib.get_close_matches(name, [*arguments, "config", "overrides"], n=1):
            remedy = f"did you mean the argument {near[0]}?"
            if key := nearest(name, all_keys()):
                remedy = f"did you mean the argument {near[0]}, or the key {key}?"
            raise ConfigError(name, value, f"no such key ({WHERE})", remedy)


def _given(arguments: Mapping[str, Any]) -> Iterator[Setting]:
    """The settings of the four named arguments. Each replaces the same setting of a file."""
    model, tasks, reward = arguments["model"], arguments["tasks"], arguments["reward"]
    if isinstance(model, Mapping):
        yield from settings_of({"model": model}, WHERE)
    elif model is not None:
        yield Setting("model.path", _model(model), WHERE)
    if isinstance(tasks, Mapping):
        yield from settings_of({"tasks": tasks}, WHERE)
    elif tasks is not None:
        for replaced in ("tasks.options", "tasks.mixture"):  # of the source that the file names
            yield Setting(replaced, None, WHERE)
        yield Setting("tasks.source", tasks, WHERE)
        if inspect.isgeneratorfunction(tasks):
            yield Setting("tasks.shuffle", False, WHERE)  # rows that come one by one have no order to change
    yield from _rewards(reward)
    if arguments["max_staleness"] is not None:
        yield Setting("queue.max_staleness", arguments["max_staleness"], WHERE)


def _rewards(reward: Any) -> Iterator[Setting]:
    if reward is None:
        return
    if isinstance(reward, Mapping) and reward.keys() <= OF_REWARD:
        yield from settings_of({"reward": reward}, WHERE)
    elif isinstance(reward, Mapping):
        yield Setting("reward.function", None, WHERE)
        for name, each in reward.items():
            key = f"reward.functions.{name}"
            yield Setting(key if isinstance(each, Mapping) else f"{key}.function", each, WHERE)
    elif callable(reward) or isinstance(reward, str):
        yield Setting("reward.functions", None, WHERE)
        yield Setting("reward.function", reward, WHERE)
    else:
        remedy = "give reward=f, with def f(task, text) that returns a number, or {name: function}"
        raise ConfigError("reward", reward, f"is no function but of type {type(reward).__name__}", remedy)


def _model(model: Any) -> str:
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    rule = f"is of type {type(model).__name__}, and the processes of the run load the model themselves"
    raise ConfigError(
        "model", type(model), rule, "save it with save_pretrained(folder), and give model=folder"
    )


def _check_depth(name: str, value: Any) -> None:
    """Raises ConfigError for mappings and lists that nest deeper than a file may, or without end. Rows of tasks are
    checked as they are written."""
    level: list[Any] = [value] if isinstance(value, Mapping) else []
    for _ in range(DEEPEST):
        inner = [
            each for outer in level for each in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        # One that stands in several places, or in itself, is looked into once a level.
        level = list({id(each): each for each in inner if isinstance(each, Mapping | list | tuple)}.values())
        if not level:
            return
    rule = f"nests deeper than {DEEPEST} levels, or holds itself"
    raise ConfigError(name, type(value), rule, "give mappings and lists of values")


def _sections(keys: Mapping[str, Any]) -> dict[str, Any]:
    """With `evaluation` given as its tasks alone, as `tasks` may be."""
    held_out = keys.get("evaluation")
    if held_out is None or isinstance(held_out, Mapping):
        return dict(keys)
    return {**keys, "evaluation": {"source": held_out}}


def _refuse_twice(given: Sequence[Setting]) -> None:
    seen: dict[str, Any] = {}
    for one in given:  # but for those of a file that is included
        if one.where == WHERE and seen.get(one.key) is not None and one.value is not None:
            rule = f"is given twice; the other time it is {seen[one.key]!r}"
            raise ConfigError(one.key, one.value, rule, "give it once")
        if one.where == WHERE:
            seen[one.key] = one.value


def _file(config: Any) -> Path | None:
    if config is None or isinstance(config, Mapping):
        return None
    if not isinstance(config, str | os.PathLike):
        rule = f"is no YAML file and no mapping but of type {type(config).__name__}"
        raise ConfigError("config", config, rule, "leave it out, and give model=…, tasks=…, reward=…")
    path = Path(config)
    if (path / "config.json").is_file():
        rule = "is the folder of a model, not a YAML file"
        raise ConfigError("config", str(config), rule, f"give model={str(config)!r}")
    return path


def _words(overrides: Any) -> Sequence[str]:
    if overrides is None or isinstance(overrides, Mapping):
        return []
    words = [overrides] if isinstance(overrides, str) else overrides
    if isinstance(words, Sequence) and all(isinstance(word, str) for word in words):
        return words
    rule = 'is neither a list of "key=value" texts nor a mapping'
    raise ConfigError(
        "overrides", overrides, rule, 'write e.g. ["run.versions=20"] or {"run": {"versions": 20}}'
    )


# ---------------------------------------------------------------------- values


def _in_place(key: str, value: Any, inputs: Inputs) -> Any:
    """`value` as a YAML file would have it."""
    if isinstance(value, str) or value is None:
        return value
    if callable(value):
        return name_function(value, _label(key), inputs.module)
    if key.endswith(".source"):
        return _rows(key, value, inputs)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(name): _in_place(f"{key}.{name}", each, inputs) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_in_place(key, each, inputs) for each in value]
    scalar: Callable[[], Any] | None = getattr(value, "item", None)  # of NumPy and torch
    if scalar is None:
        return value
    try:
        return scalar()
    except (ValueError, RuntimeError):  # an array of several
        rule = f"is a {type(value).__name__} of several values"
        raise ConfigError(_label(key), value, rule, "give a list: array.tolist()") from None


def _rows(key: str, value: Any, inputs: Inputs) -> str:
    """The path of a source that was given as a path, or as its rows."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    label = _label(key)
    if hasattr(value, "to_dict") and hasattr(value, "columns"):  # a table of pandas
        value = value.to_dict("records")
    if isinstance(value, Iterator):
        remedy = "give a list, or the function that makes the rows"
        raise ConfigError(label, type(value), "is an iterator, which other processes cannot read", remedy)
    if (
        not (hasattr(value, "__len__") and hasattr(value, "__getitem__"))
        or getattr(value, "shape", None) == ()
    ):
        remedy = "give a list of rows, a function that returns them, or a file"
        raise ConfigError(label, value, f"gives no tasks: it is of type {type(value).__name__}", remedy)
    if not len(value):
        raise ConfigError(label, value, "has no rows", 'give rows such as {"prompt": "1+1=", "answer": "2"}')
    return str(inputs.rows(label.replace(".", "-"), value))


def _label(key: str) -> str:
    """The name under which a caller gave a setting.

    >>> [_label(key) for key in ("tasks.source", "reward.functions.right.function", "algorithm.own_loss")]
    ['tasks', "reward['right']", 'algorithm.own_loss']
    """
    section, _, name = key.rpartition(".")
    if name == "function" and section.startswith("reward.functions."):
        return f"reward[{section.removeprefix('reward.functions.')!r}]"
    return section if name in ("source", "function") else key
