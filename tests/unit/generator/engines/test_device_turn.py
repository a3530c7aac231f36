"""An engine that takes turns with a learner: samples wait for its turn, and it sleeps once it is idle and wanted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import eventually

from asyncrl.device.turns import DeviceLock
from asyncrl.errors import ConfigError, RunClosedError
from asyncrl.generator.engines import device_turn
from asyncrl.generator.engines.device_turn import TurnTakingEngine
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.engines.scripted_engine import ScriptedEngine
from asyncrl.generator.watches import EngineWatch
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import Sampling

REQUEST = SampleRequest("a", np.array([1]), Sampling(max_tokens=4), ordinal=0, n=2)


class Sleeper(ScriptedEngine):
    """Notes when it sleeps, and must not be used meanwhile."""

    def __init__(self) -> None:
        super().__init__(lambda ordinal, sample: [1, 2, 3], version=0)
        self.slept: list[str] = []

    async def sample(self, request: SampleRequest) -> list[Any]:
        assert self.slept[-1:] != ["sleep"]
        return await super().sample(request)

    async def sleep(self) -> None:
        self.slept.append("sleep")

    async def wake(self) -> None:
        self.slept.append("wake")


def with_turns(folder: Path, act: Callable[[TurnTakingEngine, DeviceLock, Sleeper], Any]) -> Sleeper:
    """Run `act` on an engine that has its turn, beside a learner's lock."""

    async def run() -> Sleeper:
        mine, learner, engine = (
            DeviceLock(folder, ["0"], "generator-0"),
            DeviceLock(folder, ["0"], "learner"),
            Sleeper(),
        )
        mine.take(1.0)
        turns = TurnTakingEngine(engine, mine, ProcessStatus(), 30.0)
        await turns.start()
        try:
            await act(turns, learner, engine)
        finally:
            await turns.close()
        assert not mine.held
        return engine

    return asyncio.run(run())


def test_an_idle_engine_sleeps_only_when_the_learner_waits_and_wakes_for_the_next_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_turn, "LOOK_S", 0.0)  # it looks in each turn of the event loop

    async def act(turns: TurnTakingEngine, learner: DeviceLock, engine: Sleeper) -> None:
        await turns.sample(REQUEST)
        for _ in range(20):
            await asyncio.sleep(0)
        assert (engine.slept, turns.stats()["asleep"]) == ([], 0.0)
        await asyncio.to_thread(learner.take, 30.0)
        assert (engine.slept, turns.stats()["asleep"]) == (["sleep"], 1.0)
        sampled = asyncio.create_task(turns.sample(replace(REQUEST, request_id="b")))
        await eventually(lambda: learner.wanted())
        assert turns.stats()["waiting"] == 2
        learner.give()
        assert len(await sampled) == 2
        assert turns.stats()["waiting"] == 0

    assert with_turns(tmp_path, act).slept == ["sleep", "wake"]


def test_an_engine_with_a_sample_under_way_keeps_its_turn(tmp_path: Path) -> None:
    async def act(turns: TurnTakingEngine, learner: DeviceLock, engine: Sleeper) -> None:
        engine._step = lambda: None  # type: ignore[method-assign]
        sampled = asyncio.create_task(turns.sample(REQUEST))
        await eventually(lambda: engine.stats()["running"])
        waiting = threading.Thread(target=learner.take, args=(30.0,))
        waiting.start()
        await eventually(turns._lock.wanted)
        await asyncio.wait([turns._passing], timeout=0.1)
        assert engine.slept == []
        del engine._step
        await sampled
        await asyncio.to_thread(waiting.join, 30.0)
        assert engine.slept == ["sleep"]

    with_turns(tmp_path, act)


def test_a_wait_for_the_turn_ends_with_the_engine_and_is_no_standstill(tmp_path: Path) -> None:
    async def act(turns: TurnTakingEngine, learner: DeviceLock, engine: Sleeper) -> None:
        await asyncio.to_thread(learner.take, 30.0)
        sampled = asyncio.create_task(turns.sample(REQUEST))
        await eventually(learner.wanted)
        watch = EngineWatch("generator-0", turns, 5.0)
        for now in range(100):
            watch.look(float(now), turns.stats(), flipping=True)
        await turns.close()
        with pytest.raises(RunClosedError):
            await sampled

    with_turns(tmp_path, act)


def test_an_engine_that_cannot_sleep_is_refused(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda ordinal, sample: [1])
    with pytest.raises(ConfigError, match=r"placement\.colocate = .*ScriptedEngine has no"):
        TurnTakingEngine(engine, DeviceLock(tmp_path, ["0"], "generator-0"), ProcessStatus(), 1.0)
