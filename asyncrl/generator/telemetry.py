"""Telemetry of one worker, which goes to the queue with each heartbeat, and soon after each lease that ends."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from asyncrl.device.meter import GpuMeter
from asyncrl.generator.engines.engine import SECONDS, Engine
from asyncrl.generator.leases import WorkerLeases
from asyncrl.generator.prober import Prober
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.sample_limit import SampleLimit
from asyncrl.generator.weights import WeightFollower
from asyncrl.telemetry import tracing

FIGURES = {
    "held": "sync/held",
    "running": "rollout/running",
    "waiting": "rollout/waiting",
    "leases": "rollout/leases",
    "kv_usage": "rollout/kv_usage",
    "preemptions": "rollout/preemptions",
    "drafted": "rollout/drafted",
    "accepted": "rollout/accepted",
}
"""Stats that are figures of the trace, at each heartbeat."""

EVENTS = ("dropped/", "refused/", "returned", "lost")
"""Counts of leases whose growth is an event."""

NEWS_S = 0.1
"""Least seconds between two reports of finished groups."""


class WorkerTelemetry:
    """Figures of these parts of one worker."""

    def __init__(
        self,
        engine: Engine,
        follower: WeightFollower,
        rollouts: Rollouts,
        prober: Prober | None,
        leases: WorkerLeases,
        limit: SampleLimit,
        gpus: GpuMeter | None = None,
    ) -> None:
        self._gpus = gpus
        self._engine, self._follower, self._rollouts, self._prober = engine, follower, rollouts, prober
        self._leases, self._limit = leases, limit
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._traced_at, self._tokens = 0.0, 0.0
        self._counted = Counter[str]()

    async def send_heartbeats(self, every_s: float) -> None:
        """Run until cancelled. Raises RunClosedError at the end of the run, as `send_news` does."""
        while True:
            stats = self.collect()
            self._limit.observe(self.under_way(), stats.get("kv_usage", 0.0), stats.get("preemptions", 0.0))
            self._trace(stats)
            await self._leases.renew(stats)
            await asyncio.sleep(every_s)

    async def send_news(self) -> None:
        """The learner reads the totals when it has trained on a group, maybe before the next heartbeat."""
        while True:
            await self._leases.news.wait()
            self._leases.news.clear()
            await self._leases.renew(self.collect())
            await asyncio.sleep(NEWS_S)

    def _trace(self, stats: Mapping[str, Any]) -> None:
        """Figures of now, and tasks dropped and refused since the last heartbeat."""
        now, tokens = tracing.now(), stats.get("tokens", 0)
        figures = {figure: stats[name] for name, figure in FIGURES.items() if name in stats}
        if self._traced_at:
            seconds = max(now - self._traced_at, 1e-6)
            figures["perf/generator/tokens_per_s"] = (tokens - self._tokens) / seconds
        self._traced_at, self._tokens = now, tokens
        tracing.sample(figures)
        counts = Counter({name: n for name, n in self._leases.counts.items() if name.startswith(EVENTS)})
        for name, count in (counts - self._counted).items():
            event, _, reason = name.partition("/")
            tracing.event(event, reason=reason, count=count)
        self._counted = counts

    def under_way(self) -> int:
        """Samples of training leases that the engine has not finished."""
        stats = self.engine_stats()
        return self._limit.under_way(self._leases.sampling_s(), stats["running"] + stats["waiting"])

    def collect(self) -> dict[str, Any]:
        """All figures, as totals of this process unless stated otherwise.

        tokens · running, waiting samples now · kv_usage, preemptions, drafted, accepted of engines that have them
        admitted: samples that may be under way · held, lineage · leases now · weights/… of the follower · probes: the
        prober's reports · reward/… of the reward function · seconds {span of the engine: seconds} · gpus: `GpuTotals`,
        where they are measured · counts of `WorkerLeases`
        """
        return {
            **self.engine_stats(),
            **self._follower.stats(),
            **self._rollouts.stats(),
            **self._leases.counts,
            "held": self._follower.held,
            "lineage": self._follower.lineage,
            "leases": len(self._leases),
            "seconds": dict(self._seconds),
            "admitted": self._limit.samples,
            **({"probes": self._prober.reports()} if self._prober is not None else {}),
            **({"gpus": asdict(self._gpus.totals)} if self._gpus is not None else {}),
        }

    def engine_stats(self) -> dict[str, float]:
        """The engine's stats of now; its seconds are added to the totals."""
        stats = self._engine.stats()
        for name in [name for name in stats if name.startswith(SECONDS)]:
            self._seconds[name.removeprefix(SECONDS)] += stats.pop(name)
        return stats
