"""The view of a process that was started by hand, in the table or the lines of `asyncrl train` (dashboard.py).

    loops of the process ──▸ ProcessStatus ──▸ a view of its kind ──▸ table or lines
                             figures, waits     about once a second, on a thread of its own

The view begins once the process has loaded its models. Processes that `asyncrl train` starts have none: the launcher
shows the run, and their logs keep plain lines. The first of several ranks has the view.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live

from asyncrl.config.schema import Config
from asyncrl.launch.folder.kept import keep_of_process
from asyncrl.launch.folder.run_folder import run_folder
from asyncrl.launch.views.dashboard import (
    MOST_NAMED,
    Dashboard,
    DashboardSource,
    LineDashboard,
    LiveDashboard,
    RunView,
    Value,
)
from asyncrl.launch.views.process_reports import SILENT_S, SUFFIX, beside, reported
from asyncrl.launch.views.prometheus import endpoint
from asyncrl.observability.times import duration
from asyncrl.system.rank_process import LAUNCHED
from asyncrl.telemetry import decisions
from asyncrl.telemetry.status import LATE, UNDER_WAY, ProcessStatus, without_timely_calls
from asyncrl.telemetry.tracing import recording
from asyncrl.types import TRAIN

REFRESH_S = 1.0
LINE_EVERY_S = 5.0

SHOWN_WAIT_S = 2.0
"""A shorter wait is not shown."""

Figures = Mapping[str, Any]


class ProcessView:
    """The part that all kinds of process share: how long it runs and its waits. A kind adds its own values."""

    def __init__(self, status: ProcessStatus) -> None:
        self._status, self._started = status, status.clock()
        self._figures: Figures = {}
        self._rates = Rates()
        self._newest_wait = 0.0

    def read(self) -> bool:
        if self._figures is not self._status.figures:
            self._figures = self._status.figures
            self._rates.update(self._totals(self._figures), self._status.clock())
        return True

    def alert(self) -> object:
        """When the newest of the waits that have become long began."""
        begun = [wait.since for wait in self._status.waits(SHOWN_WAIT_S)]
        self._newest_wait = max([self._newest_wait, *begun])
        return self._newest_wait

    def where(self) -> str:
        return f"up {duration(self._status.clock() - self._started)}"

    def notes(self) -> list[str]:
        now = self._status.clock()
        return [wait.text(now) for wait in self._status.waits(SHOWN_WAIT_S)]

    def values(self) -> Iterator[Value]:
        yield from ()

    def _totals(self, figures: Figures) -> Mapping[str, float]:
        """Those of which the view shows how fast they grow."""
        return {}


class Rates:
    """Growth of totals per second, from the last two readings."""

    def __init__(self) -> None:
        self._totals: Mapping[str, float] = {}
        self._at: float | None = None
        self._rates: dict[str, float] = {}

    def update(self, totals: Mapping[str, float], now: float) -> None:
        """A total that fell belongs to a process that was started again: it has no rate until the next reading."""
        if self._at is not None and now > self._at:
            seconds = now - self._at
            grown = {name: total - self._totals.get(name, 0.0) for name, total in totals.items()}
            self._rates = {name: more / seconds for name, more in grown.items() if more >= 0}
        self._totals, self._at = dict(totals), now

    def of(self, name: str) -> float | None:
        return self._rates.get(name)


class GeneratorView(ProcessView):
    """Figures of `generator/telemetry.py`."""

    def values(self) -> Iterator[Value]:
        now = self._figures
        if not now:
            return
        held = now.get("held", -1)
        yield Value("weights of version", "version", str(held) if held >= 0 else "none yet")
        yield Value("groups made", "groups", f"{now.get('groups/train', 0):,}")
        yield from _rate("tokens/s", "tokens/s", self._rates.of("tokens"))
        yield from _share("busy", "busy", self._rates.of("work"))
        yield Value("tasks leased", "leased", str(now.get("leases", 0)))
        yield Value("samples under way", "samples", f"{now.get('running', 0) + now.get('waiting', 0):.0f}")
        yield Value("weight updates", "", str(now.get("weights/flips", 0)))
        yield from _counts("reward calls that took too long", "late", now, LATE)
        yield from _counts(
            "their reward's calls under way", "under way", without_timely_calls(now), UNDER_WAY
        )
        yield from _counts("tasks dropped", "dropped", now, "dropped/")
        yield from _counts("refused by the queue", "refused", now, "refused/")

    def _totals(self, figures: Figures) -> Mapping[str, float]:
        seconds = figures.get("seconds", {})
        idle = ("wait/", "other")
        work = sum(s for name, s in seconds.items() if not name.startswith(idle))
        return {"tokens": figures.get("tokens", 0), "work": work}


class PoolView(ProcessView):
    """Figures of `pool/worker.py`, `PoolWorker.stats`."""

    def values(self) -> Iterator[Value]:
        now = self._figures
        if not now:
            return
        yield Value("groups done", "groups", f"{now.get('groups', 0):,}")
        yield from _rate("groups/s", "groups/s", self._rates.of("groups"))
        yield from _share("busy", "busy", self._rates.of("busy_s"))
        yield from _counts("groups dropped", "dropped", now, "dropped/")
        yield from _counts("refused by the queue", "refused", now, "refused/")

    def _totals(self, figures: Figures) -> Mapping[str, float]:
        return {name: figures.get(name, 0) for name in ("groups", "busy_s")}


class QueueView(ProcessView):
    """Figures of `QueueClient.status`."""

    def __init__(self, status: ProcessStatus) -> None:
        super().__init__(status)
        # Client -> when its last message came, by the clock of the status.
        self._last_message_at: dict[str, float] = {}

    def read(self) -> bool:
        super().read()
        now = self._status.clock()
        # The queue forgets a silent client after two minutes. A learner that died must stay in sight.
        lost = {
            n: at
            for n, at in self._last_message_at.items()
            if n.startswith("learner") and now - at >= SILENT_S
        }
        self._last_message_at = lost | {
            name: now - s for name, s in self._figures.get("silent_s", {}).items()
        }
        return True

    def values(self) -> Iterator[Value]:
        train = self._figures.get("streams", {}).get(TRAIN)
        if train is None:
            return
        settings = train["settings"] or {}
        yield Value("version", "version", str(train["version"]))
        yield Value("groups trained", "trained", f"{train['trained']:,}")
        yield from _rate("groups trained/s", "", self._rates.of("trained"))
        yield Value("groups ready", "ready", f"{train['ready']} of {settings.get('depth', '?')}")
        yield Value("tasks leased", "leased", str(train["leased"]))
        yield Value("tasks pending", "pending", str(train["pending"]))
        workers = [name for name in self._figures.get("workers", ()) if self._silent_s(name) < SILENT_S]
        yield Value("generators and pools", "workers", str(len(workers)))
        for name, stage in train["stages"].items():
            yield Value(f"groups that wait for the pool of the {name}", name, str(stage["waiting"]))
        if dropped := train["dropped_by_reason"]:
            yield Value("tasks dropped", "dropped", _listed(dropped))
        yield Value("payloads, MB", "MB", f"{train['bytes'] / 1e6:,.1f}")
        if refused := self._figures.get("refused"):
            yield Value("refused", "refused", _listed(refused))

    def notes(self) -> list[str]:
        """The waits, and the clients of which no message has come for SILENT_S. A client with an open request writes
        every 5 s (queue/client/session.py), a worker with every heartbeat: a silent one has ended or is cut off, or it
        is a learner that computes."""
        silent = [(name, self._silent_s(name)) for name in self._last_message_at]
        lost = [f"no word from {name} for {duration(s)}" for name, s in silent if s >= SILENT_S]
        return [*super().notes(), *lost[:MOST_NAMED]]

    def _silent_s(self, name: str) -> float:
        """Seconds since the last message of a client; without end if it has left or was forgotten."""
        return self._status.clock() - self._last_message_at.get(name, -math.inf)

    def _totals(self, figures: Figures) -> Mapping[str, float]:
        train = figures.get("streams", {}).get(TRAIN)
        return {} if train is None else {"trained": train["trained"]}


class LearnerView(RunView):
    """The rows of the run, as `asyncrl train` shows them, and what the learner waits for."""

    def __init__(self, config: Config, folder: Path, status: ProcessStatus) -> None:
        super().__init__(config, folder)
        self._waits = ProcessView(status)

    def read(self) -> bool:
        super().read()
        return True

    def alert(self) -> object:
        return super().alert(), self._waits.alert()

    def _wait(self) -> list[str]:
        """The learner names its waits itself."""
        return []

    def notes(self) -> list[str]:
        return [*super().notes(), *self._waits.notes()]


@contextmanager
def shown(
    name: str, source: DashboardSource, status: ProcessStatus, config: Config, role: str = ""
) -> Iterator[None]:
    """Inside, the process writes its trace and shows itself on stdout, unless `launch.quiet` is set. One that
    `asyncrl train` has started reports to it instead (process_reports.py). role: in the trace; none: its name
    """
    rank = int(os.environ.get("RANK", "0"))
    process = f"{name}-rank-{rank}" if rank else name
    trace = recording(run_folder(config), process, role or name, config.telemetry.trace_mb)
    figures = endpoint(config.telemetry, run_folder(config), process, role or name, status)
    lasting = beside(partial(_freeze, status), status, "freeze")
    seen = _view(name, source, status, config, rank)
    with trace, figures, lasting, _decisions(process, role or name, config), seen:
        yield


def _freeze(status: ProcessStatus, ended: threading.Event) -> None:
    """Once the process has loaded, the garbage collector ignores the objects made so far: looking through them takes
    tens of milliseconds and stops all threads."""
    status.loaded.wait()
    if not ended.is_set():
        gc.collect()
        gc.freeze()
        ended.wait()
        gc.unfreeze()


def _decisions(process: str, role: str, config: Config) -> AbstractContextManager[None]:
    """Records the decisions of a generator or the learner."""
    if not config.telemetry.decisions or role not in ("generator", "learner"):
        return nullcontext()
    folder = run_folder(config) / decisions.FOLDER
    about = {"format": decisions.FORMAT, "role": role, "config": keep_of_process(config, folder)}
    return decisions.recording(folder, process, about)


def _view(
    name: str, source: DashboardSource, status: ProcessStatus, config: Config, rank: int
) -> AbstractContextManager[None]:
    launched = LAUNCHED in os.environ
    if rank or (config.launch.quiet and not launched):
        return nullcontext()
    if launched:
        return reported(run_folder(config) / "logs" / f"{name}{SUFFIX}", status)
    return beside(partial(_show, f"{name} of run {config.run.name}", source, status), status, "view")


def _show(title: str, source: DashboardSource, status: ProcessStatus, ended: threading.Event) -> None:
    status.loaded.wait()
    with _dashboard(title, source) as dashboard:
        while not ended.wait(REFRESH_S):
            dashboard.refresh()
        dashboard.refresh()


@contextmanager
def _dashboard(title: str, source: DashboardSource) -> Iterator[Dashboard]:
    console = Console()
    if not console.is_terminal:
        yield LineDashboard(source, console, LINE_EVERY_S, title=title)
        return
    with Live(console=console, auto_refresh=False) as live, _logging_to(sys.stderr):
        yield LiveDashboard(source, live, title)


@contextmanager
def _logging_to(stream: TextIO) -> Iterator[None]:
    """Log lines pass the table: while it is there, sys.stderr is a stream that prints above it."""
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)
    ]
    before = [handler.setStream(stream) for handler in handlers]
    try:
        yield
    finally:
        for handler, stream_before in zip(handlers, before, strict=True):
            with suppress(ValueError):
                handler.setStream(stream_before or sys.__stderr__)


def _rate(label: str, short: str, rate: float | None) -> Iterator[Value]:
    if rate is not None:
        yield Value(label, short, f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}")


def _share(label: str, short: str, rate: float | None) -> Iterator[Value]:
    if rate is not None:
        yield Value(label, short, f"{min(rate, 1.0):.0%}")


def _counts(label: str, short: str, figures: Figures, prefix: str) -> Iterator[Value]:
    counts = {name.removeprefix(prefix): n for name, n in figures.items() if name.startswith(prefix) and n}
    if counts:
        yield Value(label, short, _listed(counts))


def _listed(counts: Mapping[str, int]) -> str:
    """
    >>> _listed({"too_long": 1, "reward": 2})
    'reward 2, too_long 1'
    """
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
