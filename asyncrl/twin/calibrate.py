"""The stage times of a real run, from its folder.

    trace/    spans: generate (of a group), score, fetch, flip, verify · events: claim
    metrics   seconds of each loop by name, tokens, rollouts
    rollouts  lengths of some; their mean is corrected to that of all

A decode step takes step_s + n · sequence_s. Engines that time their steps have that line in the metrics, and another
of their prefills. For others it is the time of a group over the tokens of its longest rollout, against the sequences
that its generator decoded meanwhile, prefills included. The height of that line is then set by the engines' seconds of
decoding and their tokens; that of the prefills by the seconds in which the engines worked over those that they timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.load import load_config
from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.config.sections.generator import GENERATORS
from asyncrl.errors import ConfigError
from asyncrl.observability.run_files import RunFiles
from asyncrl.observability.timeline import ProcessTrace, Span
from asyncrl.telemetry.spans import WAIT
from asyncrl.twin.times import GenerationTimes, LearnerTimes, Lengths, QueueTimes, StageTimes, SyncTimes

FIRST = 3
"""Versions in which everything starts: they are left out."""

LEAST = 5
"""Versions after these that a calibration needs."""

QUEUE = QueueTimes(
    group_s=1.5e-4, byte_s=8.0e-10, request_s=7.5e-5, generator_share=3.4e-5, rank_share=1.5e-4
)
"""A run does not time its queue: these are of one core of a small machine (bench/results/scale_cpu2_2026-11-29.md)."""

READY = 0.1
"""The share of versions that are taken to have found their groups ready."""

MOST_REPORTS = 5.0
"""A claim of groups that are ready is not taken to last longer than so many requests without groups. A guess."""

Rows = Sequence[Mapping[str, Any]]

QUANTILES, ENOUGH = 33, 100
"""Of the distribution of lengths; rollouts that it takes to know it."""


def calibrate(folder: Path) -> StageTimes:
    """Raises ConfigError for a run without traces, or with too few versions."""
    run = RunFiles(folder)
    run.read()
    rows = [row for row in run.metrics.versions if "perf/step_s" in row][FIRST:]
    remedy = f"run it for {FIRST + LEAST} versions or more, with telemetry.trace_mb above 0"
    if len(rows) < LEAST or not _spans(run, "generate"):
        raise ConfigError("--from", str(folder), "has too few versions, or no traces", remedy)
    config = load_config(folder / "config.yaml")
    check_one_kind(config)
    lengths = _lengths(run, rows)
    return StageTimes(
        generation=_generation(run, config, lengths),
        lengths=lengths,
        learner=_learner(run, rows, config),
        sync=SyncTimes(
            fetch_s=_median_s(run, "fetch") + _median_s(run, "verify"),
            flip_s=_median_s(run, "flip"),
            queue_s=_report_s(rows),
        ),
        queue=QUEUE,
        generator_devices=generator_devices(config),
        rank_devices=rank_devices(config),
    )


def check_one_kind(config: Config) -> None:
    """Raises ConfigError for generators of several kinds, which have no common stage times."""
    pools = [*filter(None, config.generator_pools)]
    rule = "generators of several kinds have no common stage times"
    require(not pools, GENERATORS, pools, rule, f"leave it out, or set {GENERATORS}=null")


def generator_devices(config: Config) -> int:
    """Devices of one generator, all its replicas together."""
    return config.generator.ranks


def rank_devices(config: Config) -> int:
    """Devices of one data rank: those that compute the same groups together."""
    parallel = config.learner.parallel
    return parallel.tensor * parallel.context * parallel.pipeline


def longest(lengths: Lengths, group_size: int) -> float:
    """Mean tokens of the longest rollout of a group."""
    shares = ((np.arange(4096) + 0.5) / 4096) ** (1 / group_size)
    table = lengths.table()
    return float(np.interp(shares, np.linspace(0, 1, len(table)), table).mean())


def _lengths(run: RunFiles, rows: Rows) -> Lengths:
    mean = _mean(rows, "train/tokens") / _mean(rows, "train/rollouts")
    prompt = _mean(rows, "train/tokens_with_prompts") / _mean(rows, "train/rollouts") - mean
    logged = [float(row["tokens"]) for row in run.rollout_rows if row.get("tokens")]
    if len(logged) >= ENOUGH:
        points = np.quantile(logged, np.linspace(0, 1, QUANTILES))
    else:  # a curve from the shortest to the longest, by the mean
        least, most = _mean(rows, "rollout/length/min"), _mean(rows, "rollout/length/max")
        power = (most - least) / (mean - least) - 1 if least < mean < most else 0.0
        points = least + (most - least) * np.linspace(0, 1, QUANTILES) ** power
    scaled = np.maximum(1.0, points * mean / Lengths(quantiles=points.tolist()).mean())
    return Lengths(quantiles=scaled.tolist(), prompt=max(0.0, prompt))


def _generation(run: RunFiles, config: Config, lengths: Lengths) -> GenerationTimes:
    size, most = config.batch.group_size, longest(lengths, config.batch.group_size)
    alike = size * lengths.mean() / most  # sequences of a group that are under way, by the mean over its time
    found: list[np.ndarray] = []  # sequences and seconds a step, by group
    passed: list[np.ndarray] = []  # sequences and seconds, by stretch of time
    for trace in run.timeline.processes.values():
        if not (spans := _named([trace], "generate")):
            continue
        starts, ends, moments, integral = under_way(spans)
        all_of_them = (
            alike * np.diff(np.interp([starts, ends], moments, integral), axis=0)[0] / (ends - starts)
        )
        decoded = np.minimum(all_of_them, config.generator.slots)
        found.append(np.array([decoded, (ends - starts) * decoded / all_of_them / most]))
        seconds = np.diff(moments)
        counts = np.divide(np.diff(integral), seconds, where=seconds > 0, out=np.zeros_like(seconds))
        passed.append(np.array([np.minimum(alike * counts, config.generator.slots), seconds]))
    rows = run.metrics.versions
    lines = _timed(rows[-1]) or GenerationTimes(*line(*np.concatenate(found, axis=1)))
    height = _height(rows, np.concatenate(passed, axis=1), lines, lengths.mean())
    slower = _slower(rows)
    reward_s = sum(span.end - span.start for span in _spans(run, "score")) / len(_spans(run, "generate"))
    return GenerationTimes(
        step_s=lines.step_s * height,
        sequence_s=lines.sequence_s * height,
        prefill_s=lines.prefill_s * slower,
        prefill_sequence_s=lines.prefill_sequence_s * slower,
        reward_s=reward_s,
    )


def _timed(row: Mapping[str, Any]) -> GenerationTimes | None:
    """The lines of engines that time their steps."""
    if "perf/generator/decode/step_s" not in row:
        return None
    names = [
        f"perf/generator/{stage}/{of}" for stage in ("decode", "prefill") for of in ("step_s", "sequence_s")
    ]
    return GenerationTimes(*(row.get(name, 0.0) for name in names))


def _timed_seconds(row: Mapping[str, Any]) -> tuple[float, float]:
    """The seconds of decode steps and of prefills, if the engines time them."""
    decode, prefill = (row.get(f"perf/generator/{stage}/seconds", 0.0) for stage in ("decode", "prefill"))
    return decode, prefill


def _computed(rows: Rows) -> float:
    """Seconds in which the engines worked."""
    return sum(row.get("perf/generator/time/compute", 0.0) * row.get("rollout/generators", 1) for row in rows)


def _slower(rows: Rows) -> float:
    """The seconds in which the engines worked over those that they timed: other threads, and all that is not timed."""
    timed, computed = sum(_timed_seconds(rows[-1])), _computed(rows)
    return computed / timed if timed and computed else 1.0


def _height(rows: Rows, passed: np.ndarray, lines: GenerationTimes, mean_tokens: float) -> float:
    """By how much decode steps were slower than by their line: the tokens that it gives for the seconds in which the
    engines decoded, over those that they made. A prefill makes the first token of a sequence."""
    decode_s, prefill_s = _timed_seconds(rows[-1])
    share = prefill_s / (prefill_s + decode_s) if prefill_s else 0.0
    decoded_s = _computed(rows) * (1 - share)
    made = rows[-1].get("rollout/tokens_generated", 0.0) * (1 - lines.first_tokens / mean_tokens)
    if not decoded_s or made <= 0:
        return 1.0
    sequences, seconds = passed[:, passed[0] > 0]
    tokens = float((seconds * sequences / (lines.step_s + lines.sequence_s * sequences)).sum())
    return tokens * decoded_s / float(seconds.sum()) / made


def under_way(spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Starts, ends, all moments in order, and the integral of the number of spans under way up to each of these."""
    starts, ends = np.array([span.start for span in spans]), np.array([span.end for span in spans])
    moments = np.concatenate([starts, ends])
    order = np.argsort(moments, kind="stable")
    moments, change = moments[order], np.repeat([1, -1], len(spans))[order]
    integral = np.concatenate([[0.0], np.cumsum(np.cumsum(change)[:-1] * np.diff(moments))])
    return starts, ends, moments, integral


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Offset and slope of the line through the points, neither below 0.

    >>> [round(value, 6) for value in line(np.array([1.0, 2.0]), np.array([3.0, 5.0]))]
    [1.0, 2.0]
    >>> line(np.array([1.0, 2.0]), np.array([3.0, 1.0]))
    (2.0, 0.0)
    """
    spread = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread if spread > 0 else 0.0
    offset = float(y.mean()) - slope * float(x.mean())
    if slope < 0:
        return float(y.mean()), 0.0
    return (offset, slope) if offset >= 0 else (0.0, float((x * y).sum() / (x * x).sum()))


def _learner(run: RunFiles, rows: Rows, config: Config) -> LearnerTimes:
    """Every rank has the same claims: those of the first are counted."""
    ranks = config.learner.processes / rank_devices(config)
    traces = [trace for _, trace in sorted(run.timeline.processes.items()) if trace.role == "learner"]
    events = [event for trace in traces[:1] for event in trace.events if event.name == "claim"]
    claims = Counter(event.about.get("version", -1) for event in events)
    number = np.array([claims.get(row["version"] - 1, 1) for row in rows], float)
    tokens = np.array([row["train/tokens_with_prompts"] / ranks for row in rows])
    work = [_seconds(row) for row in rows]
    passes = np.array([s for s, _ in work])
    of_claim, of_token = line(tokens / number, passes / number)
    if number.min() == number.max():
        of_claim, of_token = 0.0, float(passes.sum() / tokens.sum())
    return LearnerTimes(
        token_s=of_token,
        claim_s=of_claim,
        version_s=float(np.mean([rest for _, rest in work])),
        publish_s=_mean(rows, "perf/time/wait/publish"),
        report_s=_mean(rows, "perf/time/wait/queue"),
        first_claim_s=_first_claim_s(rows),
    )


def _seconds(row: Mapping[str, Any]) -> tuple[float, float]:
    """The learner's seconds of a version that grow with its tokens, and the rest, without waits that are simulated."""
    seconds = {name.removeprefix("perf/time/"): s for name, s in row.items() if name.startswith("perf/time/")}
    for wait in ("groups", "publish", "queue"):
        seconds.pop(f"{WAIT}{wait}", None)
    passes = sum(
        s for name, s in seconds.items() if name.startswith("compute") and name != "compute/optimizer"
    )
    return passes, sum(seconds.values()) - passes


def _report_s(rows: Rows) -> float:
    """Seconds of a request without groups. In old runs the learner waited for its whole report."""
    waited = [1e3 * row.get("perf/time/wait/queue", 0.0) for row in rows]
    return 1e-3 * float(
        np.median([row.get("queue/report_ms", ms) for row, ms in zip(rows, waited, strict=True)])
    )


def _first_claim_s(rows: Rows) -> float:
    """Seconds of a version's first claim beyond a request: the wait for groups of a version that found them ready. It
    is not known of a run whose versions all waited for generators."""
    ready = float(np.quantile([row.get("perf/time/wait/groups", 0.0) for row in rows], READY))
    return max(0.0, min(ready, MOST_REPORTS * _report_s(rows)) - _report_s(rows))


def _spans(run: RunFiles, name: str) -> list[Span]:
    return _named(run.timeline.processes.values(), name)


def _named(traces: Iterable[ProcessTrace], name: str) -> list[Span]:
    lanes = [lane for trace in traces for lane in trace.lanes.values()]
    return [span for lane in lanes for span in lane.spans if span.name == name and span.end > span.start]


def _median_s(run: RunFiles, name: str) -> float:
    seconds = [span.end - span.start for span in _spans(run, name)]
    return float(np.median(seconds)) if seconds else 0.0


def _mean(rows: Rows, name: str) -> float:
    return float(np.mean([row.get(name, 0.0) for row in rows]))
