"""One run under `asyncrl train`, in a process of its own, with faults or without."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config.load import load_config
from asyncrl.errors import DeadlineError, ProcessDiedError
from asyncrl.launch.folder.run_folder import OF_VERSION_0, read_address, read_summary, run_folder
from asyncrl.system.signals import die_with_parent
from asyncrl.telemetry.sinks import read_rows
from bench.chaos.faults import Fault, Faults, Strike
from bench.chaos.history import History, JournalReader
from bench.chaos.jumping_clock import FOLDER, JumpingClock
from bench.chaos.processes import PARTIES
from bench.chaos.proxy import Proxy
from bench.chaos.redis_pair import RedisPair

DEADLINE_S = 3600.0
RECOVERY_S = 180.0
"""Longest time from a fault to the next new version, and from the start to the first."""

LOOK_S = 0.1
SPREAD = 0.5
"""The pause before a fault is drawn from `every` give or take this share of it."""

ROOT = Path(__file__).parents[2]

HARDY = (
    "launch.quiet=true",
    *(f"launch.{party}_restarts=100000" for party in PARTIES),
    "launch.restart_pause_s=0",
    "checkpoint.every=5",  # what a dead learner costs
    "queue.lease_s=5",  # what a dead generator costs
    "sync.backend=tcp",  # weights travel through the proxy
)
"""Overrides with which a run bears any number of faults; the undisturbed run has them too."""


@dataclass
class Outcome:
    """seconds: of the launcher, from start to end · longest_pause_s: from one new version to the next · rows: of its
    versions · corrupted: bytes, by where they were going · refused: messages, by reason, as the queue counted ·
    failovers: how often Redis got another primary · load: average over a minute, at the end"""

    seconds: float
    faults: list[Fault]
    longest_pause_s: float
    restarts: int
    rows: list[dict[str, Any]]
    corrupted: Counter[str]
    refused: Counter[str]
    summary: dict[str, Any]
    history: History
    failovers: int = 0
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def struck(self) -> Counter[str]:
        """Faults by kind."""
        return Counter(fault.kind for fault in self.faults)


class FaultyRun:
    """A run, whose folder is made anew.

    A fault strikes `every` seconds after the one before on average, but not before a version has been trained since.

    Args:
        config: A file.
        overrides: "key=value" texts.
        kinds: Of faults; none: it is undisturbed.
        most: No faults beyond so many.
    """

    def __init__(
        self,
        config: str,
        overrides: Sequence[str],
        kinds: Sequence[str],
        every: float,
        seed: int = 0,
        most: int | None = None,
    ) -> None:
        self._config, self._words = config, [*HARDY, *overrides]
        self._kinds, self._every, self._most = kinds, every, most
        self._seed, self._rng = seed, random.Random(seed)
        self._folder = run_folder(load_config(config, self._words))
        self._queue_ports: set[int] = set()
        self._log = self._folder.with_suffix(".log")
        self._clock = JumpingClock(self._folder.with_suffix(".clock"))

    def live(self) -> Outcome:
        """To its end. ProcessDiedError if it does not end well, DeadlineError if it hangs."""
        redis_folder = self._folder.with_suffix(".redis")
        for past in (self._folder, redis_folder):
            shutil.rmtree(past, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self._log.unlink(missing_ok=True)
        with ExitStack() as closing:
            redis = RedisPair(redis_folder) if "redis" in self._kinds else None
            if redis is not None:
                closing.callback(redis.close)
                self._words += ["queue.store=redis", f"queue.redis_url={redis.url}"]
            proxy = Proxy(self._seed)
            closing.callback(proxy.close)
            journal = JournalReader(load_config(self._config, self._words))
            faults = Faults(self._kinds, proxy, self._clock, redis, self._rng)
            outcome = self._live(_Launched(self, proxy.port), proxy, journal, faults)
            outcome.failovers = 0 if redis is None else redis.failovers()
            return outcome

    def _live(self, launched: _Launched, proxy: Proxy, journal: JournalReader, faults: Faults) -> Outcome:
        watch = _Watch(self._folder, journal)
        try:
            while launched.goes_on(watch.faults):
                self._look(watch, launched, faults)
                time.sleep(LOOK_S)
        finally:
            watch.undo()
            launched.kill()
        seconds, printed = watch.seconds(), self._log.read_text(encoding="utf-8")
        if launched.code:
            raise ProcessDiedError(f"the run ended with {launched.code}:\n{printed}")
        watch.history.read(journal.new_records())
        corrupted: Counter[str] = Counter()
        for port, count in proxy.corrupted.items():
            corrupted["queue" if port in self._queue_ports else "weights"] += count
        return Outcome(
            seconds,
            watch.faults,
            watch.longest_pause_s,
            printed.count("is started again"),
            step_rows(self._folder),
            corrupted,
            refused(self._folder),
            read_summary(self._folder),
            watch.history,
        )

    def _look(self, watch: _Watch, launched: _Launched, faults: Faults) -> None:
        """One look at the run: a fault ends, or has been survived, or strikes."""
        watch.look()
        if watch.seconds() > DEADLINE_S:
            raise DeadlineError("bench.chaos", "the run", "its end", DEADLINE_S)
        if watch.is_due() and self._kinds and len(watch.faults) != self._most:
            kind = faults.next_kind()
            watch.read_journal()
            self._queue_ports.add(self._queue_port())
            # A run without a checkpoint could not be resumed after a full disk has ended it.
            may = kind != "disk" or self._has_checkpoint()
            strike = faults.strike(kind, launched.pid) if may else None
            if strike is None:
                faults.postpone(kind)
                return
            watch.begins(kind, strike)
            watch.due = time.monotonic() + self._every * self._rng.uniform(1 - SPREAD, 1 + SPREAD)

    def command(self, port: int, *words: str) -> list[str]:
        """The launcher's, with the proxy's port."""
        module = (sys.executable, "-m", "bench.chaos.launcher", str(port))
        return [*module, self._config, *self._words, *words]

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Its output is appended to the log."""
        env = {
            **os.environ,
            **self._clock.environment(),
            "PYTHONPATH": os.pathsep.join([str(FOLDER), str(ROOT)]),
        }
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent, env=env
            )

    def _has_checkpoint(self) -> bool:
        return any(path.name != OF_VERSION_0 for path in self._folder.glob("checkpoints/v*"))

    def _queue_port(self) -> int:
        return int(read_address(self._folder).rpartition(":")[2])


class _Launched:
    """The launcher of a run, which is started again with run.resume=true if a full disk has ended it."""

    def __init__(self, run: FaultyRun, port: int) -> None:
        self._run, self._port = run, port
        self._process = run.start(run.command(port))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        return self._process.returncode

    def goes_on(self, faults: list[Fault]) -> bool:
        """Whether it runs, maybe again. A checkpoint that found no room may end the learner at its next one only."""
        code = self._process.poll()
        full = next((fault for fault in faults[-2:] if fault.kind == "disk" and not fault.resumed), None)
        if code and full is not None:
            full.resumed = True
            self._process = self._run.start(self._run.command(self._port, "run.resume=true"))
            return True
        return code is None

    def kill(self) -> None:
        """Its processes end with it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()


class _Watch:
    """What a run does, look by look.

    Attributes:
        due: When the next fault may strike, by time.monotonic.
        longest_pause_s: From one new version to the next.
    """

    def __init__(self, folder: Path, journal: JournalReader) -> None:
        self.faults: list[Fault] = []
        self.history = History()
        self.due = 0.0
        self.longest_pause_s = 0.0
        self._folder, self._journal = folder, journal
        self._started = self._new_at = time.monotonic()
        self._newest = 0
        self._waits = True  # for a version that was never trained before
        self._undo: list[tuple[float, Strike]] = []

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def is_due(self) -> bool:
        return not self._waits and not self._undo and time.monotonic() >= self.due

    def begins(self, kind: str, strike: Strike) -> None:
        self.faults.append(Fault(kind, strike.struck, self.seconds()))
        self._undo.append((time.monotonic() + strike.lasts_s, strike))
        self._waits = True

    def look(self) -> None:
        """DeadlineError if no new version has come for too long."""
        now = time.monotonic()
        if self._undo and now >= self._undo[0][0]:
            self.undo()
        rows = step_rows(self._folder)
        newest = max((row["version"] for row in rows), default=0)
        if newest > self._newest:
            if self._newest:
                self.longest_pause_s = max(self.longest_pause_s, now - self._new_at)
            if self.faults:
                last = self.faults[-1]
                pause_s = now - max(self._new_at, self._started + last.at_s)
                last.pause_s = max(last.pause_s or 0.0, pause_s)
            self._newest, self._new_at, self._waits = newest, now, False
        elif now - self._new_at > RECOVERY_S:
            what = f"a version after {self._newest}; the last faults: {self.faults[-3:]}"
            raise DeadlineError("bench.chaos", "the run", what, RECOVERY_S)

    def undo(self) -> None:
        """End the fault that lasts, if one does."""
        for _, strike in self._undo:
            strike.undo()
        self._undo.clear()

    def read_journal(self) -> None:
        self.history.read(self._journal.new_records())


def step_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of versions that were trained so far."""
    return [row for row in read_rows(folder / "metrics.jsonl") if "perf/step_s" in row]


def refused(folder: Path) -> Counter[str]:
    """Messages that the queue refused, and groups that were dropped as unreadable, by reason, from its trace."""
    counts: Counter[str] = Counter()
    for path in (folder / "trace").glob("queue*.jsonl"):
        for line in path.read_bytes().split(b"\n"):
            if b'"event":"refused"' in line:
                row = json.loads(line)
                counts[row["reason"]] += row["count"]
    return counts
