"""The behaviour contract: what an engine recorded of its tokens is what the learner computes with the same weights.

    groups in training: rollouts of the version that is about to be trained ────┐
                                                                                ├─▸ Gap ─▸ within the bounds, or the
    probes: a few tokens that each generator draws after each flip ─────────────┘          run stops

A rollout counts if all of its tokens are of that version: one that lived through a flip has keys and values of older
weights behind it. With `generator.kv` recompute or drain no token has, and every token of the version counts. Where
training runs behind generation there may be none of them in a step. So the learner notes, for each version that it
publishes, what it would say after a few prompts (`logprob_check.py`), and compares when reports come in.

Axes:  N tokens · P prompts · V vocabulary
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.errors import BehaviourMismatchError
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.types import Group, Version

log = logging.getLogger(__name__)

WITHOUT_PREFIX_CACHE = ("transformers",)
"""Engines in which a rollout never begins with keys and values that an older version has left. Others that keep these
over flips are compared by the rollouts of version 0, and by probes, which are shorter than a block of a cache."""


@dataclass(frozen=True, slots=True)
class Gap:
    """How far recorded log-probs are from recomputed ones: over `count` tokens their sum, the largest, and the task
    (or whoever else) that has it."""

    count: int = 0
    total: float = 0.0
    largest: float = 0.0
    where: str = ""

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @staticmethod
    def of(gaps: Iterable[Gap]) -> Gap:
        gaps = list(gaps)
        worst = max(gaps, key=lambda gap: gap.largest, default=Gap())
        return Gap(sum(g.count for g in gaps), sum(g.total for g in gaps), worst.largest, worst.where)


class BehaviourGate:
    """`learner.logprob_gate`. abandoned: versions that a former learner published too, with weights of its own: what is
    in the queue of those says nothing about this learner's."""

    def __init__(self, config: Config) -> None:
        gate, generator = config.learner.logprob_gate, config.generator
        self.abandoned: Collection[Version] = ()
        self._most, self._most_mean = gate.bounds(config.model.dtype)
        self._stops, self._engine = gate.on_mismatch == "stop", generator.own_engine or generator.engine
        self._kept_over_flips = generator.kv == "keep" or generator.own_engine is not None
        self._truncated_allowed = config.algorithm.truncated == "weigh"
        # A cut support makes recorded log-probs larger, by −log of the mass that it has.
        self._least = 0.0
        if generator.top_p < 1:
            self._least = math.log(generator.top_p)
        if generator.top_k > 0 or generator.min_p > 0:
            self._least = -math.inf

    def admit(self, groups: Iterable[Group]) -> None:
        """Raises BehaviourMismatchError for tokens of a support that the configuration does not let be trained on."""
        for group in groups:
            if group.sampling.truncated and not self._truncated_allowed:
                raise BehaviourMismatchError(
                    f"task {group.task.ordinal} was answered with {group.sampling}: its support was cut, and "
                    "algorithm.truncated=refuse; the generators run with another configuration than the learner"
                )

    def gap(self, batch: MicroBatch, logp_N: Tensor, version: Version) -> Gap:
        """Of what `version` made, given what that version says of these tokens now."""
        if version in self.abandoned:
            return Gap()
        at_N = batch.loss_mask_N & self._of_one_version(batch, version)
        tokens = int(at_N.sum())
        if not tokens:
            return Gap()
        apart_T = self._apart(logp_N[at_N], batch.behaviour_N[at_N])
        worst = int(apart_T.argmax())
        rollout = int(batch.seq_N[at_N][worst])
        where = f"task {int(batch.ordinals_R[rollout])}"
        return Gap(tokens, float(apart_T.sum()), float(apart_T[worst]), where)

    def _of_one_version(self, batch: MicroBatch, version: Version) -> Tensor:
        """bool [N]: of `version`, and so are all keys and values behind it."""
        if not self._kept_over_flips:
            return batch.versions_N == version
        if version > 0 and self._engine not in WITHOUT_PREFIX_CACHE:
            return torch.zeros_like(batch.loss_mask_N)
        mixed_R = torch.zeros(batch.rollouts, dtype=torch.bool, device=batch.versions_N.device)
        mixed_R[batch.seq_N[batch.loss_mask_N & (batch.versions_N != version)]] = True
        return ~mixed_R[batch.seq_N]

    def probe_gap(self, who: str, report: Mapping[str, Any], logp_PV: Tensor) -> Gap:
        """Of one generator's tokens after the prompts; logp_PV: the version's log-probs at temperature 1."""
        tokens_P = torch.tensor(report["tokens"])[:, None]
        now_P = (logp_PV / report["temperature"]).log_softmax(-1).gather(1, tokens_P)[:, 0]
        apart_P = self._apart(now_P, torch.tensor(report["logprobs"]))
        return Gap(len(apart_P), float(apart_P.sum()), float(apart_P.max()), who)

    def judge(self, gap: Gap, version: Version) -> None:
        """Raises BehaviourMismatchError for a gap beyond the bounds; under `on_mismatch: warn`, logs it."""
        if not gap.largest > self._most and not gap.mean > self._most_mean:
            return
        error = BehaviourMismatchError(
            f"the engine {self._engine!r} and the learner disagree on {gap.count} tokens of version {version}, which "
            f"both have: log-probs differ by {gap.largest:.3g} at most ({gap.where}) and {gap.mean:.3g} on average; "
            f"learner.logprob_gate allows {self._most:g} and {self._most_mean:g}. The engine runs with other weights, "
            "draws from another distribution than it records, or computes less exactly than the bounds suppose"
        )
        if self._stops:
            raise error
        log.warning("%s", error)

    def _apart(self, now_T: Tensor, recorded_T: Tensor) -> Tensor:
        difference_T = now_T.float() - recorded_T.float()
        return torch.maximum(difference_T, self._least - difference_T).clamp(min=0)


def values(name: str, gap: Gap) -> dict[str, float]:
    """As metrics; of no tokens only their number."""
    measured = {"max": gap.largest, "mean": gap.mean} if gap.count else {}
    return {
        f"logprob_gap/{name}/{key}": value for key, value in {"tokens": float(gap.count), **measured}.items()
    }
