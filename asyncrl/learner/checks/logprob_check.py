"""Whether engines record the log-probs that the learner computes for the same tokens with the same weights.

    groups in training: rollouts of the version that is about to be trained ────┐
                                                                                ├─▸ LogprobGap ─▸ within the bounds, or
    probes: a few tokens that each generator draws after each flip ─────────────┘                 the run stops

A rollout is compared if all of its tokens are of that version: after a flip, keys and values of older weights remain in
the cache. With `generator.kv` recompute or drain they do not, and every token of the version is compared. Where
training lags behind generation a step may hold none. So the learner records, for each version that it publishes, its
log-probs after a few prompts (`probes.py`), and compares them when the generators report theirs.

    publish ──▸ note: the policy as it is, all ranks together ──▸ kept for some versions
    telemetry of the generators, with their probes ──▸ judge: rank 0

Axes:  N tokens · T compared tokens · P prompts · V vocabulary
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.errors import BehaviourMismatchError
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.models.loading import load_model_config
from asyncrl.probes import prompts
from asyncrl.telemetry import tracing
from asyncrl.types import Version

log = logging.getLogger(__name__)

WITHOUT_PREFIX_CACHE = frozenset({"transformers"})
"""Engines in which no rollout begins with cached keys and values of an older version. Engines that keep a prefix cache
over flips are compared by the rollouts of version 0, and by probes, which are shorter than a block of the cache."""

KEPT_BEYOND = 8
"""Versions beyond η whose probes are kept: generators report at their heartbeats."""


@dataclass(frozen=True, slots=True)
class LogprobGap:
    """Differences of recorded and recomputed log-probs over `count` tokens: their sum, the largest one, and where it
    is (a task, or a generator)."""

    count: int = 0
    total: float = 0.0
    largest: float = 0.0
    where: str = ""

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @staticmethod
    def of(gaps: Iterable[LogprobGap]) -> LogprobGap:
        gaps = list(gaps)
        worst = max(gaps, key=lambda gap: gap.largest, default=LogprobGap())
        return LogprobGap(sum(g.count for g in gaps), sum(g.total for g in gaps), worst.largest, worst.where)

    def metrics(self, name: str) -> dict[str, float]:
        """Without tokens, their number alone."""
        values = {"tokens": float(self.count)}
        if self.count:
            values |= {"max": self.largest, "mean": self.mean}
        return {f"train/logprob_gap/{name}/{key}": value for key, value in values.items()}


class LogprobGate:
    """`learner.logprob_gate`.

    abandoned  versions that a former learner published with weights of its own: groups of them in the queue are not
               comparable with this learner's
    """

    def __init__(self, config: Config) -> None:
        gate, generator = config.learner.logprob_gate, config.generator
        self.abandoned: Collection[Version] = ()
        self._most, self._most_mean = gate.bounds(config.model.dtype, generator.quantization is not None)
        self._stops, pools = gate.on_mismatch == "stop", config.generator_pools.values()
        self._engines = {one.engine_in_use for one in pools}
        self._kept_over_flips = any(one.kv == "keep" or one.own_engine is not None for one in pools)
        # A truncated support makes recorded log-probs larger, by −log of its mass.
        self._least = 0.0
        if generator.top_p < 1:
            self._least = math.log(generator.top_p)
        if generator.top_k > 0 or generator.min_p > 0:
            self._least = -math.inf

    def gap(self, batch: MicroBatch, logp_N: Tensor, version: Version) -> LogprobGap:
        """The gap of the tokens that `version` made. logp_N: their log-probs under that version."""
        if version in self.abandoned:
            return LogprobGap()
        at_N = batch.loss_mask_N & self._of_one_version(batch, version)
        tokens = int(at_N.sum())
        if not tokens:
            return LogprobGap()
        apart_T = self._apart(logp_N[at_N], batch.behaviour_N[at_N])
        worst = int(apart_T.argmax())
        rollout = int(batch.seq_N[at_N][worst])
        where = f"task {int(batch.ordinals_R[rollout])}"
        return LogprobGap(tokens, float(apart_T.sum()), float(apart_T[worst]), where)

    def _of_one_version(self, batch: MicroBatch, version: Version) -> Tensor:
        """bool [N]: tokens of `version` before which all keys and values are of it too."""
        if not self._kept_over_flips:
            return batch.versions_N == version
        if version > 0 and not self._engines <= WITHOUT_PREFIX_CACHE:
            return torch.zeros_like(batch.loss_mask_N)
        mixed_R = torch.zeros(batch.rollouts, dtype=torch.bool, device=batch.versions_N.device)
        mixed_R[batch.seq_N[batch.loss_mask_N & (batch.versions_N != version)]] = True
        return ~mixed_R[batch.seq_N]

    def probe_gap(self, generator: str, report: Mapping[str, Any], logp_PV: Tensor) -> LogprobGap:
        """The gap of one generator's probes. logp_PV: the version's log-probs at temperature 1."""
        tokens_P = torch.tensor(report["tokens"])[:, None]
        now_P = (logp_PV / report["temperature"]).log_softmax(-1).gather(1, tokens_P)[:, 0]
        apart_P = self._apart(now_P, torch.tensor(report["logprobs"]))
        return LogprobGap(len(apart_P), float(apart_P.sum()), float(apart_P.max()), generator)

    def judge(self, gap: LogprobGap, version: Version) -> None:
        """Raises BehaviourMismatchError for a gap beyond the bounds; under `on_mismatch: warn`, logs it."""
        if not gap.largest > self._most and not gap.mean > self._most_mean:
            return
        figures = {"tokens": gap.count, "max": gap.largest, "mean": gap.mean}
        tracing.event("logprob_mismatch", version=version, where=gap.where, **figures)
        error = BehaviourMismatchError(
            f"{_in_words(self._engines)} and the learner disagree on {gap.count} tokens of version {version}, which "
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


def _in_words(engines: Collection[str]) -> str:
    """
    >>> _in_words({"vllm"}), _in_words({"vllm", "transformers"})
    ("the engine 'vllm'", "one of the engines 'transformers', 'vllm'")
    """
    names = ", ".join(map(repr, sorted(engines)))
    return f"the engine {names}" if len(engines) == 1 else f"one of the engines {names}"


class LogprobProbes:
    """The policy's log-probs after the probe prompts, for some versions. lineage: of these versions."""

    def __init__(self, config: Config, backend: Backend, gate: LogprobGate, lineage: int) -> None:
        self._backend, self._gate, self._lineage = backend, gate, lineage
        vocabulary = load_model_config(config.model).get_text_config().vocab_size
        self._prompts = probe_batch(prompts(vocabulary, config.generator.max_length))
        self._kept = config.queue.max_staleness + KEPT_BEYOND
        self._logp_PV: dict[Version, Tensor] = {}
        self._judged: dict[str, Version] = {}  # by generator

    def note(self, version: Version) -> None:
        """Collective: record the policy, which is that of `version` now."""
        logp_PV = self._backend.policy.predict_next(self._prompts)
        if self._backend.rank == 0:
            self._logp_PV[version] = logp_PV
        for old in [v for v in self._logp_PV if v <= version - self._kept]:
            del self._logp_PV[old]

    def judge(self, stats: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        """Metrics of the probes that are new in the workers' telemetry. Raises BehaviourMismatchError."""
        gaps: list[LogprobGap] = []
        for worker, telemetry in stats.items():
            for report in telemetry.get("probes", ()):
                version = report["version"]
                new = version > self._judged.get(worker, -1)
                if new and report["lineage"] == self._lineage and version in self._logp_PV:
                    gaps.append(self._gate.probe_gap(worker, report, self._logp_PV[version]))
                    self._judged[worker] = version
                    self._gate.judge(gaps[-1], version)
        return LogprobGap.of(gaps).metrics("probe")


def probe_batch(prompts: Sequence[np.ndarray]) -> MicroBatch:
    """The prompts as rollouts without policy tokens."""
    token_ids_N = torch.from_numpy(np.concatenate(prompts))
    return MicroBatch.of_tokens(token_ids_N, [len(prompt) for prompt in prompts])
