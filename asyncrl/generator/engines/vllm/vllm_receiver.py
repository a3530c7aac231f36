"""Versions for an engine whose ranks are worker processes of vLLM: the generator's end, which directs the ranks.

generator process                               each rank (rank_weights.py)
newest    ── the learner
stage     ── stage(v) ────────────────────────▸ fetches its own part of v in a thread, while it decodes
          ── staged()? polled ────────────────▸ done on all ranks
flip      ── pause, flip(v), resume ──────────▸ copies it over its live parameters
verify    ── verify() ────────────────────────▸ hashes the live parameters in a thread, while it decodes
          ── verified()? polled ──────────────▸ done on all ranks
held      ── the learner, held(v) ────────────▸ reports it to the learner too
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Protocol

from asyncrl.errors import AsyncRLError, ConfigError, DeadlineError, WeightSyncError
from asyncrl.generator.engines.receiver import (
    Learner,
    LostWeightsError,
    StreamReceiver,
    WeightReader,
    WeightStream,
)
from asyncrl.sync.stream.subscriber import StagedWeights
from asyncrl.types import Version

POLL_RANKS_S = (0.002, 0.05)
"""Between two polls of the ranks: the first wait, growing to the last."""


class EngineRanks(Protocol):
    """The worker processes of one engine."""

    async def call(self, method: str, *args: Any) -> list[Any]:
        """The result of `vllm_worker.WeightsExtension.<method>` on each rank. Raises the error of one of them."""
        ...

    async def flip(self, version: Version) -> float:
        """Make the staged version live on all ranks, between two steps. Returns the pause in seconds."""
        ...

    async def check_weights(self) -> None:
        """Raises LostWeightsError if the ranks are not those that were prepared."""
        ...


class VllmReceiver(StreamReceiver):
    """See `WeightReceiver`. dtype: of the learner's policy · path: of the model, for errors."""

    def __init__(self, ranks: EngineRanks, reader: WeightReader, dtype: str, path: str) -> None:
        super().__init__()
        self._ranks, self._reader, self._dtype, self._path = ranks, reader, dtype, path
        self._prepared = False

    def _connect(self, learner: Learner) -> WeightStream:
        # A stream without parameters only announces versions.
        return self._reader.open(learner, {}, {})

    async def open(self, learner: Learner) -> None:
        """Raises ConfigError if vLLM's model cannot be updated in place."""
        await self._leave()
        await self._prepare()
        await super().open(learner)
        await self._ranks.call("asyncrl_open", list(learner.endpoints), learner.lineage)

    async def newest(self, newer_than: Version, wait_s: float) -> Version | None:
        with self._preparing_again():
            await self._ranks.check_weights()
        return await super().newest(newer_than, wait_s)

    async def stage(self, version: Version) -> StagedWeights:
        begun = time.monotonic()
        await self._ranks.call("asyncrl_stage", version)
        staged = await self._done("asyncrl_staged", f"version {version}")
        return StagedWeights(version, None, time.monotonic() - begun, sum(one["bytes"] for one in staged))

    async def flip(self, version: Version) -> float:
        with self._preparing_again():
            return await self._ranks.flip(version)

    async def verify(self) -> None:
        if self._reader.sync.verify:
            await self._ranks.call("asyncrl_verify")
            await self._done("asyncrl_verified", "the hash of what is live")

    async def held(self, version: Version) -> None:
        await super().held(version)
        await self._ranks.call("asyncrl_held", version)

    @contextlib.contextmanager
    def _preparing_again(self) -> Iterator[None]:
        """Ranks that lost their weights are new ones."""
        try:
            yield
        except LostWeightsError:
            self._prepared = False
            raise

    async def _done(self, method: str, what: str) -> list[Any]:
        """The ranks' results of `method` once all are done: until then one or another is None."""
        begun, deadline_s = time.monotonic(), 2 * self._reader.sync.deadline_s
        wait_s, longest_s = POLL_RANKS_S
        while None in (answers := await self._ranks.call(method)):
            if time.monotonic() - begun > deadline_s:
                raise DeadlineError(self._reader.who, "its ranks", what, deadline_s)
            await asyncio.sleep(wait_s)
            wait_s = min(1.5 * wait_s, longest_s)
        return answers

    async def _prepare(self) -> None:
        """Once: each rank finds the learner's parameters in its model."""
        if self._prepared:
            return
        try:
            floors_s = await self._ranks.call("asyncrl_prepare", self._dtype, asdict(self._reader))
        except WeightSyncError as error:
            raise ConfigError(
                "model.path",
                self._path,
                f"vLLM's model of it cannot take new weights in place: {error}",
                "set generator.engine=transformers, or use another model",
            ) from error
        self.floor_s = max(floors_s)
        self._prepared = True

    async def _leave(self) -> None:
        if self._stream is not None:
            await super()._leave()
            with contextlib.suppress(AsyncRLError):  # an engine that is gone has left
                await self._ranks.call("asyncrl_close")
