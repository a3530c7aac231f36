"""The number of samples of an engine: a free slot finds its next prompt, and the memory holds them all.

    limit = slots + a lead        as long as the engine keeps the KV of all samples
            · ¾ of the samples    when it took KV away from samples to make room (a pre-emption: all of it is redone)
            + one group           at each look at an engine that has memory to spare again

The queue's staleness bound stands above it: this limits only the leases that are requested. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from asyncrl.config.rules import require
from asyncrl.config.schema import Config

LEAD = 0.25
"""Samples waiting beyond the slots, as a share of them: prompts at hand when slots fall free."""

CUT = 0.75
"""Share of the samples under way that remain after a pre-emption."""

CALM = 0.9
"""Share of the KV memory in use below which the limit rises."""

LOOK_S = 0.05
"""Poll interval of the engine's samples while it has enough. Also how long a new lease counts with all of its samples:
by then the engine has them."""


class SampleLimit:
    """slots: samples that the engine decodes at once · group: samples of one lease · samples: to be under way"""

    def __init__(self, slots: int, group: int) -> None:
        self.group = group
        self._most = float(slots + max(group, math.ceil(LEAD * slots)))
        self.samples = self._most
        self._preemptions = 0.0

    @staticmethod
    def from_config(config: Config) -> SampleLimit:
        """Raises ConfigError if the slots hold no group."""
        slots, samples = config.generator.slots, config.batch.group_size + config.greedy_rollout
        greedy = " and a greedy rollout" if config.greedy_rollout else ""
        rule = f"must hold one group of batch.group_size={config.batch.group_size}{greedy}"
        require(samples <= slots, "generator.slots", slots, rule, f"set generator.slots={samples} or more")
        return SampleLimit(slots, samples)

    def under_way(self, ages_s: Sequence[float], in_engine: float) -> int:
        """Samples that the engine has not finished.

        ages_s: of the leases whose samples are not all made · in_engine: samples with a slot, or waiting for one
        """
        new = sum(age < LOOK_S for age in ages_s)
        return min(self.group * len(ages_s), self.group * new + int(in_engine))

    def observe(self, under_way: int, kv_usage: float, preemptions: float) -> None:
        """Adapt the limit, at a steady pace. preemptions: since the engine's start."""
        if preemptions > self._preemptions:
            self.samples = max(float(self.group), CUT * min(self.samples, under_way))
        elif kv_usage < CALM:
            self.samples = min(self._most, self.samples + self.group)
        self._preemptions = preemptions

    def groups_wanted(self, under_way: int) -> int:
        """Groups to request while so many samples are decoded or wait for it."""
        return max(0, math.floor((self.samples - under_way) / self.group))
