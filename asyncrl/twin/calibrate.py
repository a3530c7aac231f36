"""The stage times of a real run, from its folder.

    trace/    spans: generate (of a group), score, fetch, flip, verify · events: claim
    metrics   seconds of each loop by name, tokens, rollouts
    rollouts  lengths of some; their mean is corrected to that of all

The time of a group over the tokens of its longest rollout, against the sequences that its generator decoded meanwhile,
is a line: step_s + n · sequence_s. Its height is then set by the engines' seconds of computation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.observability.run_files import RunFiles
from asyncrl.observability.timeline import Span
from asyncrl.telemetry.spans import WAIT
from asyncrl.twin.times import GenerationTimes, LearnerTimes, Lengths, StageTimes, SyncTimes

FIRST = 3
"""Versions in which everything starts: they are left out."""

LEAST = 5
"""Versions after these that a calibration needs."""

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
    lengths = _lengths(run, rows)
    return StageTimes(
        generation=_generation(run, config, lengths),
        lengths=lengths,
        learner=_learner(run, rows, config),
        sync=SyncTimes(
            fetch_s=_mean(_spans(run, "fetch")) + _mean(_spans(run, "verify")),
            flip_s=_mean(_spans(run, "flip")),
            queue_s=float(np.mean([row.get("perf/time/wait/queue", 0.0) for row in rows])),
        ),
        generator_devices=generator_devices(config),
        rank_devices=rank_devices(config),
    )


def generator_devices(config: Config) -> int:
    return config.generator.vllm.tensor_parallel if config.generator.on_vllm else 1


def rank_devices(config: Config) -> int:
    """Devices of one data rank: those that compute the same groups together."""
    parallel = config.learner.parallel
    return parallel.tensor * parallel.context * parallel.pipeline


def longest(lengths: Lengths, group_size: int) -> float:
    """Mean tokens of the longest rollout of a group."""
    shares = ((np.arange(4096) + 0.5) / 4096) ** (1 / group_size)
    table = lengths.table()
    return float(np.interp(shares, np.linspace(0, 1, len(table)), table).mean())


def _lengths(run: RunFiles, rows: Sequence[Mapping[str, Any]]) -> Lengths:
    rollouts = _total(rows, "train/rollouts")
    mean, prompts = (
        _total(rows, "train/tokens") / rollouts,
        _total(rows, "train/tokens_with_prompts") / rollouts,
    )
    prompt = max(0.0, prompts - mean)
    logged = [float(row["tokens"]) for row in run.rollout_rows if row.get("tokens")]
    if len(logged) >= ENOUGH:
        points = np.quantile(logged, np.linspace(0, 1, QUANTILES))
    else:  # a curve from the shortest to the longest, by the mean
        least, most = (
            float(np.mean([row[f"rollout/length/{name}"] for row in rows])) for name in ("min", "max")
        )
        power = (most - least) / (mean - least) - 1 if least < mean < most else 0.0
        points = least + (most - least) * np.linspace(0, 1, QUANTILES) ** power
    scaled = np.maximum(1.0, points * mean / Lengths(quantiles=points.tolist()).mean())
    return Lengths(quantiles=scaled.tolist(), prompt=prompt)


def _generation(run: RunFiles, config: Config, lengths: Lengths) -> GenerationTimes:
    size, most = config.batch.group_size, longest(lengths, config.batch.group_size)
    alike = lengths.mean() / most  # of a group's time, its mean rollout is under way for so long
    each: list[tuple[float, float]] = []  # sequences, seconds a step
    busy = 0.0
    for trace in run.timeline.processes.values():
        lane = trace.lanes.get("rollouts")
        spans = (
            [span for span in lane.spans if span.name == "generate" and span.end > span.start] if lane else []
        )
        if len(spans) <= FIRST:
            continue
        starts, ends, moments, integral = under_way(spans)
        seconds = ends - starts
        sequences = (
            size
            * alike
            * (np.interp(ends, moments, integral) - np.interp(starts, moments, integral))
            / seconds
        )
        decoded = np.minimum(sequences, config.generator.slots)
        each += zip(decoded, seconds * decoded / sequences / most, strict=True)
        busy += float(np.diff(moments)[np.diff(integral) > 0].sum())
    found = np.array(each)
    step_s, sequence_s = line(found[:, 0], found[:, 1])
    computed = sum(
        row.get("perf/generator/time/compute", 0.0) * row.get("rollout/generators", 1)
        for row in run.metrics.versions
    )
    height = computed / busy if computed else 1.0
    groups = max(1, len(_spans(run, "generate")))
    return GenerationTimes(
        step_s=step_s * height,
        sequence_s=sequence_s * height,
        reward_s=sum(span.end - span.start for span in _spans(run, "score")) / groups,
    )


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


def _learner(run: RunFiles, rows: Sequence[Mapping[str, Any]], config: Config) -> LearnerTimes:
    ranks = config.learner.processes / rank_devices(config)
    first = next(
        iter(sorted(name for name, trace in run.timeline.processes.items() if trace.role == "learner")), ""
    )
    events = run.timeline.processes[first].events if first else []  # every rank has the same claims
    claims = Counter(event.about.get("version", -1) for event in events if event.name == "claim")
    each = [
        (_compute(row), row["train/tokens_with_prompts"] / ranks, claims.get(row["version"] - 1, 1))
        for row in rows
    ]
    seconds, tokens, number = (np.array(column, float) for column in zip(*each, strict=True))
    of_claim, of_token = line(tokens / number, seconds / number)
    rest = [sum(_seconds(row).values()) - _compute(row) - _waits(row) for row in rows]
    return LearnerTimes(
        token_s=of_token if len(set(number)) > 1 else float(seconds.sum() / tokens.sum()),
        claim_s=of_claim if len(set(number)) > 1 else 0.0,
        version_s=float(np.mean(rest)),
        publish_s=float(np.mean([row.get("perf/time/wait/publish", 0.0) for row in rows])),
    )


def _seconds(row: Mapping[str, Any]) -> dict[str, float]:
    return {name[len("perf/time/") :]: s for name, s in row.items() if name.startswith("perf/time/")}


def _compute(row: Mapping[str, Any]) -> float:
    """Seconds of a version that grow with its tokens."""
    found = _seconds(row)
    return sum(s for name, s in found.items() if name.startswith("compute") and name != "compute/optimizer")


def _waits(row: Mapping[str, Any]) -> float:
    """Waits that the simulation has by itself."""
    return sum(_seconds(row).get(f"{WAIT}{name}", 0.0) for name in ("groups", "publish", "queue"))


def _spans(run: RunFiles, name: str) -> list[Span]:
    lanes = [lane for trace in run.timeline.processes.values() for lane in trace.lanes.values()]
    return [span for lane in lanes for span in lane.spans if span.name == name and span.end > span.start]


def _mean(spans: Iterable[Span]) -> float:
    seconds = [span.end - span.start for span in spans]
    return float(np.median(seconds)) if seconds else 0.0


def _total(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(sum(row[name] for row in rows))
