"""Versions for an engine whose ranks are worker processes of vLLM: this end tells them what to do, and when.

generator process                               each rank (rank_weights.py)
newest    asks the learner
stage     ── stage(v) ────────────────────────▸ fetches its own part of v in a thread, while it decodes
          ── staged()? now and then ──────────▸ done on all ranks
flip      ── pause, flip(v), resume ──────────▸ copies it over its live parameters
verify    ── verify() ────────────────────────▸ hashes what is live in a thread, while it decodes
          ── verified()? now and then ────────▸ done on all ranks
held      tells the learner ──────────────────▸ so does each rank
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import asdict
from typing import Any, Protocol

from asyncrl.errors import AsyncRLError, ConfigError, DeadlineError, WeightSyncError
from asyncrl.generator.engines.receiver import Learner, StagedVersion, WeightReader, WeightStream
from asyncrl.generator.threads import OneThread
from asyncrl.sync.stream.subscriber import StagedWeights as RankStaged
from asyncrl.types import Version

ASK_S = (0.002, 0.05)
"""Waits between two questions to the ranks whether they are done: the first, growing to the last."""


class EngineRanks(Protocol):
    """The worker processes of one engine."""

    async def call(self, method: str, *args: Any) -> list[Any]:
        """What `vllm_worker.WeightsExtension.<method>` answers on each rank. Raises what one of them raised."""
        ...

    async def flip(self, version: Version) -> float:
        """Make what all ranks have staged live, between two steps. The pause in seconds."""
        ...


class VllmReceiver:
    """See `WeightReceiver`. dtype: of the learner's policy · path: of the model, for errors."""

    def __init__(self, ranks: EngineRanks, reader: WeightReader, dtype: str, path: str) -> None:
        self.floor_s = 0.0
        self._ranks, self._reader, self._dtype, self._path = ranks, reader, dtype, path
        self._thread = OneThread("weights")
        self._news: WeightStream | None = None
        self._prepared = False

    async def open(self, learner: Learner) -> None:
        """Raises ConfigError if vLLM's model cannot be updated in place."""
        await self._leave()
        await self._prepare()
        # It needs nothing of a version, and so is only told of them.
        self._news = self._reader.open(learner, {}, {})
        await self._ranks.call("asyncrl_open", list(learner.endpoints), learner.lineage)

    async def newest(self, newer_than: Version, wait_s: float) -> Version | None:
        assert self._news is not None, "open comes first"
        return await self._thread(self._news.newest, newer_than, wait_s)

    async def stage(self, version: Version) -> StagedVersion:
        begun = time.monotonic()
        await self._ranks.call("asyncrl_stage", version)
        staged = await self._done("asyncrl_staged", f"version {version}")
        return RankStaged(version, None, time.monotonic() - begun, sum(one["bytes"] for one in staged))

    async def flip(self, version: Version) -> float:
        return await self._ranks.flip(version)

    async def verify(self) -> None:
        if self._reader.sync.verify:
            await self._ranks.call("asyncrl_verify")
            await self._done("asyncrl_verified", "the hash of what is live")

    async def held(self, version: Version) -> None:
        assert self._news is not None, "open comes first"
        await self._thread(self._news.held, version)
        await self._ranks.call("asyncrl_held", version)

    async def close(self) -> None:
        await self._leave()
        self._thread.close()

    async def _done(self, method: str, what: str) -> list[Any]:
        """What the ranks answer to `method` once all are done: until then one or another says None."""
        begun, deadline_s = time.monotonic(), 2 * self._reader.sync.deadline_s
        wait_s, longest_s = ASK_S
        while None in (answers := await self._ranks.call(method)):
            if time.monotonic() - begun > deadline_s:
                raise DeadlineError(self._reader.who, "its ranks", what, deadline_s)
            await asyncio.sleep(wait_s)
            wait_s = min(1.5 * wait_s, longest_s)
        return answers

    async def _prepare(self) -> None:
        """Once: let each rank learn where the learner's parameters are in its model."""
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
        news, self._news = self._news, None
        if news is not None:
            await self._thread(news.close)
            with contextlib.suppress(AsyncRLError):  # an engine that is gone has left
                await self._ranks.call("asyncrl_close")
