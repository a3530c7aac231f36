"""The files in which a learner records its run: one row of metrics.jsonl per version, and summary.json at the end.

The summary is computed from the rows alone, so a resumed run is summed up as a whole.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.device.meter import GpuTotals
from asyncrl.learner.reporting.heldout import ACCURACY, PREFIX, Evaluation
from asyncrl.learner.reporting.profile import ProfileWindow
from asyncrl.learner.reporting.rollout_log import RolloutLog
from asyncrl.learner.reporting.utilization import Utilization
from asyncrl.queue.protocol.replies import Trained
from asyncrl.sync.stream.snapshot import PublishReport
from asyncrl.system.disk import replace_text
from asyncrl.system.rank_process import rank_and_world
from asyncrl.telemetry.sinks import JsonlSink, json_numbers, read_rows
from asyncrl.telemetry.spans import busy_share
from asyncrl.telemetry.status import without_timely_calls
from asyncrl.telemetry.step_times import DECODE, PREFILL, StepTimes
from asyncrl.telemetry.trackers.background import Trackers
from asyncrl.telemetry.trackers.open import open_trackers
from asyncrl.telemetry.trackers.tracker import TrackedRun
from asyncrl.types import NO_VERSION, Array, Group, Version

ROWS, SUMMARY = "metrics.jsonl", "summary.json"
DROPPED = "queue/dropped/"
EDGE_VERSIONS = 5
"""reward_start and reward_end are means over this many versions."""

TRACKERS_SHARE = 2 / 3
"""Of `launch.stop_deadline_s`, for the last calls of all trackers."""

WorkerStats = Mapping[str, Any]
"""A worker's telemetry (generator/telemetry.py): tokens, seconds {span: s}, gpus (`GpuTotals`) and weights/flips since
its start, held, and weights/pauses_ms and weights/fetches_ms of its last flips, and weights/floor_ms, the least a pause
can be."""


class RunRecords:
    """Written by rank 0 alone; on other ranks nothing is opened, and nothing but their profiles is written.

    metrics.jsonl   a row per version, and one per evaluation; the same rows go to `telemetry.trackers`
    rollouts.jsonl  rollouts as text, where `telemetry.rollouts_every` is set
    summary.json    the run as a whole, written at its end
    """

    def __init__(self, run_folder: Path, config: Config) -> None:
        self.folder, self._config, self._path = run_folder, config, run_folder / ROWS
        self.utilization = Utilization(config)
        self.profile = ProfileWindow(run_folder, config.learner.profile_versions, rank_and_world()[0])
        self._started = time.monotonic()
        self._generators = GeneratorTotals()
        self._rows: JsonlSink | None = None
        self._trackers = Trackers({})
        self._rollouts: RolloutLog | None = None

    def open(self, version: Version) -> None:
        """Begin the files. version: of the policy; rows of later versions are cut off where a run is resumed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / SUMMARY).unlink(missing_ok=True)  # the run is going on again
        resume_at = version if self._config.run.resume else None
        self._rows = JsonlSink(self._path, resume_at)
        ours, settings = self._config.telemetry, dataclasses.asdict(self._config)
        about = (ours.project, ours.group, ours.tags, ours.notes)
        run = TrackedRun(self._config.run.name, self.folder, resume_at, settings, *about)
        self._trackers = open_trackers(run, ours.trackers)
        if self._config.telemetry.rollouts_every:
            self._rollouts = RolloutLog(self.folder, self._config, resume_at)

    def last_version(self, default: Version) -> Version:
        """The newest version that has a row."""
        return max((row["version"] for row in read_rows(self._path)), default=default)

    def evaluated(self) -> set[Version]:
        """The versions whose evaluation has a row."""
        return {row["version"] for row in read_rows(self._path) if any(key.startswith(PREFIX) for key in row)}

    def write_version(
        self,
        version: Version,
        trained: Trained,
        values: Mapping[str, float],
        spans: Mapping[str, float],
        published_at: float,
    ) -> dict[str, Any]:
        """Write the row of the step that published `version`, and return it. published_at: see `now`"""
        row = step_row(version, values, spans, trained.depth, self._generators.update(trained.stats))
        self.write(row, published_at)
        return row

    def write_rollouts(self, version: Version, groups: Sequence[Group], logprobs: Sequence[Array]) -> None:
        """See `RolloutLog.write`."""
        if self._rollouts is not None:
            self._trackers.write_rollouts(version, self._rollouts.write(version, groups, logprobs))

    @staticmethod
    def now() -> float:
        """The time of a row that is written later, in seconds since 1970."""
        return round(time.time(), 3)

    def write_evaluation(self, evaluation: Evaluation) -> None:
        self.write({"version": evaluation.version, **evaluation.scores})

    def write(self, row: Mapping[str, Any], at: float | None = None) -> None:
        """Write a row of a version or of an evaluation, where the files are open. at: its time, if that is not now"""
        if self._rows is not None:
            self._rows.write(row if at is None else {"time": at, **row})
            self._trackers.write(row)

    def write_summary(self, ended: str, dropped: Mapping[str, int] | None) -> None:
        """See `run_summary` for the arguments."""
        wall_s = time.monotonic() - self._started
        summary = run_summary(
            list(read_rows(self._path)),
            max_staleness=self._config.queue.max_staleness,
            wall_s=wall_s,
            ended=ended,
            dropped=dropped,
            began=time.time() - wall_s,
        )
        write_summary(self.folder, summary)

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
        self.profile.close()
        self._trackers.close(TRACKERS_SHARE * self._config.launch.stop_deadline_s)
        if self._rollouts is not None:
            self._rollouts.close()


class GeneratorTotals:
    """Turns the generators' telemetry, totals since their start, into metrics of one version."""

    def __init__(self) -> None:
        self._before: dict[str, WorkerStats] = {}
        self._tokens = self._flips = 0.0

    def update(self, stats: Mapping[str, WorkerStats]) -> dict[str, float]:
        """Metrics since the last call. Workers report at their heartbeats and with each group; those without weights
        are left out.

        perf/busy/generator and perf/generator/time/<span> are means over workers, perf/generator/gpu_busy and gpu_watts
        over their GPUs, perf/generator/tokens_per_s is the sum of workers; perf/generator/decode/… and …/prefill/… are
        the lines through all steps so far, as `StepTimes` has them; rollout/tokens_generated, sync/flips,
        rollout/agent/…, rollout/reward/… and rollout/pool/<stage>/… are totals. A worker whose totals fell was
        restarted, and counts from 0.
        """
        pools = {name: now for name, now in stats.items() if "stage" in now}
        generators = {name: now for name, now in stats.items() if name not in pools}
        stats = {name: now for name, now in generators.items() if now.get("held", 0) != NO_VERSION}
        tokens, spans, gpus = 0.0, Counter[str](), GpuTotals()
        for name, now in stats.items():
            before = self._before.get(name, {})
            if now.get("tokens", 0) < before.get("tokens", 0):
                before = {}
            tokens += now.get("tokens", 0) - before.get("tokens", 0)
            self._flips += now.get("weights/flips", 0) - before.get("weights/flips", 0)
            spans.update(_difference(now.get("seconds", {}), before.get("seconds", {})))
            gpus += GpuTotals(**now.get("gpus", {})).since(GpuTotals(**before.get("gpus", {})))
        self._before |= stats  # a restarted queue may not list all workers yet
        self._tokens += tokens
        row: dict[str, float] = {"rollout/generators": len(generators)}
        row |= {f"perf/generator/{name}": value for name, value in gpus.figures().items()}
        if self._before:
            row |= {"rollout/tokens_generated": self._tokens, "sync/flips": self._flips}
        if sum(spans.values()) > 0:
            row["perf/busy/generator"] = busy_share(spans)
            row["perf/generator/tokens_per_s"] = tokens * len(stats) / sum(spans.values())
            row |= {f"perf/generator/time/{name}": s / len(stats) for name, s in spans.items()}
        for name, key in (
            ("sync/pause_ms_p50", "weights/pauses_ms"),
            ("sync/fetch_ms_p50", "weights/fetches_ms"),
        ):
            times = [ms for now in stats.values() for ms in now.get(key, ())]
            if times:
                row[name] = median(times)
        row |= _step_times(stats.values())
        floors = [now["weights/floor_ms"] for now in stats.values() if "weights/floor_ms" in now]
        if floors:
            row["sync/pause_floor_ms"] = median(floors)
        counts = _totals(stats, "agent/") | _totals(stats, "reward/")
        row |= {f"rollout/{key}": total for key, total in counts.items()}
        row |= {f"rollout/pool/{key}": total for key, total in _stage_totals(pools.values()).items()}
        held = [now["held"] for now in stats.values() if "held" in now]
        if held:
            row["queue/held_min"] = min(held)
        return row


def publish_values(published: PublishReport, stats: Mapping[str, float]) -> dict[str, float]:
    """The pause of rank 0 and the counts of its publisher (`Publisher.stats`), as sync/…"""
    return {
        **{f"sync/{name}": value for name, value in stats.items()},
        "sync/publish_ms": 1e3 * published.pause_s,
        "sync/publish_floor_ms": 1e3 * published.floor_s,
    }


def step_row(
    version: Version,
    values: Mapping[str, float],
    spans: Mapping[str, float],
    depth: Mapping[str, Any],
    pool: Mapping[str, float],
) -> dict[str, Any]:
    """The row of the step that published `version`. Ledger counts come as queue/…, seconds per span as
    perf/time/…."""
    counts = {f"queue/{name}": count for name, count in depth.items() if isinstance(count, (int, float))}
    counts |= {f"{DROPPED}{reason}": n for reason, n in depth.get("dropped_by_reason", {}).items()}
    times = {f"perf/time/{name}": seconds for name, seconds in spans.items()}
    seconds = {"perf/step_s": sum(spans.values()), "perf/busy/learner": busy_share(spans)}
    return {"version": version, **values, **seconds, **pool, **counts, **times}


def run_summary(
    rows: Sequence[Mapping[str, Any]],
    *,
    max_staleness: int,
    wall_s: float,
    ended: str,
    dropped: Mapping[str, int] | None = None,
    began: float = -math.inf,
) -> dict[str, Any]:
    """The whole run in one record; docs/metrics.md has its keys.

    rows     all rows of metrics.jsonl, of every process that trained this run
    wall_s   seconds that this process has run; the summary adds the steps of those before it
    ended    why
    dropped  tasks that the queue counts as dropped, by reason; none: those of the last row, if it is not known
    began    when this process started, in seconds since 1970: rows before it are of earlier processes
    """
    steps = [row for row in rows if "perf/step_s" in row]
    accuracy = [row[ACCURACY] for row in rows if ACCURACY in row]
    heldout = {k.removeprefix(PREFIX): v for row in rows for k, v in row.items() if k.startswith(PREFIX)}
    rewards = [row["rollout/reward/mean"] for row in steps if "rollout/reward/mean" in row]
    last = steps[-1] if steps else {}
    reasons = {key.removeprefix(DROPPED): n for key, n in last.items() if key.startswith(DROPPED)}
    return {
        "ended": ended,
        "heldout_accuracy_start": accuracy[0] if accuracy else None,
        "heldout_accuracy_end": accuracy[-1] if accuracy else None,
        "heldout": heldout,
        "reward_start": mean(rewards[:EDGE_VERSIONS]) if rewards else None,
        "reward_end": mean(rewards[-EDGE_VERSIONS:]) if rewards else None,
        "wall_s": wall_s + sum(row["perf/step_s"] for row in steps if row.get("time", began) < began),
        "train_s": sum(row["perf/step_s"] for row in steps),
        "versions": last.get("version", 0),
        "groups_trained": sum(row.get("train/groups", 0) for row in steps),
        "rollouts_trained": sum(row.get("train/rollouts", 0) for row in steps),
        "tokens_generated": _grown(steps, "rollout/tokens_generated"),
        "utilization": {
            "generator": _busy_over(steps, "perf/generator/time/"),
            "learner": _busy_over(steps, "perf/time/"),
        },
        "staleness": {
            "mean": _over_groups(steps, "train/staleness/mean"),
            "max": max((row.get("train/staleness/max", 0) for row in steps), default=0),
            "bound": max_staleness,
        },
        "weight_updates": _grown(steps, "sync/flips"),
        "pause_ms_p50": _median(steps, "sync/pause_ms_p50"),
        "publish_ms_p50": _median(steps, "sync/publish_ms"),
        "tasks_dropped": last.get("queue/dropped", 0) if dropped is None else sum(dropped.values()),
        "tasks_dropped_by_reason": reasons if dropped is None else dict(dropped),
    }


def write_summary(run_folder: Path, summary: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    replace_text(run_folder / SUMMARY, json.dumps(json_numbers(summary), indent=2, allow_nan=False) + "\n")


def _step_times(stats: Collection[WorkerStats]) -> dict[str, float]:
    """The lines through the decode steps and the prefills of engines that time them, and their seconds. A prefill of
    about as many sequences each time is taken to cost a decode step, and more with their number: it is one pass of the
    model, too."""
    decode, prefill = (
        sum((StepTimes.of_stats(prefix, of) for of in stats), StepTimes()) for prefix in (DECODE, PREFILL)
    )
    if not (line := decode.line()):
        return {}
    first, of_sequence = prefill.line_from(line[0])
    return {
        "perf/generator/decode/step_s": line[0],
        "perf/generator/decode/sequence_s": line[1],
        "perf/generator/prefill/step_s": first,
        "perf/generator/prefill/sequence_s": of_sequence,
        "perf/generator/decode/seconds": decode.s,
        "perf/generator/prefill/seconds": prefill.s,
    }


def _difference(now: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: max(0.0, seconds - before.get(name, 0.0)) for name, seconds in now.items()}


def _totals(stats: Mapping[str, WorkerStats], prefix: str) -> dict[str, float]:
    """Sums over the processes that run now."""
    totals = Counter[str]()
    for now in stats.values():
        totals.update({name: count for name, count in now.items() if name.startswith(prefix)})
    return dict(totals)


def _stage_totals(pools: Iterable[WorkerStats]) -> dict[str, float]:
    """<stage>/groups, <stage>/busy_s, <stage>/dropped/<reason>, …: sums over the processes that run now."""
    totals = Counter[str]()
    for now in pools:
        counts = {name: count for name, count in without_timely_calls(now).items() if name != "stage"}
        totals.update({f"{now['stage']}/{name}": count for name, count in counts.items()})
    return dict(totals)


def _busy_over(rows: Sequence[Mapping[str, Any]], prefix: str) -> float | None:
    """Share of work in all seconds of a pool; a span's seconds stand under prefix + its name."""
    spans = Counter[str]()
    for row in rows:
        spans.update({key.removeprefix(prefix): s for key, s in row.items() if key.startswith(prefix)})
    return busy_share(spans) if spans else None


def _over_groups(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    groups = sum(row.get("train/groups", 0) for row in rows)
    return sum(row.get(key, 0) * row.get("train/groups", 0) for row in rows) / groups if groups else 0.0


def _grown(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The growth of a total over all rows. A total that falls was counted anew, by the processes of a resumed run."""
    values = [0.0, *(row[key] for row in rows if key in row)]
    if len(values) == 1:
        return None
    return sum(now - before if now >= before else now for before, now in itertools.pairwise(values))


def _median(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if key in row]
    return median(values) if values else None
