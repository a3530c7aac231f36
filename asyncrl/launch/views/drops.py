"""Tasks that the processes of a run on one machine drop, for the launcher to show while no version comes, and their
warnings, which it shows once.

generator, pool ──ProcessStatus──▸ logs/<name>.drops.json ──▸ launcher: "no new version for 20 s: tasks dropped: …"
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from asyncrl.disk import replace_text
from asyncrl.telemetry.status import LATE, UNDER_WAY, ProcessStatus, without_timely_calls

SUFFIX = ".drops.json"
PREFIX = "dropped/"
EVERY_S = 1.0


@contextmanager
def reported(path: Path, status: ProcessStatus) -> Iterator[None]:
    """Inside, the drops of this process and its warning are written to `path` when they change."""
    ended = threading.Event()
    thread = threading.Thread(target=_report, args=(path, status, ended), name="drops", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        status.loaded.set()  # the thread may wait for that
        thread.join()


def _report(path: Path, status: ProcessStatus, ended: threading.Event) -> None:
    status.loaded.wait()
    written = None
    while True:
        over = ended.wait(EVERY_S)
        figures = without_timely_calls(status.figures)
        now = {
            "dropped": _below(PREFIX, figures),
            "late": _below(LATE, figures),
            "under_way": _below(UNDER_WAY, figures),
            "warning": status.warning,
        }
        if any(now.values()) and now != written:
            replace_text(path, json.dumps({**now, "last": status.failure}))
            written = now
        if over:
            return


def _below(prefix: str, figures: Mapping[str, Any]) -> dict[str, int]:
    return {name.removeprefix(prefix): n for name, n in figures.items() if name.startswith(prefix)}


def clear(logs: Path) -> None:
    """Remove what the processes of an earlier life of the run have dropped."""
    for path in logs.glob(f"*{SUFFIX}"):
        path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[list[dict[str, int]], str, str]:
    """Dropped, late and under way; why the last task was dropped; the warning. A damaged file counts for nothing."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        counts = [
            {str(name): int(count) for name, count in told[key].items()}
            for key in ("dropped", "late", "under_way")
        ]
        return counts, str(told["last"] or ""), str(told.get("warning") or "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [{}, {}, {}], "", ""


class Drops:
    """What the processes of a run have dropped, by their files in `logs`, and the calls of reward functions that took
    too long, after which tasks will be."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._before = Counter[str]()
        self._late_before = Counter[str]()
        self.by_reason = Counter[str]()
        self.late, self.under_way = Counter[str](), Counter[str]()
        self.last = ""
        self._warned: set[str] = set()

    def warnings(self) -> list[str]:
        """Those of the processes that were not returned before, each under the name of its process."""
        new: list[str] = []
        for path in sorted(self._logs.glob(f"*{SUFFIX}")):
            _, _, warning = _read(path)
            if warning and warning not in self._warned:
                self._warned.add(warning)
                new.append(f"{path.name.removesuffix(SUFFIX)} warns: {warning}")
        return new

    def read(self) -> None:
        newest = 0.0
        self.by_reason = Counter[str]()
        self.late, self.under_way = Counter[str](), Counter[str]()
        for path in self._logs.glob(f"*{SUFFIX}"):
            (dropped, late, under_way), last, _ = _read(path)
            self.by_reason.update(dropped)
            self.late.update(late)
            self.under_way.update(under_way)
            if last and (at := path.stat().st_mtime) >= newest:
                self.last, newest = last, at

    def begin_anew(self) -> None:
        """Count from here: a version has come."""
        self._before, self._late_before = self.by_reason, self.late

    def since(self) -> Counter[str]:
        """By reason, since `begin_anew`. A process that was started again counts from 0."""
        return self.by_reason - self._before

    def text(self) -> str:
        """'tasks dropped: reward 96; the last one: the reward of task 9 raised KeyError'; empty without any."""
        return "; ".join([*self._late_calls(), *self._dropped_tasks()])

    def _late_calls(self) -> Iterator[str]:
        for function, count in (self.late - self._late_before).most_common():
            yield f"calls of reward {function} that took too long: {count}, under way: {self.under_way[function]}"

    def _dropped_tasks(self) -> Iterator[str]:
        since = self.since()
        if since:
            reasons = ", ".join(f"{reason} {count}" for reason, count in since.most_common())
            last = f"; the last one: {self.last}" if self.last else ""
            yield f"tasks dropped: {reasons}{last}"
