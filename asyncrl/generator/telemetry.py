"""Telemetry of one worker, which each heartbeat sends to the queue."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from asyncrl.generator.engines.engine import SECONDS, Engine
from asyncrl.generator.prober import Prober
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.weights import WeightFollower


class WorkerTelemetry:
    """counts: groups/<stream>, dropped/<reason>, refused/<reason> and lost leases."""

    def __init__(
        self, engine: Engine, follower: WeightFollower, rollouts: Rollouts, prober: Prober | None
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._engine, self._follower, self._rollouts, self._prober = engine, follower, rollouts, prober
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def engine(self) -> dict[str, float]:
        """The engine's stats of now; its seconds are added to the totals."""
        stats = self._engine.stats()
        for name in [name for name in stats if name.startswith(SECONDS)]:
            self._seconds[name.removeprefix(SECONDS)] += stats.pop(name)
        return stats

    def collect(self, leases: int, admitted: float) -> dict[str, Any]:
        """All figures, as totals of this process unless stated otherwise.

        tokens · running, waiting samples now · kv_usage, preemptions of engines that have them · admitted: samples
        that may be under way · held, lineage · leases now · weights/… of the follower · probes: the prober's reports
        reward/… of the reward function · seconds {span of the engine: seconds} · counts
        """
        return {
            **self.engine(),
            **self._follower.stats(),
            **self._rollouts.stats(),
            **self.counts,
            "held": self._follower.held,
            "lineage": self._follower.lineage,
            "leases": leases,
            "seconds": dict(self._seconds),
            "admitted": admitted,
            **({"probes": self._prober.reports()} if self._prober is not None else {}),
        }
