"""`asyncrl bisect`: the first difference between two recorded runs, in the order in which causes come before effects.

    first weights ─▸ for each step: its version ─▸ its tasks ─▸ their groups ─▸ gradient norm ─▸ weights

Runs differ where their decisions do (asynchronous ones do soon, by the clock), or, with equal decisions, where another
machine or other code computes something else: then groups, norm or weights are the first to differ. Where both runs
have written the groups of that version (`telemetry.groups_every`), the token is named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import numpy as np

from asyncrl.learner.reporting.saved_groups import SUFFIX, folder_of, load_groups
from asyncrl.replay.replay import recorded_lives
from asyncrl.telemetry.decisions import ClaimedGroup, TrainedVersion
from asyncrl.types import Array, Group, Version

Kind = Literal["start", "decision", "groups", "gradient", "weights"]

TRAINED, BEGUN = "trained", "begun"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference. after: steps before it, which are alike"""

    kind: Kind
    after: int
    text: str


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of the learner, or the beginning of one of its lives (trained: None)."""

    version: Version
    weights: int
    trained: TrainedVersion | None = None

    @property
    def claimed(self) -> list[ClaimedGroup]:
        return [] if self.trained is None else [one for claim in self.trained.claims for one in claim]

    @property
    def named(self) -> str:
        return (
            f"begins with version {self.version}"
            if self.trained is None
            else f"trains version {self.version}"
        )


def bisect(first: Path, second: Path) -> Divergence | None:
    """The first difference; None for runs that are alike in all that they have recorded. Raises ConfigError for a run
    without decisions."""
    steps = 0
    for ours, theirs in zip_longest(_steps(first), _steps(second)):
        if (found := _difference(ours, theirs, first, second)) is not None:
            return Divergence(found[0], steps, found[1])
        steps += ours.trained is not None
    return None


def _steps(run: Path) -> Iterator[_Step]:
    lives = [life for life in recorded_lives(run) if life.role == "learner"]
    for item in (item for life in lives for item in life.items):
        if item[0] == BEGUN:
            yield _Step(item[1], item[3])
        elif item[0] == TRAINED:
            trained = TrainedVersion.from_wire(item)
            yield _Step(trained.version, trained.weights, trained)


def _difference(
    ours: _Step | None, theirs: _Step | None, first: Path, second: Path
) -> tuple[Kind, str] | None:
    """ours: of the first run"""
    if ours is None or theirs is None:
        longer, step = (second, theirs) if ours is None else (first, ours)
        assert step is not None
        return "decision", f"{longer} {step.named}; the other run has ended"
    if ours.named != theirs.named:
        return "decision", f"{first} {ours.named}; {second} {theirs.named}"
    if ours.trained is None or theirs.trained is None:
        same = ours.weights == theirs.weights
        return (
            None
            if same
            else ("start", f"the weights of version {ours.version}, with which both begin, differ")
        )
    for one, other in zip_longest(ours.claimed, theirs.claimed):
        if one is None or other is None or one.ordinal != other.ordinal:
            return (
                "decision",
                f"version {ours.version} is trained on {_task(one)} in {first}, on {_task(other)} in {second}",
            )
        if one.mark != other.mark:
            token = _first_token(ours.version, one.ordinal, first, second)
            return "groups", f"for version {ours.version} the groups of task {one.ordinal} differ: {token}"
    if ours.trained.norm != theirs.trained.norm:
        return "gradient", (
            f"the gradient of version {ours.version}, of equal groups, has the norm {ours.trained.norm!r} in {first}, "
            f"{theirs.trained.norm!r} in {second}"
        )
    if ours.weights != theirs.weights:
        return "weights", f"version {ours.version}, after gradients of equal norm, has other weights"
    return None


def _task(claimed: ClaimedGroup | None) -> str:
    return "no further group" if claimed is None else f"task {claimed.ordinal}"


def _first_token(version: Version, ordinal: int, first: Path, second: Path) -> str:
    """Where the groups of a task differ first."""
    files = [folder_of(run, version) / f"{ordinal}{SUFFIX}" for run in (first, second)]
    if not all(file.is_file() for file in files):
        return "tokens, log-probs, versions or rewards; with telemetry.groups_every=1 in both runs, which one is named"
    (ours, theirs) = (group for file in files for group in load_groups([file]))
    return _first_difference(ours, theirs)


def _first_difference(ours: Group, theirs: Group) -> str:
    begin = 0
    for rollout, (length, other) in enumerate(zip_longest(ours.lengths, theirs.lengths, fillvalue=0)):
        at = slice(begin, begin + min(length, other))
        token = min(
            (_first_unequal(getattr(ours, name)[at], getattr(theirs, name)[at]), name)
            for name in ("token_ids", "versions", "logprobs")
        )
        if token[0] < min(length, other):
            place, name = token
            was, now = (getattr(group, name)[begin + place] for group in (ours, theirs))
            return f"{name} of rollout {rollout}, token {place}: {was} and {now}"
        if length != other:
            return f"rollout {rollout} has {length} and {other} tokens"
        begin += length
    rollout = _first_unequal(ours.rewards, theirs.rewards)
    if rollout == len(ours.rewards):
        return "other columns than tokens, versions, log-probs and rewards"
    return f"the reward of rollout {rollout}: {ours.rewards[rollout]} and {theirs.rewards[rollout]}"


def _first_unequal(ours: Array, theirs: Array) -> int:
    """The index; the length of arrays that are equal."""
    unequal = np.flatnonzero(ours != theirs)
    return int(unequal[0]) if unequal.size else len(ours)
