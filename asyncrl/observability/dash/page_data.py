"""One run as the page shows it: its files, read as they grow, and the answers to what the page requests.

metrics.jsonl ─▸ rows by version          ─▸ metrics, overview
rollouts.jsonl ─▸ the newest rollouts     ─▸ rollouts, images
trace/ ─▸ Timeline ─▸ a LaneTrack a lane  ─▸ lanes, figures, events, the weights of each generator
"""

from __future__ import annotations

import base64
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.observability.dash.lanes import Floats, LaneTrack, SpanColumns, as_one, shares
from asyncrl.observability.doctor.rules import diagnose
from asyncrl.observability.overview import overview
from asyncrl.observability.rows import Row, number
from asyncrl.observability.run_files import RunFiles
from asyncrl.observability.timeline import SILENT_S, ProcessTrace

MOST_EVENTS = 400
"""Of the page, without those of routine, which it has as lanes and figures."""

MOST_PROCESSES = 4
"""Processes of a role that have lanes of their own unless the page opens their group."""

ANSWER_BYTES = 16 << 20
"""Of rollouts in one answer, by the lines of their file."""

ROLES = ("queue", "learner", "generator")
IMAGES = "images"
IMAGE_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """A viewport of the timeline.

    start, end: seconds since 1970 · opened: roles whose processes have lanes of their own, however many they are
    """

    start: float
    end: float
    pixels: int
    opened: frozenset[str] = frozenset()

    def edges(self, columns: int) -> Floats:
        return np.linspace(self.start, self.end, columns + 1)


class PageData(RunFiles):
    """epoch: rises when rows that were read before have become others, so that a page begins anew.
    findings: of the doctor, as of the last `find`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, texts=True)
        self.epoch = 0
        self.findings: list[Answer] = []
        self._tracks: dict[tuple[str, str], LaneTrack] = {}

    def read(self) -> None:
        rows = self.metrics.versions
        before = (rows, len(rows), rows[-1] if rows else None)
        super().read()
        rows = self.metrics.versions
        if before[1] and (rows is not before[0] or rows[before[1] - 1] is not before[2]):
            self.epoch += 1
        for process in self.timeline.processes.values():
            for lane in process.lanes.values():
                track = self._tracks.setdefault((process.name, lane.name), LaneTrack(lane.switches))
                track.take(lane.spans)

    def find(self, logs: bool = True) -> None:
        """May run beside `read`. logs: whether findings may have lines of them"""
        self.findings = [finding.answer() for finding in diagnose(self, logs)]

    def state(self, epoch: int = -1, after: int = 0) -> Answer:
        """All but lanes and rollouts. epoch, after: what the page has: rows up to a version of an epoch."""
        if epoch != self.epoch:
            after = 0
        return {
            "name": self.name,
            "folder": str(self.folder),
            "epoch": self.epoch,
            "bounds": self.bounds(),
            "overview": overview(self),
            "metrics": _columns([row for row in self.metrics.versions if row["version"] > after]),
            "evaluations": _columns(self.metrics.evaluations),
            "findings": self.findings,
            "events": self.events(),
            "weights": list(self.weights()),
            "rollouts": len(self.rollout_rows),
            "damaged": self.metrics.damaged + sum(each.damaged for each in self.timeline.processes.values()),
        }

    def events(self) -> list[Answer]:
        """The newest that are no routine."""
        return [
            {"process": name, "event": event.name, "time": event.time, "about": event.about}
            for name, event in self.news()[-MOST_EVENTS:]
        ]

    def lanes(self, view: View) -> Answer:
        """The lanes in a viewport. Many processes of a role are one group of lanes unless it is opened."""
        counts = Counter(each.role for each in self.timeline.processes.values())
        edges = view.edges(view.pixels)
        shown, groups = [], []
        for process in self._ordered():
            if counts[process.role] <= MOST_PROCESSES or process.role in view.opened:
                for lane in sorted(process.lanes, key=lambda name: not process.lanes[name].switches):
                    rows = self._rows(process, lane, edges)
                    one = _lane(process.name, lane, process.role, rows, edges)
                    shown.append(one | {"switches": process.lanes[lane].switches})
            elif process.role not in groups:
                groups.append(process.role)
                shown.extend(self._group(process.role, counts[process.role], edges))
        return {
            "from": view.start,
            "to": view.end,
            "pixels": view.pixels,
            "lanes": [lane for lane in shown if lane["rows"]],
            "many": sorted(role for role, count in counts.items() if count > MOST_PROCESSES),
            "figures": self.figures(view.start, view.end, max(1, view.pixels // 3)),
        }

    def figures(self, start: float, end: float, columns: int) -> Answer:
        """Figures of the queue over time: the mean of each column, None where there was none."""
        edges = np.linspace(start, end, columns + 1)
        found: Answer = {"times": ((edges[1:] + edges[:-1]) / 2).tolist()}
        for process in self.timeline.processes.values():
            for name, (times, values) in process.figures.items():
                at = np.searchsorted(edges, times, side="right") - 1
                inside = (at >= 0) & (at < columns)
                counts = np.bincount(at[inside], minlength=columns)
                if counts.any():
                    sums = np.bincount(at[inside], np.asarray(values, float)[inside], minlength=columns)
                    means = np.where(counts, sums / np.maximum(counts, 1), np.nan)
                    key = name if process.role in ("queue", "") else f"{process.name} {name}"
                    found[key] = [None if value != value else value for value in means.tolist()]
        return found

    def span(self, process: str, lane: str, row: int, at: float) -> Answer | None:
        """The span of a row at a moment."""
        track = self._tracks.get((process, lane))
        span = track.at(row, at) if track is not None else None
        if span is None:
            return None
        end = self.timeline.processes[process].end_of(span, time.time())
        if at > end:
            return None
        return {"name": span.name, "start": span.start, "end": end, "about": span.about}

    def weights(self) -> Iterator[Answer]:
        """The newest transfers and flips of each generator, from its lane "weights"."""
        published = [
            event.about.get("version", 0)
            for each in self.timeline.processes.values()
            for event in each.events[-50:]
            if event.name == "published"
        ]
        newest = max(published, default=0)
        for process in self._ordered():
            lane = process.lanes.get("weights")
            latest = (
                {} if lane is None else {span.name: span for span in lane.spans[-60:] if span.end == span.end}
            )
            flip, fetch = latest.get("flip"), latest.get("fetch")
            if flip is None and fetch is None:
                continue
            held = flip.about.get("version") if flip else None
            yield {
                "generator": process.name,
                "held": held,
                "lag": None if held is None else max(0, newest - held),
                "fetch_ms": 1e3 * (fetch.end - fetch.start) if fetch else None,
                "flip_ms": 1e3 * (flip.end - flip.start) if flip else None,
                "bytes": fetch.about.get("bytes") if fetch else None,
                "groups": len(process.lanes["rollouts"].spans) if "rollouts" in process.lanes else 0,
                "silent_s": max(0.0, self.bounds()[1] - process.last),
            }

    def rollouts(self, versions: tuple[float, float], rewards: tuple[float, float], most: int) -> Answer:
        """The newest rollouts of versions and rewards in closed intervals."""
        found = [
            (row, nbytes)
            for row, nbytes in self.rollout_rows.newest()
            if versions[0] <= (number(row, "version") or 0.0) <= versions[1]
            and rewards[0] <= (number(row, "reward") or 0.0) <= rewards[1]
        ]
        sizes = accumulate(nbytes for _, nbytes in found)
        shown = [row for (row, _), size in zip(found, sizes, strict=True) if size <= ANSWER_BYTES]
        return {"found": len(found), "rows": shown[:most]}

    def image(self, path: str) -> tuple[Path, str] | None:
        """A picture of a rollout and its media type; None for what is no picture in the run's folder of pictures."""
        try:
            found = (self.folder / path).resolve()
            inside = found.is_relative_to(self.folder / IMAGES) and found.is_file()
        except (OSError, ValueError):
            return None
        media = IMAGE_TYPES.get(found.suffix.lower())
        if media is None or not inside:
            return None
        return found, media

    def _ordered(self) -> list[ProcessTrace]:
        def place(process: ProcessTrace) -> tuple[int, int, str]:
            at = ROLES.index(process.role) if process.role in ROLES else len(ROLES)
            return at, len(process.name), process.name

        return sorted(self.timeline.processes.values(), key=place)

    def _rows(self, process: ProcessTrace, lane: str, edges: Floats) -> list[SpanColumns]:
        now = time.time()
        open_until = now if now - process.last <= SILENT_S else process.last
        return self._tracks[process.name, lane].columns(edges, open_until)

    def _group(self, role: str, count: int, edges: Floats) -> Iterator[Answer]:
        """A lane for each name of a lane of the role's processes, with the sums over these."""
        processes = [each for each in self._ordered() if each.role == role]
        for lane in dict.fromkeys(name for each in processes for name in each.lanes):
            rows = as_one([self._rows(each, lane, edges) for each in processes if lane in each.lanes], edges)
            yield _lane(f"{count} × {role}", lane, role, rows, edges) | {"group": count}


def _lane(process: str, name: str, role: str, rows: Sequence[SpanColumns], edges: Floats) -> Answer:
    totals: Counter[str] = Counter()
    packed = []
    for row in rows:
        totals.update({each: float(seconds.sum()) for each, seconds in row.seconds.items()})
        parts = shares(row, edges)
        encoded = {each: base64.b64encode(part.tobytes()).decode() for each, part in parts.items()}
        packed.append({"at_once": round(row.at_once, 1), "shares": encoded})
    while packed and not packed[-1]["shares"]:
        packed.pop()
    named = {each: seconds for each, seconds in totals.items() if seconds > 0.0}
    return {"process": process, "lane": name, "role": role, "rows": packed, "totals": named, "group": 0}


def _columns(rows: Sequence[Row]) -> Answer:
    """Rows as one list for each key that is a number in any of them."""
    keys = {key for row in rows for key, value in row.items() if isinstance(value, int | float)}
    return {key: [row.get(key) for row in rows] for key in sorted(keys)}
