"""An engine as the bench has it: it sets how long answers get, and notes what the engine does."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.types import Turn
from bench.generator.model import LONG, Load

COMPARED = 16
"""Tokens of an answer where log-probs are compared, and nothing is timed."""

GLANCE_S = 0.02


@dataclass(frozen=True, slots=True)
class Measured:
    """busy: samples being decoded, as a share of the slots."""

    tokens_per_s: float
    busy: float


def lognormal(ordinal: int, sample: int, load: Load = LONG) -> int:
    """Tokens of an answer: σ = 1, of the load's mean before the longest are cut off."""
    random = np.random.default_rng([ordinal, sample])
    return int(np.clip(random.lognormal(np.log(load.mean) - 0.5, 1.0), 1, load.longest))


class Watched:
    """Everything but what stands here is the engine's own. long_tail, tokens: how long answers are from now on."""

    def __init__(self, engine: Any, load: Load = LONG) -> None:
        self.engine, self.load = engine, load
        self.long_tail, self.tokens = False, load.mean
        self._admits, self._held_back = asyncio.Event(), 0
        self._admits.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def sample(self, request: SampleRequest) -> list[Turn]:
        """For the worker."""
        self._held_back += request.n
        await self._admits.wait()
        self._held_back -= request.n
        if request.request_id.startswith("probe"):
            return await self.engine.sample(request)
        if not self.long_tail:
            return await self.engine.sample(_of_length(request, self.tokens))
        alone = [
            replace(
                request, request_id=f"{request.request_id}#{i}", ordinal=request.ordinal * request.n + i, n=1
            )
            for i in range(request.n)
        ]
        jobs = [self.engine.sample(_of_length(one, lognormal(one.ordinal, 0, self.load))) for one in alone]
        return [turn for (turn,) in await asyncio.gather(*jobs)]

    def stats(self) -> dict[str, float]:
        stats: dict[str, float] = self.engine.stats()
        return {**stats, "waiting": stats["waiting"] + self._held_back}

    async def hold_back(self) -> None:
        """Nothing of the worker's reaches the engine any more; what is under way is finished."""
        self._admits.clear()
        while (stats := self.engine.stats())["running"] + stats["waiting"]:
            await asyncio.sleep(GLANCE_S)

    def go_on(self) -> None:
        self._admits.set()

    async def close(self) -> None:
        """The bench goes on with the engine once its worker has ended."""

    async def measure(self, seconds: float) -> Measured:
        """Of all the time from now on: an update comes every few seconds, and its pause counts."""
        begun, tokens, glances = time.perf_counter(), self.engine.stats()["tokens"], []
        while time.perf_counter() < begun + seconds:
            await asyncio.sleep(GLANCE_S)
            glances.append(self.engine.stats()["running"] / self.load.slots)
        rate = (self.engine.stats()["tokens"] - tokens) / (time.perf_counter() - begun)
        return Measured(rate, sum(glances) / len(glances))


def _of_length(request: SampleRequest, tokens: int) -> SampleRequest:
    return replace(request, sampling=replace(request.sampling, max_tokens=tokens))
