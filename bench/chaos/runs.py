"""One run under `asyncrl train`, in a process of its own, with or without kills."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.load import load_config
from asyncrl.errors import DeadlineError, ProcessDiedError
from asyncrl.launch.folder.run_folder import read_summary, run_folder
from asyncrl.system.signals import die_with_parent
from asyncrl.telemetry.sinks import read_rows
from bench.chaos.history import History, JournalReader
from bench.chaos.kills import PARTIES, kill

DEADLINE_S = 3600.0
LOOK_S = 0.1
SPREAD = 0.5
"""The pause before a kill is drawn from `every` give or take this share of it."""

HARDY = (
    "launch.quiet=true",
    *(f"launch.{party}_restarts=100000" for party in PARTIES),
    "checkpoint.every=5",  # what a dead learner costs
    "queue.lease_s=5",  # what a dead generator costs
)
"""Overrides with which a run can be killed as often as one likes; the undisturbed run has them too."""


@dataclass
class Outcome:
    """seconds: of the launcher, from start to end · load: average over a minute, at the end"""

    seconds: float
    kills: Counter[str]
    restarts: int
    summary: dict[str, Any]
    history: History
    load: float = field(default_factory=lambda: os.getloadavg()[0])


class KilledRun:
    """every: seconds from the first new version after a kill to the next kill, on average; None: no kills.

    The run's folder is made anew. overrides: "key=value" texts. most: no kills beyond so many.
    """

    def __init__(
        self,
        config: str,
        overrides: Sequence[str],
        every: float | None,
        seed: int = 0,
        most: int | None = None,
    ) -> None:
        words = [*HARDY, *overrides]
        loaded = load_config(config, words)
        self._folder = run_folder(loaded)
        self._command = [sys.executable, "-m", "asyncrl", "train", config, *words]
        self._every, self._most, self._rng = every, most, random.Random(seed)
        self._journal, self._history = JournalReader(loaded), History()
        self._kills: Counter[str] = Counter()

    def live(self) -> Outcome:
        """To its end. ProcessDiedError if it does not end well, DeadlineError if it does not end."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        log, started = self._folder.with_suffix(".log"), time.monotonic()
        with log.open("w", encoding="utf-8") as file:
            launcher = subprocess.Popen(
                self._command, stdout=file, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
            )
            try:
                self._disturb(launcher, started)
            finally:
                _end(launcher)
        seconds, printed = time.monotonic() - started, log.read_text(encoding="utf-8")
        if launcher.returncode:
            raise ProcessDiedError(f"the run ended with {launcher.returncode}:\n{printed}")
        self._history.read(self._journal.new_records())
        restarts = printed.count("is started again")
        return Outcome(seconds, self._kills, restarts, read_summary(self._folder), self._history)

    def _disturb(self, launcher: subprocess.Popen[bytes], started: float) -> None:
        """Until it has ended. The pause before a kill begins with a version that was never trained before."""
        reached, due = 0, math.inf
        while launcher.poll() is None:
            now = time.monotonic()
            if now - started > DEADLINE_S:
                raise DeadlineError("bench.chaos", "the run", "its end", DEADLINE_S)
            if now > due:
                self._kill(launcher.pid)
                reached, due = self._newest(), math.inf
            elif due == math.inf and self._every is not None and self._newest() > reached:
                due = now + self._every * self._rng.uniform(1 - SPREAD, 1 + SPREAD)
            time.sleep(LOOK_S)

    def _kill(self, launcher: int) -> None:
        self._history.read(self._journal.new_records())
        party = self._rng.choice(PARTIES)
        self._kills[party] += kill(launcher, party, self._rng)
        if self._kills.total() == self._most:
            self._every = None

    def _newest(self) -> int:
        """The highest version that was trained so far."""
        path = self._folder / "metrics.jsonl"
        return max((row["version"] for row in read_rows(path) if "perf/step_s" in row), default=0)


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Its processes end with it."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGKILL)
    launcher.wait()
