"""Many generators on one queue: each is a worker with a client, slots and leases of its own; hundreds share a process.

    asyncrl queue ◂── leases, commits, heartbeats ── 500 workers ── one weight follower for all of them
         ▴      ◂───────────────────────────────── 500 workers ── one
         └── asyncrl learner, timed

`python -m bench.overlap.crowd CONFIG FIRST COUNT KEY=VALUE …` is such a process.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import DeadlineError, ProcessDiedError
from asyncrl.generator import worker
from asyncrl.generator.engines.receiver import LocalReceiver, WeightReader
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.generator.weights import WeightFollower
from asyncrl.models.adapters import live_tensors
from asyncrl.models.loading import load_causal_lm, load_model_config
from asyncrl.models.prompts import policy_tokenizer
from asyncrl.queue.client.client import QueueClient
from asyncrl.telemetry.sinks import read_rows
from asyncrl.types import Version
from bench.bars import Measured
from bench.overlap.engine import TimedEngine
from bench.overlap.times import Times
from bench.process import ONE_THREAD, ROOT, cpu_s, importing_here

GENERATORS, PROCESSES, SLOTS = 1000, 2, 8
TIMES = replace(Times(), token_s=0.25)
GROUPS, VERSIONS, SKIPPED = 1024, 10, 3

STALENESS = 8
"""A generator has one group in its slots and the next one at hand, and a group takes up to 32 s there. A bound of 4
versions of 10 s holds some of them back, however fast the queue is."""

DEADLINE_S = 900.0

LOOK_S = 1.0
"""Between two looks of a worker at an engine that has enough. A worker alone looks more often; 500 share a core."""


class SharedFollower:
    """The follower of a process, for each of its workers: only `WeightFollower.run` is called elsewhere, once."""

    def __init__(self, follower: WeightFollower) -> None:
        self._follower = follower

    def __getattr__(self, name: str) -> Any:
        return getattr(self._follower, name)

    async def run(self) -> None:
        await asyncio.Event().wait()


async def run_workers(config: Config, names: Sequence[str]) -> None:
    """Workers of these names, until the run is over."""
    worker.LOOK_S = LOOK_S
    live = live_tensors(load_causal_lm(config.model, config.run.seed))
    engines = [
        TimedEngine(Times.of_this_process(), config.generator.slots, config.generator.max_length, {})
        for _ in names
    ]

    async def flip(staged: Mapping[str, Tensor], version: Version) -> float:
        return sum([await engine.flip({}, version) for engine in engines])

    clients = [QueueClient.of(config, name) for name in names]
    for client in clients:
        await client.connect()
    receiver = LocalReceiver(live, flip, WeightReader.of(names[0], config))
    follower = WeightFollower(names[0], receiver, clients[0])
    shared = cast(WeightFollower, SharedFollower(follower))
    tokenizer = policy_tokenizer(config)
    vocabulary = load_model_config(config.model).get_text_config().vocab_size
    scorer = Scorer.from_config(config.reward)
    following = asyncio.create_task(follower.run())
    try:
        async with asyncio.TaskGroup() as group:
            for name, client, engine in zip(names, clients, engines, strict=True):
                rollouts = Rollouts(engine, tokenizer, scorer, config, vocabulary)
                parts = {"client": client, "engine": engine, "follower": shared, "rollouts": rollouts}
                group.create_task(worker.Worker(name, config, **cast(Any, parts)).run())
    finally:
        following.cancel()
        scorer.close()


def measured(folder: Path) -> Measured:
    """After the first versions: the share of the generators' slots that worked, groups trained a second, and the cores
    that each kind of process used."""
    run = folder / "crowd"
    shutil.rmtree(run, ignore_errors=True)
    address = f"tcp://127.0.0.1:{_free_port()}"
    words = [
        *(str(Path(__file__).with_name("overlap.yaml")), f"run.dir={folder}", "run.name=crowd"),
        *(f"model.path={folder / 'model'}", f"run.versions={VERSIONS + SKIPPED}", f"queue.address={address}"),
        *(f"queue.max_staleness={STALENESS}", f"batch.groups={GROUPS}", "batch.group_size=8"),
        *(f"generator.slots={SLOTS}", f"generator.max_tokens={TIMES.longest}"),
        f"generator.max_length={TIMES.longest + 16}",
    ]
    each = GENERATORS // PROCESSES
    hosts = [["bench.overlap.crowd", str(first), str(each)] for first in range(0, GENERATORS, each)]
    with ExitStack() as processes:
        queue = _started(processes, folder, "queue", ["asyncrl", "queue", *words])
        learner = _started(processes, folder, "learner", ["asyncrl", "learner", *words])
        generators = [_started(processes, folder, f"host-{host[1]}", [*host, *words]) for host in hosts]
        _await_steps(SKIPPED, learner, run)
        hosting = [host.pid for host in generators]
        pids = {"queue": [queue.pid], "learner": [learner.pid], "generators": hosting}
        begun, before = time.monotonic(), {kind: cpu_s(*each) for kind, each in pids.items()}
        _await_steps(SKIPPED + VERSIONS - 1, learner, run)
        seconds = time.monotonic() - begun
        cores = {
            f"crowd_cores_{kind}": (cpu_s(*each) - before[kind]) / seconds for kind, each in pids.items()
        }
        try:
            code = learner.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise DeadlineError("bench.overlap", "the learner", "its end", DEADLINE_S) from None
        if code:
            raise ProcessDiedError(f"the learner ended with {code}: {_end_of_log(run)}")
    rows = _steps(run)[SKIPPED:]
    seconds, tokens = (sum(row[name] for row in rows) for name in ("perf/step_s", "train/tokens"))
    return {
        "crowd": TIMES.token_s * tokens / (GENERATORS * SLOTS) / seconds,
        "crowd_groups_per_s": len(rows) * GROUPS / seconds,
        **cores,
    }


def _await_steps(count: int, learner: subprocess.Popen[bytes], run: Path) -> None:
    """Until that many versions are trained."""
    deadline = time.monotonic() + DEADLINE_S
    while len(_steps(run)) < count:
        if learner.poll() is not None:
            raise ProcessDiedError(f"the learner ended with {learner.returncode}: {_end_of_log(run)}")
        if time.monotonic() > deadline:
            raise DeadlineError("bench.overlap", "the learner", f"version {count}", DEADLINE_S)
        time.sleep(0.5)


def _end_of_log(run: Path) -> str:
    return (run.parent / "learner.log").read_text()[-2000:]


def _steps(run: Path) -> list[dict[str, Any]]:
    """The rows of its versions."""
    return [row for row in read_rows(run / "metrics.jsonl") if "perf/step_s" in row]


def _started(processes: ExitStack, folder: Path, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process with a log in `folder`, which ends with `processes`."""
    log = processes.enter_context((folder / f"{name}.log").open("wb"))
    env = {**os.environ, **ONE_THREAD, **importing_here(), **TIMES.environment()}
    command = [sys.executable, "-m", *words]
    process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=env)
    processes.callback(process.wait)
    processes.callback(process.kill)
    return process


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    first, count, path, *overrides = sys.argv[1:]
    numbers = range(int(first), int(first) + int(count))
    config = load_config(path, overrides)
    asyncio.run(run_workers(config, [f"generator-{number}" for number in numbers]))
