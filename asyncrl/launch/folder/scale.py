"""Requests for more or fewer generators of a run on one machine.

asyncrl scale RUN N ──writes──▸ RUN/generators ──taken away by──▸ the launcher: starts generators, or has some leave
                    ◂─────────────── is gone: the launcher has taken it
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.addresses import stays_here
from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.config.sections.generator import key_of_pool
from asyncrl.errors import DeadlineError
from asyncrl.launch.folder.run_folder import config_of, find_run
from asyncrl.system.cores import cores
from asyncrl.system.disk import replace_text

FILE = "generators"
DEADLINE_S = 15.0
"""Longest wait for the launcher, which looks each second."""

LOOK_S = 0.05

PER_CORE = 8
"""Generators of a pool for each core of this machine: each is a process, with a model of its own unless it talks to a
server."""


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """count: generators that the pool is to have · pool: '', of `generator` itself, or one of placement.generators"""

    count: int
    pool: str = ""

    def __str__(self) -> str:
        return f"generators{f' of {self.pool}' if self.pool else ''}: {self.count}"


def scale(target: str, request: ScaleRequest, deadline_s: float = DEADLINE_S) -> Path:
    """Have the launcher of a run start generators of a pool, or let some leave. Returns its folder.

    Raises:
        ConfigError: There is no such run or pool, its generators have GPUs of their own and are to become more, or are
            more than PER_CORE allows on the machine that all of them run on.
        DeadlineError: No launcher of this run has taken the request.
    """
    folder, count = find_run(target), request.count
    _check(request, config_of(folder))
    path = _file(folder, request.pool)
    replace_text(path, str(count))
    deadline = time.monotonic() + deadline_s
    while path.exists():
        if time.monotonic() > deadline:
            path.unlink(missing_ok=True)
            whom, remedy = f"the launcher of {folder}", "is the run still going on, under `asyncrl train`?"
            raise DeadlineError("asyncrl scale", whom, "a look at this request", deadline_s, remedy)
        time.sleep(LOOK_S)
    return folder


def _check(request: ScaleRequest, config: Config) -> None:
    pools, count = config.generator_pools, request.count
    known = ", ".join(filter(None, pools)) or "none beside generator's own"
    require(request.pool in pools, "--pool", request.pool, "the run has no such pool", f"it has {known}")
    generator, at = pools[request.pool], key_of_pool(request.pool)
    require(count >= 1, "N", count, "a pool needs a generator", "give a number from 1 on")
    rule = f"{at}.devices={generator.devices} has GPUs for {at}.count={generator.count} generators"
    remedy = (
        f"give {generator.count} or less, or start others by hand: CUDA_VISIBLE_DEVICES=… asyncrl generator …"
    )
    require(not generator.devices or count <= generator.count, "N", count, rule, remedy)
    most = max(generator.count, PER_CORE * cores())
    rule = f"are more processes than this machine bears, {most} at most, and no other one reaches the queue"
    may = count <= most or not stays_here(config.queue.address)
    require(may, "N", count, rule, f"give {most} or less, or set queue.address to one that others reach")


def _file(folder: Path, pool: str) -> Path:
    """Each pool has a file: two requests at once are two."""
    return folder / (f"{FILE}-{pool}" if pool else FILE)


def take_request(folder: Path, pool: str = "") -> ScaleRequest | None:
    """The last request for this pool, once; None without one, or for a text that is none."""
    with suppress(OSError, ValueError):
        path = _file(folder, pool)
        text = path.read_text(encoding="ascii", errors="replace")
        path.unlink()
        return ScaleRequest(int(text), pool) if int(text) >= 1 else None
    return None
