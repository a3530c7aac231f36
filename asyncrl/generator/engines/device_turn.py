"""An engine that takes turns on its devices with the learner, by `placement.colocate`.

    sample, flip, verify ──▸ its turn? else wait, then wake ──▸ the engine
    nothing under way, and the learner waits ──▸ sleep, pass the turn on

The engine stays awake between two requests as long as nobody waits. So the switch comes at the end of a phase, when
the queue admits no more tasks: each GPU of the learner goes over as soon as its own engine is idle, while others run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol, cast

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.device.turns import LOOK_S, TURN, DeviceLock, dealt, devices_here, run_locks
from asyncrl.errors import RunClosedError
from asyncrl.generator.engines.engine import Engine, SampleRequest
from asyncrl.generator.engines.receiver import WeightReader, WeightReceiver
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import Turn, Version


class SleepingEngine(Engine, Protocol):
    """An engine that can give its memory up. Both methods are called while no sample is under way."""

    async def sleep(self) -> None:
        """Move the weights to the host's memory, and free that of the device."""
        ...

    async def wake(self) -> None:
        """Have the same weights on the device again."""
        ...


def engine_lock(config: Config, name: str) -> DeviceLock | None:
    """The lock of a generator's devices; None unless it takes turns. On CPUs its number in `name` counts."""
    if not config.placement.colocate:
        return None
    number = name.rpartition("-")[2]
    index = int(number) % config.generator.count if number.isdecimal() else 0
    devices = devices_here() or dealt(index, config.generator.count, config.learner.processes)
    return DeviceLock(run_locks(config.run.dir, config.run.name), devices, name)


class TurnTakingEngine:
    """See `Engine`. It begins awake, and with the turn. Each method that waits for it raises DeadlineError.

    Args:
        engine: has the methods of `SleepingEngine`, else ConfigError.
        lock: taken before the engine was loaded.
        status: shows the wait for the turn.
        deadline_s: longest wait for it.
    """

    def __init__(self, engine: Engine, lock: DeviceLock, status: ProcessStatus, deadline_s: float) -> None:
        rule = (
            f"takes turns with an engine that sleeps, and {type(engine).__name__} has no `sleep` and `wake`"
        )
        remedy = "give it both (docs/colocation.md), or set placement.colocate=false"
        require(
            hasattr(engine, "sleep") and hasattr(engine, "wake"), "placement.colocate", True, rule, remedy
        )
        self._engine, self._lock = cast(SleepingEngine, engine), lock
        self._status, self._deadline_s = status, deadline_s
        self._users = self._waiting = 0  # calls that use the engine; samples that wait for its turn
        self._switching = asyncio.Lock()
        self._passing: asyncio.Task[None] | None = None
        self._closing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def version(self) -> Version:
        return self._engine.version

    async def start(self) -> None:
        await self._engine.start()
        self._passing = asyncio.create_task(self._pass_on(), name="device turns")

    async def sample(self, request: SampleRequest) -> list[Turn]:
        self._waiting += request.n
        async with self._using():
            self._waiting -= request.n
            return await self._engine.sample(request)

    def receiver(self, reader: WeightReader) -> WeightReceiver:
        return cast(WeightReceiver, _TurnReceiver(self._engine.receiver(reader), self))

    def stats(self) -> dict[str, float]:
        """As the engine's, and asleep: 1 while it does not have its turn."""
        stats = self._engine.stats()
        return {**stats, "waiting": stats["waiting"] + self._waiting, "asleep": float(not self._lock.held)}

    async def close(self) -> None:
        self._closing = True
        if self._passing is not None:
            self._passing.cancel()
        await self._engine.close()
        self._lock.give()

    @asynccontextmanager
    async def _using(self) -> AsyncIterator[None]:
        """Within this block the engine is awake."""
        async with self._switching:
            if not self._lock.held:
                with self._status.waiting(TURN, self._deadline_s):
                    taken = await asyncio.to_thread(self._lock.take, self._deadline_s, lambda: self._closing)
                if not taken:
                    raise RunClosedError("the engine was closed")
                await self._engine.wake()
            self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    async def _pass_on(self) -> None:
        """Pass the turn on whenever the engine is idle and another process waits. Runs until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._users and self._lock.wanted():
                async with self._switching:
                    if not self._users:
                        await self._engine.sleep()
                        self._lock.give()


class _TurnReceiver:
    """A receiver whose versions arrive in host memory, whoever has the device; the flip waits for it."""

    def __init__(self, receiver: WeightReceiver, engine: TurnTakingEngine) -> None:
        self._receiver, self._engine = receiver, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)

    async def flip(self, version: Version) -> float:
        async with self._engine._using():
            return await self._receiver.flip(version)

    async def verify(self) -> None:
        async with self._engine._using():
            await self._receiver.verify()
