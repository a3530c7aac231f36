"""Opens a source of tasks as a stream.

    'package.module:function', 'file.py:function'   called with tasks.options; returns rows
    'problems.jsonl'                                one row per line
    'problems.parquet', 'folder', 'hf:name'         a data set of the package datasets (rows.py)

A row is a `Task`, or a mapping whose fields become the task (`RowReader`). Rows with a length (a list, a file, a data
set) repeat in epochs without end, each in a new order if they are shuffled. Rows without a length (a generator) keep
their order and end.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.schema import Config
from asyncrl.config.sections.tasks import SourceConfig
from asyncrl.errors import ConfigError, SourceEndedError, TaskError
from asyncrl.tasks.curriculum import FILE, CurriculumStream
from asyncrl.tasks.datasets.rows import HUB, Check, JsonlRows, RowReader, data_set
from asyncrl.tasks.stream import LISTED, IteratorStream, MixtureStream, SequenceStream, TaskStream
from asyncrl.types import Task

__all__ = ["TaskStream", "every_task", "held_out", "load_source", "tasks_of_run", "training_tasks"]


def load_source(
    chosen: SourceConfig,
    *,
    section: str = "tasks",
    shuffle_key: tuple[int, ...] | None = None,
    check: Check | None = None,
) -> TaskStream:
    """Open a source and read its first row, or all rows of a .jsonl file.

    section      of the configuration, for errors
    shuffle_key  determines the order of every epoch; None: the source's own order
    check        see `RowReader`

    Raises ConfigError if the source does not exist or does not take its options, TaskError for a bad row.
    """
    rows = _open_rows(chosen, section)
    place = getattr(rows, "place", lambda index: f"{chosen.source}: task {index}")
    reader = RowReader(chosen, section, place, check)
    if isinstance(rows, JsonlRows):
        for index in range(len(rows)):
            reader(index, index, rows[index])
    if hasattr(rows, "__len__") and hasattr(rows, "__getitem__"):
        if not len(rows):
            raise TaskError(f"{chosen.source} gives no tasks")
        stream: TaskStream = SequenceStream(rows, reader, shuffle_key, place)
    elif isinstance(rows, Iterable):
        if shuffle_key is not None:
            rule = f"{chosen.source} gives an iterator, which has no order to change"
            raise ConfigError("tasks.shuffle", True, rule, "set tasks.shuffle=false or return a list")
        stream = IteratorStream(lambda: iter(_open_rows(chosen, section)), reader, place)
    else:
        raise TaskError(
            f"{chosen.source} returned a {type(rows).__name__}, not a sequence or an iterator of tasks"
        )
    stream.task_at(0)
    return stream


def training_tasks(config: Config, check: Check | None = None) -> TaskStream:
    """The stream that the section `tasks` configures. check: see `RowReader`"""
    tasks, seed = config.tasks, abs(config.run.seed)
    if not tasks.mixture:
        return load_source(tasks, shuffle_key=(seed,) if tasks.shuffle else None, check=check)
    parts = {}
    for name, mixed in tasks.sources.items():
        # By its name, so that a source more or less leaves the order of the others as it was.
        key = (seed, int.from_bytes(name.encode())) if tasks.shuffle else None
        stream = load_source(mixed, section=f"tasks.mixture.{name}", shuffle_key=key, check=check)
        parts[name] = (stream, mixed.weight)
    return MixtureStream(parts)


def tasks_of_run(config: Config, folder: Path) -> TaskStream:
    """`training_tasks`, by `tasks.curriculum` where it is on. folder: of the run, which keeps the epochs.

    Raises ConfigError as `load_source`, and for a curriculum of a source without epochs.
    """
    stream, chosen = training_tasks(config), config.tasks.curriculum
    if chosen.solved is None:
        return stream
    if not isinstance(stream, SequenceStream):
        rule = "needs a source with a length: an iterator has no epochs"
        raise ConfigError("tasks.curriculum.solved", chosen.solved, rule, "return a list, or unset it")
    if stream.size > LISTED:
        rule = f"is for sources of at most {LISTED} tasks; this one has {stream.size}"
        raise ConfigError("tasks.curriculum.solved", chosen.solved, rule, "unset it: an epoch is long enough")
    about = {"source": config.tasks.source, "shuffle": config.tasks.shuffle}
    path, seed = folder / FILE, abs(config.run.seed)
    return CurriculumStream(stream, chosen, seed, path, about, fsync=config.queue.fsync)


def held_out(config: Config) -> dict[str, list[Task]]:
    """All tasks of each set of `evaluation`, in order. The set of evaluation.source is called MAIN."""
    return {
        name: every_task(load_source(chosen, section=f"evaluation.sets.{name}" if name else "evaluation"))
        for name, chosen in config.evaluation.named_sets.items()
    }


def every_task(stream: TaskStream) -> list[Task]:
    """Those of an epoch, or of a source that ends."""
    if stream.size is not None:
        return [stream.task_at(ordinal) for ordinal in range(stream.size)]
    tasks: list[Task] = []
    try:
        while True:
            tasks.append(stream.task_at(len(tasks)))
    except SourceEndedError:
        return tasks


def _open_rows(chosen: SourceConfig, section: str) -> Any:
    source, options = chosen.source, chosen.options
    if source is None:
        raise ConfigError(
            f"{section}.source", None, "names no tasks", "set it, e.g. to 'problems.jsonl', or tasks.mixture"
        )
    if source.endswith(".jsonl"):
        if options:
            raise ConfigError(f"{section}.options", options, "a .jsonl file takes none", "leave it out")
        return JsonlRows(Path(source), section)
    if (
        source.endswith(".parquet")
        and not any(char in source for char in "*?[:")
        and not Path(source).exists()
    ):
        rule = f"is no file (in {Path.cwd()})"
        raise ConfigError(
            f"{section}.source", source, rule, "give the path of a .parquet file, or of a folder of such"
        )
    if source.startswith(HUB) or source.endswith(".parquet") or Path(source).is_dir():
        return data_set(source, options, section)
    if ":" not in source:
        hub = (
            f", or {HUB + source!r} for a data set of the Hugging Face hub" if source.count("/") == 1 else ""
        )
        raise ConfigError(
            f"{section}.source",
            source,
            "is no folder, no .jsonl or .parquet file and no function",
            f"give a path that is there, or 'package.module:function'{hub}",
        )
    return _call_source(source, options, section)


def _call_source(source: str, options: Mapping[str, Any], section: str) -> Any:
    function = load_function(source, f"{section}.source")
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        takes = ", ".join(inspect.signature(function).parameters) or "nothing"
        raise ConfigError(f"{section}.options", options, str(error), f"{source} takes {takes}") from None
    try:
        return function(**options)
    except ConfigError:
        raise
    except Exception as error:
        raise TaskError(f"{source} raised {type(error).__name__}: {error}") from error
