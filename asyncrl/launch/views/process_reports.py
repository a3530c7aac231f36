"""Reports of the processes of a run on one machine to its launcher: signs of life, warnings, dropped tasks.

generator, learner, pool, queue ──ProcessStatus──▸ logs/<name>.report.json ──▸ launcher
                     written once the process has loaded and when it changes, touched every second

The launcher shows who is loading or silent, shows each warning once, and shows drops while no version comes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.system.disk import replace_text
from asyncrl.telemetry.status import LATE, UNDER_WAY, ProcessStatus, without_timely_calls

SUFFIX = ".report.json"
DROPPED = "dropped/"
EVERY_S = 1.0

SILENT_S = 15.0
"""A process whose last sign of life is older is named."""


def reported(path: Path, status: ProcessStatus) -> AbstractContextManager[None]:
    """Inside, this process reports to `path`, from the moment that it has loaded."""
    return beside(partial(_report, path, status), status, "report")


@contextmanager
def beside(work: Callable[[threading.Event], None], status: ProcessStatus, name: str) -> Iterator[None]:
    """Inside, `work` runs on a thread of this name. Its event is set at the end, which waits for it."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(ended,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        status.loaded.set()  # the thread may wait for that
        thread.join()


def _report(path: Path, status: ProcessStatus, ended: threading.Event) -> None:
    status.loaded.wait()
    written, over = None, ended.is_set()
    while True:
        figures = without_timely_calls(status.figures)
        now = {
            "dropped": _below(DROPPED, figures),
            "late": _below(LATE, figures),
            "under_way": _below(UNDER_WAY, figures),
            "warning": status.warning,
        }
        with suppress(OSError):  # a full disk must not end the reports
            if now != written and (any(now.values()) or not over):
                replace_text(path, json.dumps({**now, "last": status.failure}))
                written = now
            else:
                os.utime(path)
        if over:
            return
        over = ended.wait(EVERY_S)


def _below(prefix: str, figures: Mapping[str, Any]) -> dict[str, int]:
    return {name.removeprefix(prefix): n for name, n in figures.items() if name.startswith(prefix)}


def remove_reports(logs: Path) -> None:
    """Remove the reports of an earlier start of the run."""
    for path in logs.glob(f"*{SUFFIX}"):
        path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[list[dict[str, int]], str, str]:
    """Dropped, late and under way; why the last task was dropped; the warning. A damaged file counts for nothing."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        counts = [
            {str(name): int(count) for name, count in report[key].items()}
            for key in ("dropped", "late", "under_way")
        ]
        return counts, str(report["last"] or ""), str(report.get("warning") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [{}, {}, {}], "", ""


class ProcessReports:
    """The reports in `logs`, as of the last `read`. last_failure: why the last task was dropped; empty if none was."""

    def __init__(self, logs: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.last_failure = ""
        self._logs, self._clock = logs, clock
        self._dropped, self._dropped_before = Counter[str](), Counter[str]()
        self._late, self._late_before = Counter[str](), Counter[str]()
        self._under_way = Counter[str]()
        self._warnings: dict[str, str] = {}  # by the process that gave each one first
        self._shown_warnings: set[str] = set()
        self._started: dict[str, float] = {}
        # Name → time stamp of its report, when it was first seen.
        self._signs: dict[str, tuple[int, float]] = {}

    def started(self, name: str) -> None:
        """A process was started, or started again: it is loading until its first report."""
        (self._logs / f"{name}{SUFFIX}").unlink(missing_ok=True)
        self._signs.pop(name, None)
        self._started[name] = self._clock()

    def ended(self, name: str) -> None:
        self._started.pop(name, None)

    def read(self) -> None:
        newest = 0.0
        self._dropped, self._late, self._under_way = Counter[str](), Counter[str](), Counter[str]()
        for path in sorted(self._logs.glob(f"*{SUFFIX}")):
            name = path.name.removesuffix(SUFFIX)
            (dropped, late, under_way), last, warning = _read(path)
            self._dropped.update(dropped)
            self._late.update(late)
            self._under_way.update(under_way)
            if warning:
                self._warnings.setdefault(warning, name)
            with suppress(FileNotFoundError):
                stat = path.stat()
                if name not in self._signs or self._signs[name][0] != stat.st_mtime_ns:
                    self._signs[name] = stat.st_mtime_ns, self._clock()
                if last and stat.st_mtime >= newest:
                    self.last_failure, newest = last, stat.st_mtime

    def loading(self) -> dict[str, float]:
        """Processes that have not reported since they were started, with the seconds since then."""
        now = self._clock()
        return {name: now - at for name, at in self._started.items() if name not in self._signs}

    def silent(self) -> dict[str, float]:
        """Processes that have loaded and given no sign for SILENT_S, with the seconds since their last one."""
        now = self._clock()
        ages = {name: now - self._signs[name][1] for name in self._started if name in self._signs}
        return {name: age for name, age in ages.items() if age >= SILENT_S}

    def new_warnings(self) -> list[str]:
        """Warnings that were not returned before, each with the name of a process that gave it."""
        new = [warning for warning in self._warnings if warning not in self._shown_warnings]
        self._shown_warnings.update(new)
        return [f"{self._warnings[warning]} warns: {warning}" for warning in new]

    def begin_anew(self) -> None:
        """Count from here: a version has come. A process that was started again counts from 0."""
        self._dropped_before, self._late_before = self._dropped, self._late

    def text(self) -> str:
        """'tasks dropped: reward 96; the last one: the reward of task 9 raised KeyError'; empty without any."""
        return "; ".join([*self._late_calls(), *self._dropped_tasks()])

    def _late_calls(self) -> Iterator[str]:
        for function, count in (self._late - self._late_before).most_common():
            yield f"calls of reward {function} that took too long: {count}, under way: {self._under_way[function]}"

    def _dropped_tasks(self) -> Iterator[str]:
        since = self._dropped - self._dropped_before
        if since:
            reasons = ", ".join(f"{reason} {count}" for reason, count in since.most_common())
            last = f"; the last one: {self.last_failure}" if self.last_failure else ""
            yield f"tasks dropped: {reasons}{last}"
