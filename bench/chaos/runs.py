"""One run under `asyncrl train`, in a process of its own, with or without kills."""

from __future__ import annotations

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
from asyncrl.launch.run_folder import read_summary, run_folder
from asyncrl.telemetry.sinks import read_rows
from bench.chaos.history import History, JournalReader
from bench.chaos.kills import PARTIES, kill

DEADLINE_S = 3600.0
LOOK_S = 0.1
SPREAD = 0.5
"""The time from one kill to the next is drawn from `every` give or take this share of it."""

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
    """every: seconds between two kills, on average; None: no kills. overrides: "key=value" texts, run.name among them.

    The run's folder is made anew.
    """

    def __init__(self, config: str, overrides: Sequence[str], every: float | None, seed: int = 0) -> None:
        words = [*HARDY, *overrides]
        loaded = load_config(config, words)
        self._folder = run_folder(loaded)
        self._command = [sys.executable, "-m", "asyncrl", "train", config, *words]
        self._every, self._rng = every, random.Random(seed)
        self._journal, self._history = JournalReader(loaded), History()
        self._kills: Counter[str] = Counter()

    def live(self) -> Outcome:
        """To its end. ProcessDiedError if it does not end well, DeadlineError if it does not end."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        log, started = self._folder.with_suffix(".log"), time.monotonic()
        with log.open("w", encoding="utf-8") as file:
            launcher = subprocess.Popen(self._command, stdout=file, stderr=subprocess.STDOUT)
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
        """Until it has ended. Nobody is killed before the first version is trained."""
        due: float | None = None
        while launcher.poll() is None:
            now = time.monotonic()
            if now - started > DEADLINE_S:
                raise DeadlineError("bench.chaos", "the run", "its end", DEADLINE_S)
            if (
                self._every is not None
                and due is None
                and next(read_rows(self._folder / "metrics.jsonl"), None)
            ):
                due = now + self._pause(self._every)
            if self._every is not None and due is not None and now > due:
                self._history.read(self._journal.new_records())
                party = self._rng.choice(PARTIES)
                self._kills[party] += kill(launcher.pid, party, self._rng)
                due = now + self._pause(self._every)
            time.sleep(LOOK_S)

    def _pause(self, every: float) -> float:
        return every * self._rng.uniform(1 - SPREAD, 1 + SPREAD)


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Its processes end with it."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGKILL)
    launcher.wait()
