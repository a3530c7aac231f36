"""CPU seconds of the queue's process, all its threads together, for a known number of requests.

    producer ── groups ─▸ ┌────────────────┐ ◂─ claims ── ranks          group_s, byte_s, request_s
    clients ─ heartbeats ▸│ queue's process│ ◂─ claims of nothing        heartbeat_s, poll_s
                          └────────────────┘
                             its CPU time, by the system

The feeder, which submits tasks, belongs to the queue's process as it does in a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from asyncrl.queue.wire.payload import encode_group
from asyncrl.types import Task
from bench.bars import Measured
from bench.process import Process, cpu_s
from bench.queue.asyncrl_queue import PROMPT, STEP, group_of
from bench.queue.load import Load, Source

SHORT, LONG = 64, 8192
"""Tokens of a row, eight rows a group."""

STEPS = {SHORT: 90, LONG: 18}
"""Versions of groups, by their tokens."""

RANKS = 32
CLIENTS, EACH = 80, 250
"""Clients, and requests of each of them. All have a lease at the same time."""


def costs(folder: Path, scale: float = 1.0) -> Measured:
    """CPU seconds of the queue's process.

    group_s       a group without its payload, through one rank
    byte_s        a byte of a payload, in and out
    request_s     a further request of a claim
    heartbeat_s   a heartbeat of a generator with one lease
    poll_s        a claim that brings nothing
    """
    groups = {tokens: STEP * max(1, round(count * scale)) for tokens, count in STEPS.items()}
    each = max(2, round(EACH * scale))
    short, few = _streamed(folder, SHORT, groups[SHORT], 1)
    long, _ = _streamed(folder, LONG, groups[LONG], 1)
    byte_s = (long - short) / (payload_bytes(LONG) - payload_bytes(SHORT))
    shared, many = _streamed(folder, SHORT, groups[SHORT], RANKS)
    clients = {"clients": CLIENTS, "each": each}
    return {
        "group_s": short - byte_s * payload_bytes(SHORT),
        "byte_s": byte_s,
        "request_s": (shared - short) / (many - few),
        "heartbeat_s": _requests(folder, "heartbeats", {**clients, "tokens": SHORT}, CLIENTS),
        "poll_s": _requests(folder, "claims", {**clients, "tokens": SHORT}, 1),
    }


def payload_bytes(tokens: int) -> int:
    """Of a group with rows of so many tokens."""
    return encode_group(group_of(Task(0, PROMPT), Source(Load(0, tokens)).columns(0))).nbytes


def _streamed(folder: Path, tokens: int, groups: int, ranks: int) -> tuple[float, float]:
    """Seconds of a group, and requests of all ranks for a claim for each group."""
    load = {"groups": groups, "tokens": tokens}
    with _queue(folder, load) as (queue, address, stack):
        told: dict[str, Any] = {"address": address, "load": load}
        words = ["bench.queue.endpoint", "produce", "asyncrl_queue"]
        sides = [
            stack.enter_context(Process(words, folder / "producer.log", told)),
            _side(stack, folder, "ranks", {**load, "address": address, "clients": ranks}),
        ]
        for side in sides:
            assert side.hears() == "ready"
        before = cpu_s(queue)
        for side in sides:
            side.tell("go")
        requests = sides[1].hears()
        return (cpu_s(queue) - before) / groups, requests / groups


def _requests(folder: Path, role: str, told: Mapping[str, Any], groups: int) -> float:
    """Seconds of a request of this role."""
    with _queue(folder, {"groups": groups, "tokens": told["tokens"]}) as (queue, address, stack):
        side = _side(stack, folder, role, {**told, "address": address})
        assert side.hears() == "ready"
        before = cpu_s(queue)
        side.tell("go")
        requests = side.hears()
        return (cpu_s(queue) - before) / requests


@contextmanager
def _queue(folder: Path, load: Mapping[str, int]) -> Iterator[tuple[int, list[str | None], ExitStack]]:
    """A queue as a run has it by default: its process, its address, and what ends with it."""
    with ExitStack() as stack:
        kept = stack.enter_context(TemporaryDirectory(dir=folder))
        serve = {"load": load, "folder": kept, "options": {"store": "file"}}
        words = ["bench.queue.endpoint", "serve", "asyncrl_queue"]
        queue = stack.enter_context(Process(words, folder / "queue.log", serve))
        with ExitStack() as sides:
            yield queue.pid, queue.hears(), sides


def _side(stack: ExitStack, folder: Path, role: str, told: Mapping[str, Any]) -> Process:
    return stack.enter_context(Process(["bench.scale.side", role], folder / f"{role}.log", told))
