"""Requests of an operator to a running queue: `asyncrl queue status | inspect | drain`.

RUN, its folder ──▸ address, config.yaml ──┐
ADDRESS, --keys ───────────────────────────┴──▸ a client like any other ──▸ a table, or JSON
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, RunClosedError
from asyncrl.launch.folder.run_folder import find_run, read_address, read_summary
from asyncrl.launch.views.dashboard import cell
from asyncrl.launch.views.output import within_line
from asyncrl.launch.views.process_reports import SILENT_S
from asyncrl.learner.reporting.saved_groups import save_group
from asyncrl.observability.times import duration
from asyncrl.queue.client.client import QueueClient
from asyncrl.queue.protocol.replies import Peek
from asyncrl.rpc.keys import client_keys
from asyncrl.types import Array, Group, Rollout

DEADLINE_S = 10.0
"""An operator does not wait as long as a process of the run."""

SHOWN_IDS = 32

Result = TypeVar("Result")
Decode = Callable[[Array], str]


@dataclass(frozen=True, slots=True)
class Target:
    """A queue. run: None where only its address is known. keys: folder. config: of the run, if it is at hand."""

    address: str
    run: str | None
    keys: str | None
    config: Config | None = None


def find(target: str, keys: str | None = None) -> Target:
    """An address, the folder of a run, or its name under runs/. ConfigError (key run) for anything else; RunClosedError
    for a run that has ended according to its summary, and with it its queue."""
    if "://" in target:
        return Target(target, None, keys)
    folder = find_run(target)
    if over := read_summary(folder):
        raise RunClosedError(
            f"{folder} has ended: {over.get('ended')}, at version {over.get('versions')}; its last answers are in "
            "rollouts.jsonl, all figures are in summary.json"
        )
    address, config_file = read_address(folder), folder / "config.yaml"
    if not config_file.exists():
        return Target(address, None, keys)
    config = load_config(config_file)
    return Target(address, config.run.name, keys or config.queue.keys, config)


def status(target: Target) -> dict[str, Any]:
    """Raises DeadlineError if no queue answers there."""
    return asyncio.run(_request(target, "", QueueClient.status))


def peek(target: Target, stream: str, ordinal: int) -> Peek:
    """RefusedError 'unknown' if there is no such task, not yet or not any more."""
    return _connected(target, lambda client: client.peek(stream, ordinal))


def drain(target: Target, stream: str) -> int:
    """End the stream early. Returns the number of pending tasks, which are dropped."""
    return _connected(target, lambda client: client.drain(stream))


def _connected(target: Target, call: Callable[[QueueClient], Awaitable[Result]]) -> Result:
    """The result of a request that only a client of the run may make."""

    async def connect_and_call(client: QueueClient) -> Result:
        await client.connect()
        return await call(client)

    run = target.run or str(status(target)["run"])
    return asyncio.run(_request(target, run, connect_and_call))


async def _request(target: Target, run: str, call: Callable[[QueueClient], Awaitable[Result]]) -> Result:
    keys = client_keys(target.keys)
    client = QueueClient(target.address, run=run, who="operator", deadline_s=DEADLINE_S, keys=keys)
    try:
        return await call(client)
    finally:
        await client.close()


# ---------------------------------------------------------------------- for people


def print_status(status: Mapping[str, Any], address: str) -> None:
    console = Console()
    over = f", closed: {status['closed']}" if status["closed"] is not None else ""
    title = f"run {status['run']} at {address}{over}"
    names = [Column(cell(within_line(name))) for name in status["streams"]]
    table = Table("", *names, title=cell(within_line(title)), title_justify="left")
    columns = [dict(_rows(stream)) for stream in status["streams"].values()]
    for label in dict.fromkeys(label for column in columns for label in column):
        table.add_row(cell(label), *(cell(column.get(label, "")) for column in columns))
    console.print(table)
    parked = f"{status['parked']} ({_mb(status['parked_bytes'])})"
    console.print(f"clients: {status['clients']}, requests that wait: {parked}", highlight=False)
    for name, seconds in status["silent_s"].items():
        if seconds >= SILENT_S:
            line = f"no word from {within_line(name)} for {duration(seconds)}"
            console.print(line, highlight=False, markup=False)
    console.print(f"refused: {_counted(status['refused'])}", highlight=False, markup=False)


def _rows(stream: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(label, text) of one stream."""
    settings = stream["settings"] or {}
    yield "version", f"{stream['version']} (lineage {stream['lineage']})" if settings else "not opened"
    yield "tasks pending", str(stream["pending"]) + (", draining" if stream["draining"] else "")
    oldest = f", the oldest for {stream['oldest_lease_s']:.1f} s" if stream["leased"] else ""
    yield "tasks leased", f"{stream['leased']}{oldest}"
    yield "leased by", _counted(_by_name(stream["leases_by_worker"]))
    yield "groups ready", f"{stream['ready']} of {settings.get('depth', '?')}"
    for name, stage in stream["stages"].items():
        yield f"stage {within_line(name)}", f"{stage['waiting']} wait, {stage['leased']} leased"
    yield "claimed", str(stream["claimed"])
    yield "trained", str(stream["trained"])
    yield "dropped", _counted(stream["dropped_by_reason"])
    yield "bytes", f"{_mb(stream['bytes'])} of {_mb(settings.get('max_bytes', 0))}"
    yield "reserved", _mb(stream["reserved_bytes"])
    yield "kept for a rewind", f"{_mb(stream['retained_bytes'])} of {stream['retained_steps']} steps"
    yield "lead", "as the bound allows" if stream["lead"] is None else f"{stream['lead']} groups"
    yield "length bias", f"{stream['bias']['distance']:.3f}"


def task_lines(peek: Peek, ordinal: int, decode: Decode | None) -> Iterator[str]:
    """Lines about one task. decode: from token ids to text, if a tokenizer is known."""
    yield from map(within_line, _task_lines(peek, ordinal, decode))


def save_peek(peek: Peek, ordinal: int, path: Path) -> None:
    """Write the group of a task to a file. Raises ConfigError if it has none."""
    if peek.group is None:
        rule = f"task {ordinal} is {peek.state}: there is no group to write"
        raise ConfigError("--save", str(path), rule, "give the ordinal of a task that is ready")
    save_group(path, peek.group)


def _task_lines(peek: Peek, ordinal: int, decode: Decode | None) -> Iterator[str]:
    by = "" if peek.worker is None else f" by {peek.worker} for {peek.since_s:.1f} s"
    yield f"task {ordinal}: {peek.state}{by}"
    if peek.problem is not None:
        yield f"  its group cannot be read: {peek.problem}"
    task = peek.task or (peek.group and peek.group.task)
    if task:
        yield f"  prompt: {task.prompt!r}"
        yield f"  data: {json.dumps(dict(task.data), default=repr, ensure_ascii=False)}"
    if peek.group is not None:
        yield f"  {len(peek.group.lengths)} rollouts, {peek.group.tokens} tokens, {_versions(peek.group.versions)}"
        for index, rollout in enumerate(peek.group.rollouts()):
            yield from _rollout(index, rollout, peek.group, decode)


def _rollout(index: int, rollout: Rollout, group: Group, decode: Decode | None) -> Iterator[str]:
    parts = "".join(f", {name} {value:.4g}" for name, value in rollout.reward_parts.items())
    tokens, made = len(rollout.token_ids), np.count_nonzero(rollout.loss_mask)
    yield (
        f"  rollout {index}: reward {rollout.reward:.4g}{parts} · {rollout.finish} · {tokens} tokens, "
        f"{made} of the policy · {_versions(rollout.versions)}"
    )
    texts = [ids[mine] for ids, mine in rollout.segment_tokens()]
    for number, ids in enumerate(texts):
        segment = f"segment {number}: " if len(texts) > 1 else ""
        cut = " …" if len(ids) > SHOWN_IDS else ""
        yield f"    {segment}{repr(decode(ids)) if decode else f'{ids[:SHOWN_IDS].tolist()}{cut}'}"


def decoder(config: Config | None) -> Decode | None:
    """The run's tokenizer as a function from ids to text, if it can be loaded here."""
    if config is None:
        return None
    from asyncrl.models.loading import load_tokenizer  # torch and all

    try:
        tokenizer = load_tokenizer(config.model)
    except ConfigError:
        return None
    return lambda ids: str(tokenizer.decode(ids))


def _versions(versions: Array) -> str:
    made = np.unique(versions[versions >= 0])
    if not made.size:
        return "of no version"
    return f"version {made[0]}" if made.size == 1 else f"versions {made[0]} to {made[-1]}"


def _by_name(counts: Mapping[str, int]) -> Counter[str]:
    """
    >>> _by_name({"generator-0/1": 2, "generator-0/2": 1})
    Counter({'generator-0': 3})
    """
    names: Counter[str] = Counter()
    for session, count in counts.items():
        names[session.rsplit("/", 1)[0]] += count
    return names


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{within_line(name)} {count}" for name, count in sorted(counts.items())) or "none"


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
