"""Faults of eight kinds: what each does to a run, and how it ends.

kill      SIGKILL to the queue, the learner or a generator
stop      SIGSTOP to one of them or to Redis, and SIGCONT some seconds later
cut       half of the connections through the proxy, or all, are closed; new ones are refused for some seconds
delay     each connection is late by a time of its own
corrupt   a byte is changed in some of the next pieces of bytes on their way
disk      no process of the run can write to a file
redis     SIGKILL to the primary of Redis, which starts again some seconds later, unless it is replaced before
clock     the wall clock of all processes jumps, by up to a day forward or back, and stays there
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import psutil

from bench.chaos.jumping_clock import JumpingClock
from bench.chaos.processes import PARTIES, family, limit_files, send
from bench.chaos.proxy import Proxy
from bench.chaos.redis_pair import RedisPair

KINDS = ("kill", "stop", "cut", "delay", "corrupt", "disk", "redis", "clock")

LASTS_S = (0.5, 3.0)
"""Shortest and longest time for which a fault lasts that is not over at once."""

MOST_CORRUPTED = 5

JUMPS_S = (60.0, 86400.0)
"""Shortest and longest jump of the clock."""


@dataclass
class Fault:
    """One that has struck.

    Attributes:
        kind: One of `KINDS`.
        struck: Who, or what, as a word for the table.
        at_s: Seconds since the start of the run.
        pause_s: The longest without a new version, from this fault to the next one; None: the run ended before.
        resumed: Whether the run ended by it, with a reason, and was resumed.
    """

    kind: str
    struck: str
    at_s: float
    pause_s: float | None = None
    resumed: bool = False


@dataclass(frozen=True)
class Strike:
    """A fault that has begun.

    Attributes:
        struck: Who, or what.
        lasts_s: Seconds until `undo` is to be called.
        undo: Ends it.
    """

    struck: str
    lasts_s: float = 0.0
    undo: Callable[[], object] = lambda: None


class Faults:
    """Strikes the run below a launcher.

    kinds: of `KINDS` · redis: needed by kind `redis`
    """

    def __init__(
        self,
        kinds: Sequence[str],
        proxy: Proxy,
        clock: JumpingClock,
        redis: RedisPair | None,
        rng: random.Random,
    ) -> None:
        self._proxy, self._clock, self._redis, self._rng = proxy, clock, redis, rng
        self._parties = (*PARTIES, *(("redis",) if redis is not None else ()))
        every: dict[str, Callable[[int], Strike | None]] = {
            "kill": self._kill,
            "stop": self._stop,
            "cut": self._cut,
            "delay": self._delay,
            "corrupt": self._corrupt,
            "disk": self._fill_disk,
            "redis": self._kill_redis,
            "clock": self._jump,
        }
        self._begin = {kind: every[kind] for kind in kinds}
        self._left: list[str] = []

    def next_kind(self) -> str:
        """Each kind once, in an order drawn anew each time, before one comes again."""
        self._left = self._left or self._rng.sample([*self._begin], len(self._begin))
        return self._left.pop()

    def postpone(self, kind: str) -> None:
        """It could not strike: it comes after those that are left."""
        self._left.insert(0, kind)

    def strike(self, kind: str, launcher: int) -> Strike | None:
        """None if there was nobody to strike."""
        return self._begin[kind](launcher)

    def _lasts(self) -> float:
        return self._rng.uniform(*LASTS_S)

    def _kill(self, launcher: int) -> Strike | None:
        party = self._rng.choice(PARTIES)
        return Strike(party) if send(launcher, party, signal.SIGKILL, self._rng) else None

    def _stop(self, launcher: int) -> Strike | None:
        party = self._rng.choice(self._parties)
        if party == "redis" and self._redis is not None:
            stopped = psutil.Process(self._redis.primary_pid)
            stopped.suspend()
        elif (found := send(launcher, party, signal.SIGSTOP, self._rng)) is not None:
            stopped = found
        else:
            return None
        return Strike(party, self._lasts(), lambda: _continue(stopped))

    def _cut(self, launcher: int) -> Strike | None:
        every = self._rng.random() < 0.5
        lasts_s = self._lasts()
        if not self._proxy.cut(lasts_s, every):
            return None
        return Strike("all connections" if every else "some connections", lasts_s)

    def _delay(self, launcher: int) -> Strike:
        lasts_s = self._lasts()
        self._proxy.delay(lasts_s)
        return Strike("all connections", lasts_s)

    def _corrupt(self, launcher: int) -> Strike:
        self._proxy.corrupt(self._rng.randint(1, MOST_CORRUPTED))
        return Strike("bytes on their way")

    def _fill_disk(self, launcher: int) -> Strike:
        limit_files(family(launcher), 0)
        return Strike("all processes", self._lasts(), lambda: _make_room(launcher))

    def _kill_redis(self, launcher: int) -> Strike | None:
        if self._redis is None:
            return None
        return Strike("redis", self._lasts(), partial(self._redis.start, self._redis.kill()))

    def _jump(self, launcher: int) -> Strike:
        forward = self._rng.random() < 0.5
        self._clock.jump(self._rng.uniform(*JUMPS_S) * (1 if forward else -1))
        return Strike("forward" if forward else "back")


def _continue(stopped: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        stopped.resume()


def _make_room(launcher: int) -> None:
    """Twice: the first time, the launcher may be starting a child."""
    for _ in range(2):
        limit_files(family(launcher))
        time.sleep(0.1)
