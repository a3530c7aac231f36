"""Probes: the same prompts in both pools, one report for each version held."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np
from waiting import eventually

from asyncrl.generator.engines.engine import RequestFailedError, SampleRequest
from asyncrl.generator.prober import RECENT, Prober
from asyncrl.probes import LENGTHS, prompts
from asyncrl.types import NO_VERSION, Sampling, Turn

PATIENCE_S = 20.0


@dataclass
class Follower:
    held: int = NO_VERSION
    lineage: int = -1
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def past(self, lineage: int, held: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: (self.lineage, self.held) != (lineage, held))

    async def hold(self, held: int, lineage: int = 0) -> None:
        async with self.changed:
            self.held, self.lineage = held, lineage
            self.changed.notify_all()


class Engine:
    def __init__(self) -> None:
        self.version, self.failing = 0, False
        self.asked: list[SampleRequest] = []
        self.idle = asyncio.Event()

    async def sample(self, request: SampleRequest) -> list[Turn]:
        self.asked.append(request)
        self.idle.set()
        if self.failing:
            raise RequestFailedError("no")
        made = np.array([request.ordinal]), np.array([-0.5 - request.ordinal], np.float32)
        return [Turn(request.prompt_ids, *made, np.array([self.version], np.int32), "length")]


def test_prompts_are_fixed_below_the_vocabulary_and_leave_room_for_a_token() -> None:
    for vocabulary in (11, 151_936):
        made = prompts(vocabulary, 64)
        assert [len(prompt) for prompt in made] == list(LENGTHS)
        assert all(prompt.min() >= 0 and prompt.max() < vocabulary for prompt in made)
        assert all((a == b).all() for a, b in zip(made, prompts(vocabulary, 64), strict=True))
    assert max(len(prompt) for prompt in prompts(11, 8)) == 7


async def test_each_version_is_reported_once_unless_the_engine_has_moved_on_or_fails() -> None:
    follower, engine = Follower(), Engine()
    asked = prompts(11, 64)
    prober = Prober(engine, follower, asked, Sampling(0.7, 50, seed=3))  # type: ignore[arg-type]
    running = asyncio.create_task(prober.run())
    await follower.hold(0)
    (report,) = await eventually(prober.reports)
    assert report == {
        "lineage": 0,
        "version": 0,
        "temperature": 0.7,
        "tokens": [0, 1, 2, 3],
        "logprobs": [-0.5, -1.5, -2.5, -3.5],
    }
    assert engine.asked[0].sampling == Sampling(0.7, 1, seed=3)
    for engine.version, engine.failing, held in ((3, False, 2), (4, True, 4)):
        engine.idle.clear()
        await follower.hold(held)
        await asyncio.wait_for(engine.idle.wait(), PATIENCE_S)
    engine.failing = False
    for engine.version in range(5, 5 + RECENT):
        await follower.hold(engine.version)
        await eventually(lambda: prober.reports()[-1]["version"] == engine.version)
    assert [report["version"] for report in prober.reports()] == list(range(5, 5 + RECENT))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
