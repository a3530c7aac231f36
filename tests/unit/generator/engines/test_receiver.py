"""A receiver of weights whose transfer hangs."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.generator.engines import receiver
from asyncrl.generator.engines.receiver import Learner, WeightReceiver
from asyncrl.sync.stream.subscriber import StagedWeights
from asyncrl.types import Version


class Hanging(WeightReceiver):
    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def _connect(self, learner: Learner) -> Any:
        return SimpleNamespace(close=lambda: None)

    async def stage(self, version: Version) -> StagedWeights:
        return await self._thread(self.released.wait)

    async def flip(self, version: Version) -> float:
        return 0.0

    async def verify(self) -> None: ...


async def test_a_transfer_that_hangs_does_not_keep_the_process_from_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(receiver, "CLOSE_S", 0.01)
    hanging = Hanging()
    await hanging.open(Learner(("tcp://127.0.0.1:1",), 1))
    transfer = asyncio.create_task(hanging.stage(1))
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(30):
            await hanging.close()
        assert "a transfer of weights hangs" in caplog.text
    finally:
        hanging.released.set()
        transfer.cancel()
