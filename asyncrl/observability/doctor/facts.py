"""The facts of a run that rules look at, and the findings that they make of them. Rules are pure functions of facts.

RunFiles ── RunFacts.of ──▸ RunFacts ── a rule ──▸ Findings
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from asyncrl.observability.logs import why_it_ended
from asyncrl.observability.rows import LARGEST, Row, number, series
from asyncrl.observability.run_files import RUNNING, RunFiles
from asyncrl.observability.timeline import Event, Lane, ProcessTrace, Span
from asyncrl.system.disk import open_to_read

RECENT = 20
"""Versions that rules look at as those of now."""

WINDOW_S = 3600.0
"""Rules look at no more of lanes than this, however long versions take."""

SHARES_OF_TIME = ("perf/wait_fraction/", "perf/busy/")
"""Figures of which a long version has more than a short one."""

LOG_BYTES = 64 << 10
"""The end of a log, where the cause of an end stands."""

Severity = Literal["wrong", "warning", "note"]
SEVERITIES = ("wrong", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that the reader of a run should know.

    severity  wrong: the run does not do what it is for · warning: it does it badly · note
    sentence  names what is wrong · evidence: figures, with versions, processes and times
    key       to change, and the `value` to try; `hint` explains it, or is the remedy where no key helps
    about     which process, reason or figure: sets the findings of a rule apart
    """

    severity: Severity
    sentence: str
    evidence: str
    key: str = ""
    value: str = ""
    hint: str = ""
    about: str = ""
    rule: str = ""

    def remedy(self) -> str:
        """
        >>> Finding("note", "", "", "queue.depth", "64", "more room").remedy()
        'Try queue.depth=64: more room.'
        """
        change = f"Try {self.key}={self.value}" if self.value else self.key and f"Change {self.key}"
        joint = "" if not change or not self.hint else ", " if self.hint.startswith(("or ", "and ")) else ": "
        return f"{change}{joint}{self.hint}{'.' * bool(change or self.hint)}"

    def answer(self) -> dict[str, str]:
        names = (name for name in self.__slots__ if name != "hint")
        return {name: getattr(self, name) for name in names} | {"remedy": self.remedy()}


@dataclass(frozen=True)
class RunFacts:
    """rows: of versions, in their order · rollouts: the newest · now: the last moment of a run that is over
    causes: why processes ended, by name"""

    rows: Sequence[Row] = ()
    evaluations: Sequence[Row] = ()
    rollouts: Sequence[Row] = ()
    processes: Mapping[str, ProcessTrace] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    state: str = RUNNING
    now: float = field(default_factory=time.time)
    causes: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(run: RunFiles, logs: bool = True) -> RunFacts:
        """As they are now; `run.read` may go on meanwhile. logs: whether they are looked into for causes."""
        processes, state = dict(run.timeline.processes), run.run_state()
        now = time.time() if state == RUNNING else run.last()
        rows, rollouts = [*run.metrics.versions], [*run.rollout_rows]
        facts = RunFacts(rows, [*run.metrics.evaluations], rollouts, processes, run.config(), state, now)
        died = {str(event.about.get("process")) for event in facts.events("ended") if event.about.get("code")}
        return replace(facts, causes={name: _cause(run.folder, name) for name in died if logs})

    @property
    def recent(self) -> Sequence[Row]:
        """Rows of the last versions. The first row of a run is left out: it has the time of loading."""
        return self.rows[1:][-RECENT:] or self.rows[-RECENT:]

    @property
    def since(self) -> float:
        """Where rules begin to look at lanes."""
        begun = number(self.recent[0], "time") if self.recent else None
        return max(begun or 0.0, self.now - WINDOW_S)

    def key(self, name: str, default: Any) -> Any:
        """The value of a key of the configuration; the default where it is none of the default's kind."""
        found: Any = self.config
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if isinstance(found, int) and abs(found) > LARGEST:
            return default
        kind: Any = int | float if isinstance(default, int | float) else type(default)
        return found if isinstance(found, int | float | str if default is None else kind) else default

    def pool_of(self, generator: str) -> str:
        """The pool of placement.generators that a generator is of, by its name; '' for the first."""
        pools = self._generator_pools()
        return next((str(pool) for pool in pools if generator.startswith(f"generator-{pool}-")), "")

    def generators_of_pools(self) -> int:
        """The number of generators of all these pools."""
        return sum(self.key(f"placement.generators.{pool}.count", 1) for pool in self._generator_pools())

    def _generator_pools(self) -> list[object]:
        placement = self.config.get("placement")
        pools = placement.get("generators") if isinstance(placement, Mapping) else None
        return (
            [name for name, entry in pools.items() if entry is not None] if isinstance(pools, Mapping) else []
        )

    def times(self, key: str, factor: float) -> str:
        """A value to try: that of the key, so many times; empty for one that is not known or no number."""
        value = self.key(key, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(round(value * factor))
        return f"{value * factor:.3g}" if isinstance(value, float) else ""

    def average(self, key: str) -> float:
        """The mean of the last versions; 0 for none."""
        return average(self.recent, key) or 0.0

    def lanes(self, name: str) -> Iterator[tuple[ProcessTrace, Lane]]:
        for process in self.processes.values():
            if name in process.lanes:
                yield process, process.lanes[name]

    def seconds(self, lane: str, name: str = "") -> float:
        """In spans of a name that ended since `since`, of all processes; of all names for none."""
        return sum(
            span.end - span.start for _, each in self.lanes(lane) for span in ended(each, self.since, name)
        )

    def events(self, *names: str) -> list[Event]:
        """Those of all processes, in order of time."""
        found = (event for each in self.processes.values() for event in [*each.events] if event.name in names)
        return sorted(found, key=lambda event: event.time)


@dataclass(frozen=True, slots=True)
class Trend:
    """Means of some rows in a row: the first ones, the `least` and `best` there were, and the last; `noise`: the error
    of such a mean."""

    first: float
    least: float
    best: float
    last: float
    noise: float

    @property
    def rise(self) -> float:
        return self.last - self.first

    def rises_from(self, start: float) -> bool:
        """Whether it ends above `start`, beyond noise and by a twentieth."""
        return self.last - start > max(4 * self.noise, 0.05 * abs(start))

    def falls(self) -> bool:
        """Whether it ends below its start, likewise."""
        return -self.rise > max(4 * self.noise, 0.05 * abs(self.first))


def trend(rows: Sequence[Row], key: str) -> Trend | None:
    """The trend of a figure; None for fewer than 10 rows that have it.

    >>> found = trend([{"version": 1, "a": value} for value in [0.0] * 5 + [2.0] * 5 + [1.0] * 5], "a")
    >>> found.first, found.best, found.last
    (0.0, 2.0, 1.0)
    """
    values = [value for _, value in series(rows, key)]
    if len(values) < 10:
        return None
    width = max(5, min(RECENT, len(values) // 4))
    means = [fmean(values[at : at + width]) for at in range(len(values) - width + 1)]
    noise = stdev(after - before for before, after in pairwise(values)) / width**0.5
    return Trend(means[0], min(means), max(means), means[-1], noise)


def average(rows: Sequence[Row], key: str) -> float | None:
    """The mean of the rows that have the key. A share of the time is that of the whole time: a version counts by
    its seconds.

    >>> rows = [{"perf/busy/learner": 1.0, "perf/step_s": 1.0}, {"perf/busy/learner": 0.0, "perf/step_s": 3.0}]
    >>> average(rows, "perf/busy/learner"), average(rows, "perf/step_s")
    (0.25, 2.0)
    """
    having = [(row, value) for row in rows if (value := number(row, key)) is not None]
    values, seconds = [value for _, value in having], [number(row, "perf/step_s") or 0.0 for row, _ in having]
    if key.startswith(SHARES_OF_TIME) and seconds and min(seconds) > 0.0:
        return fmean(values, seconds)
    return fmean(values) if values else None


def extreme(rows: Sequence[Row], key: str, width: int, sign: int = 1) -> tuple[float, Sequence[Row]] | None:
    """The highest mean (lowest for sign -1) of `width` rows in a row that have the key, and these rows; the first
    row of a run is left out.

    >>> extreme([{"a": value} for value in [9.0, 1.0, 3.0, 5.0, 1.0]], "a", 2)
    (4.0, [{'a': 3.0}, {'a': 5.0}])
    """
    having = [row for row in rows[1:] if number(row, key) is not None]
    windows = [having[at : at + width] for at in range(len(having) - width + 1)]
    means = ((average(window, key) or 0.0, window) for window in windows)
    return max(means, key=lambda pair: sign * pair[0], default=None)


def ended(lane: Lane, since: float, name: str = "") -> list[Span]:
    """Spans of a lane that ended since a moment, from the newest on; none that began WINDOW_S before it."""
    near = takewhile(lambda span: span.start >= since - WINDOW_S, reversed(lane.spans))
    return [span for span in near if span.end >= since and (not name or span.name == name)]


def percent(share: float) -> str:
    """
    >>> percent(0.604)
    '60 %'
    """
    return f"{share:.0%}".replace("%", " %")


def versions(rows: Sequence[Row]) -> str:
    """'versions 3 to 20'"""
    return f"versions {rows[0]['version']} to {rows[-1]['version']}"


def _cause(folder: Path, process: str) -> str:
    """Why a process ended, in a line of its log; empty where it has none."""
    try:
        with open_to_read(folder / "logs" / f"{Path(process).name}.log") as log:
            log.seek(max(0, log.seek(0, 2) - LOG_BYTES))
            return why_it_ended(log.read(LOG_BYTES).decode(errors="replace"), 1)[0]
    except (OSError, ValueError):
        return ""
