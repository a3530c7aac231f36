"""Figures of the rows that are beyond what a run of any kind should have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from asyncrl.observability.doctor.facts import Finding, RunFacts, average, percent, versions
from asyncrl.observability.rows import EVALUATION

LR, STALENESS = "learner.optimizer.lr", "queue.max_staleness"


@dataclass(frozen=True, slots=True)
class FigureLimit:
    """most: of the mean over the last versions · sentence: with {share}, {value} · change: a key of the configuration,
    to be set to `to`, or to so many times its value"""

    figure: str
    most: float
    sentence: str
    change: str
    to: str | float
    hint: str


# fmt: off
LIMITS = (
    FigureLimit("train/clip_fraction", 0.3, "The loss holds back {share} of the tokens: the policy moves too far.",
                LR, 1 / 3, "or a lower queue.max_staleness"),
    FigureLimit("train/rejected_fraction", 0.3, "The correction rejects {share} of the tokens.",
                STALENESS, 0.5, "fresher data; or a wider algorithm.correction.reject_high"),
    FigureLimit("rollout/length/truncated", 0.2, "A limit cuts off {share} of the rollouts.",
                "generator.max_tokens", 2.0, "and generator.max_length with it: what is cut off may lack the answer"),
    FigureLimit("perf/wait_fraction/publish", 0.15, "The learner waits {share} of its time for copies of shards.",
                "sync.snapshots", "2", "one is copied while the other is sent"),
    FigureLimit("perf/wait_fraction/checkpoint", 0.15, "The learner waits {share} of its time for checkpoints.",
                "checkpoint.every", 4.0, "or checkpoint.asynchronous=true"),
    FigureLimit("perf/wait_fraction/ranks", 0.25, "Learner ranks wait {share} of their time for each other.",
                "learner.micro_batch_tokens", 2.0, "larger micro-batches even the work of ranks out"),
    FigureLimit("perf/wait_fraction/pool", 0.3, "The learner waits {share} of its time for models on pools.",
                "placement", "", "more devices for that pool"),
    FigureLimit("perf/wait_fraction/queue", 0.25, "The learner waits {share} of its time for the queue.",
                "", "", "Give the queue's process a core of its own"),
    FigureLimit("sync/lag", 3.0, "A generator decodes with weights that are {value} versions behind.",
                "sync.delta", "always", "less to send; or a faster link"),
    FigureLimit("train/groups_not_finite", 0.0, "Groups are left out because their numbers are not finite.",
                LR, 1 / 3, "look at them first: `asyncrl groups` on groups/"),
    FigureLimit("rollout/reward/zeroed", 0.0, "Answers count 0 because their reward failed: {value} by now.",
                "reward.retries", "3", "the log of a generator has the error"),
    FigureLimit("rollout/reward/missed_weights", 0.0, "reward.weights has a name that no answer has a part of.",
                "reward.weights", "", "correct the name; the part may also be rare"),
    FigureLimit("eval/unscored", 0.0, "{value} held-out answers of the last evaluation have no score.",
                "reward.deadline_s", 4.0, "the log of a generator has the error"),
)
# fmt: on


def limits(facts: RunFacts) -> Iterator[Finding]:
    for limit in LIMITS:
        rows = facts.evaluations[-1:] if limit.figure.startswith(EVALUATION) else facts.recent
        value = average(rows, limit.figure)
        if value is not None and value > limit.most:
            sentence = limit.sentence.format(share=percent(value), value=f"{value:.3g}")
            to = facts.times(limit.change, limit.to) if isinstance(limit.to, float) else limit.to
            evidence = f"{versions(rows)}: {limit.figure} {value:.3g} on average"
            yield Finding("warning", sentence, evidence, limit.change, to, limit.hint, limit.figure)
