"""Versions by vLLM's own weight transfer (`sync.backend=vllm`): the generator's end.

      stage   ── wait for this engine's turn at learner rank 0, while it decodes
      flip    ── pause ▸ every rank: join the group, receive, load (`vllm_worker.py`) ▸ resume
              └▸ a rank failed: the weights are of no version, the engine stays paused until the next one is whole

The pause contains the whole transfer. Nothing is staged, and nothing is hashed: vLLM decides where weights lie.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import cast

from asyncrl.errors import DeadlineError, WeightSyncError
from asyncrl.generator.engines.receiver import (
    Learner,
    LostWeightsError,
    WeightReader,
    WeightReceiver,
    WeightStream,
)
from asyncrl.generator.engines.vllm.vllm_weights import CallRanks
from asyncrl.sync.broadcast.stream import BroadcastSubscriber, Offer
from asyncrl.sync.stream.snapshot import SnapshotEvictedError
from asyncrl.sync.stream.subscriber import StagedWeights
from asyncrl.types import Version

GRACE_S = 10.0
"""Seconds behind the deadline of a transfer in which ranks may still report an error."""

MOST_LOST = 3
"""So many failures of updates in a row are an error: a learner that went away does not cause them."""

BUFFERS = 2
"""Chunks in memory at once: a rank receives one while it loads another."""


class BroadcastReceiver(WeightReceiver):
    """ranks: of the engine · flip(version, install): call `install` between two of its steps. Returns the pause"""

    in_turn = True

    def __init__(
        self,
        reader: WeightReader,
        ranks: int,
        call: CallRanks,
        flip: Callable[[Version, Callable[[], Awaitable[None]]], Awaitable[float]],
    ) -> None:
        super().__init__()
        self._reader, self._ranks, self._call, self._flip = reader, ranks, call, flip
        self._offer: Offer | None = None
        self._lost = 0

    def _connect(self, learner: Learner) -> WeightStream:
        return self._reader.open(learner, {}, {})

    async def stage(self, version: Version) -> StagedWeights:
        begun = time.monotonic()
        self._close_offer()
        stream = cast(BroadcastSubscriber, self._opened)
        self._offer = await self._thread(stream.turn, version, self._ranks)
        return StagedWeights(version, None, time.monotonic() - begun, self._ranks * self._offer.bytes)

    async def flip(self, version: Version) -> float:
        """Raises SnapshotEvictedError if the learner waits no longer; LostWeightsError if the update failed."""
        try:
            if self._offer is None or not self._offer.stands:
                raise SnapshotEvictedError(
                    f"version {version} was offered to {self._reader.who} for too long"
                )
            return await self._flip(version, partial(self._install, version, self._offer))
        finally:
            self._close_offer()

    async def verify(self) -> None:
        """Does nothing: there is no hash of the weights that vLLM has loaded."""

    async def _leave(self) -> None:
        self._close_offer()
        await super()._leave()

    async def _install(self, version: Version, offer: Offer) -> None:
        who, seconds = self._reader.who, self._reader.sync.deadline_s + GRACE_S
        group = {
            "rank_offset": 1,
            "world_size": self._ranks + 1,
            "nccl_unique_id_b64": base64.b64encode(offer.group).decode(),
            "packed": True,
            "packed_buffer_size_bytes": offer.bucket_bytes,
            "packed_num_buffers": BUFFERS,
        }
        names, dtypes, shapes = zip(*offer.params, strict=True)
        params = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        try:
            async with asyncio.timeout(seconds):
                await self._call("asyncrl_receive", group, params)
        except TimeoutError:
            raise DeadlineError(who, "its ranks", f"version {version} of learner rank 0", seconds) from None
        except WeightSyncError as error:
            self._lost += 1
            if self._lost == MOST_LOST:
                raise
            raise LostWeightsError(f"version {version} of learner rank 0 came in part: {error}") from error
        self._lost = 0

    def _close_offer(self) -> None:
        if self._offer is not None:
            self._offer.joined.close()
            self._offer = None
