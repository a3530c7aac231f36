"""Many clients at once and more bytes than the machine has memory for: nothing may be lost, nothing may grow.

4 processes of generators' clients ─▸ broker, with its journal ─▸ 1 process of two learner ranks
                                         │
                               its memory is read every 0.1 s
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from asyncrl.queue.wire.payload import encode_group
from asyncrl.types import Task
from bench.process import Process
from bench.queue.asyncrl_queue import PROMPT, group_of
from bench.queue.load import Load, Source
from bench.queue.soak_side import CHECKPOINT_EVERY, STEP, settings

TOKENS = 2048
PROCESSES = 4
SAMPLE_S = 0.1
SLACK = 1.5
"""Of the broker's memory, for allocator and sockets, over the groups that it may hold."""


def soak(clients: int, nbytes: int, folder: Path) -> dict[str, Any]:
    """Run it and print what came of it. AssertionError if a group was lost, came twice or was dropped."""
    columns = Source(Load(0, TOKENS)).columns(0)
    group_bytes = encode_group(group_of(Task(0, PROMPT), columns)).nbytes
    load = Load(-(-nbytes // group_bytes), TOKENS)
    numbers = {"groups": load.groups, "tokens": load.tokens}
    with ExitStack() as stack:

        def start(name: str, words: list[str], said: dict[str, Any]) -> Process:
            return stack.enter_context(Process(words, folder / f"{name}.log", said))

        serve = {"load": numbers, "folder": str(folder), "options": {"store": "file"}}
        broker = start("broker", ["bench.queue.endpoint", "serve", "asyncrl_queue"], serve)
        said = {"address": broker.hears()[0], "load": numbers}
        consumer = start("consumer", ["bench.queue.soak_side", "consume"], said)
        assert consumer.hears() == "ready"
        producers = []
        for i in range(PROCESSES):
            mine = {**said, "clients": len(range(i, clients, PROCESSES)), "process": i}
            producers.append(start(f"producer-{i}", ["bench.queue.soak_side", "produce"], mine))
        for producer in producers:
            assert producer.hears() == "ready"
        with _memory(broker.pid) as memory:
            started = time.monotonic()
            for side in (consumer, *producers):
                side.tell("go")
            status = consumer.hears(limit_s=None)
            seconds = time.monotonic() - started
        commits = [count for producer in producers for count in producer.hears()]
    return _judged(load.groups, group_bytes, status, commits, memory, seconds)


def _judged(
    groups: int,
    group_bytes: int,
    status: dict[str, Any],
    commits: list[int],
    memory: list[int],
    seconds: float,
) -> dict[str, Any]:
    """group_bytes: of a payload, as it is sent and kept."""
    bound = memory[0] + SLACK * group_bytes * (settings().depth + CHECKPOINT_EVERY * STEP)
    found = {
        "clients": status["clients"],
        "gigabytes": groups * group_bytes / 1e9,
        "groups": groups,
        "seconds": seconds,
        "mb_per_s": groups * group_bytes / 1e6 / seconds,
        "commits_least": min(commits),
        "commits_most": max(commits),
        "rss_mb_start": memory[0] / 1e6,
        "rss_mb_first_half": max(memory[: len(memory) // 2]) / 1e6,
        "rss_mb_second_half": max(memory[len(memory) // 2 :]) / 1e6,
        "rss_mb_bound": bound / 1e6,
    }
    for name, value in found.items():
        print(f"{name}: {value:,.4g}")
    # The consumer has seen every ordinal once; here is what the ledger and the producers say.
    assert sum(commits) == groups, (sum(commits), groups)
    assert status["dropped"] == 0, status
    print("pass  nothing was lost")
    print("pass" if max(memory) <= bound else "FAIL", " the broker's memory is bounded")
    return {"figures": {f"soak.{name}": value for name, value in found.items()}}


@contextmanager
def _memory(pid: int) -> Iterator[list[int]]:
    """Resident bytes of a process over time."""
    process, ended = psutil.Process(pid), threading.Event()
    samples = [process.memory_info().rss]

    def sample() -> None:
        while not ended.wait(SAMPLE_S):
            samples.append(process.memory_info().rss)

    thread = threading.Thread(target=sample)
    thread.start()
    yield samples
    ended.set()
    thread.join()
