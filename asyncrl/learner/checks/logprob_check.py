"""What each version says after the prompts of `probes.py`, against what the generators' engines said at that version.

    publish ──▸ note: the policy as it is, all ranks together ──▸ kept for a while
    telemetry of the generators, with their probes ──▸ judge: rank 0

Axes:  P prompts · V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.checks.behaviour import BehaviourGate, Gap, values
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.models import load_model_config
from asyncrl.probes import prompts
from asyncrl.types import Version

KEPT_BEYOND = 8
"""Versions beyond η whose answers are kept: reports come with heartbeats."""


class LogprobProbes:
    """lineage: of the versions that are noted"""

    def __init__(self, config: Config, backend: Backend, gate: BehaviourGate, lineage: int) -> None:
        self._backend, self._gate, self._lineage = backend, gate, lineage
        vocabulary = load_model_config(config.model).get_text_config().vocab_size
        self._prompts = probe_batch(prompts(vocabulary, config.generator.max_length))
        self._kept = config.queue.max_staleness + KEPT_BEYOND
        self._says: dict[Version, Tensor] = {}
        self._judged: dict[str, Version] = {}

    def note(self, version: Version) -> None:
        """∀ The policy of now is `version`."""
        logp_PV = self._backend.policy.predict_next(self._prompts)
        if self._backend.rank == 0:
            self._says[version] = logp_PV
        for old in [v for v in self._says if v <= version - self._kept]:
            del self._says[old]

    def judge(self, stats: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        """What is new in the workers' telemetry, for metrics. Raises BehaviourMismatchError."""
        gaps: list[Gap] = []
        for who, told in stats.items():
            for report in told.get("probes", ()):
                version = report["version"]
                new = version > self._judged.get(who, -1)
                if new and report["lineage"] == self._lineage and version in self._says:
                    gaps.append(self._gate.probe_gap(who, report, self._says[version]))
                    self._judged[who] = version
                    self._gate.judge(gaps[-1], version)
        return values("probe", Gap.of(gaps))


def probe_batch(prompts: Sequence[np.ndarray]) -> MicroBatch:
    """The prompts as rollouts, none of whose tokens is asked for."""
    lengths = [len(prompt) for prompt in prompts]
    of_prompts = torch.zeros(len(prompts))
    return MicroBatch(
        token_ids_N=torch.from_numpy(np.concatenate(prompts)),
        position_ids_N=torch.cat([torch.arange(length) for length in lengths]),
        seq_N=torch.arange(len(prompts)).repeat_interleave(torch.tensor(lengths)),
        loss_mask_N=torch.zeros(sum(lengths), dtype=torch.bool),
        behaviour_N=torch.zeros(sum(lengths)),
        versions_N=torch.zeros(sum(lengths), dtype=torch.int32),
        advantages_N=torch.zeros(sum(lengths)),
        lengths_R=tuple(lengths),
        group_R=torch.arange(len(prompts)),
        rewards_R=of_prompts,
        greedy_R=torch.full((len(prompts),), torch.nan),
        ordinals_R=torch.arange(len(prompts)),
        copies_R=torch.ones(len(prompts)),
        temperature_R=torch.ones(len(prompts)),
    )
