"""Following the learner's versions: find it, fetch into staging, flip, verify.

  directory ─▸ endpoints ─▸ open ─▸ newest, stage (the engine keeps generating; see receiver.py)
      ▴                                  │ a version is staged whole
      │ lineage or endpoints changed     ▾
      └────────────────────────── flip between two decode steps ─▸ verify live parameters ─▸ held = version
                                         ▴                                                       │
       evaluations pin the version: the flip waits for them       the learner is told, leases are asked for again

The engine stands still for the flip alone: a copy of memory to memory, however long the transfer took.
A learner that is gone is no failure: the worker goes on with the version it holds until one appears.
An engine that lost its weights (a server that restarted) holds none, until the newest have come again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from asyncrl.errors import DeadlineError, RefusedError, WeightSyncError
from asyncrl.generator.engines.receiver import Learner, LostWeightsError, WeightReceiver
from asyncrl.sync.stream.snapshot import SnapshotEvictedError
from asyncrl.sync.stream.subscriber import StagedWeights
from asyncrl.types import NO_VERSION, Version

log = logging.getLogger(__name__)

POLL_S = 2.0
"""Longest wait for a new version before the directory is read again for a learner that came back."""

RETRY_S = 1.0
"""Pause after a failed transfer, so that a learner that answers with errors is not asked in a tight loop."""

RECENT_FLIPS = 32
"""Flips whose pauses the stats tell."""

ANSWER = "an answer of the learner"
"""The wait for a learner that is gone, as the status of the process shows it."""

TRANSFER_ERRORS = (DeadlineError, WeightSyncError, RefusedError)
"""What a stream raises when the learner is gone, or was replaced: worth another try."""


class Directory(Protocol):
    """The broker's directory. Rank r of the learner posts {"endpoint", "world", "lineage"} as weights/<r>."""

    async def lookup(self, key: str, wait_s: float) -> Any: ...


class WeightFollower:
    """Keeps one engine at the learner's newest version.

    held     the version flipped and verified, NO_VERSION before the first
    lineage  of `held`

    agree: raises ConfigError where this process and a learner that was found differ in what all must have alike, and
    DeadlineError while the learner has not said what it has; none: nobody compares
    status: gets the wait for a learner that is gone
    """

    def __init__(
        self,
        name: str,
        receiver: WeightReceiver,
        directory: Directory,
        agree: Callable[[], Awaitable[None]] | None = None,
        status: ProcessStatus | None = None,
    ) -> None:
        self.held: Version = NO_VERSION
        self.lineage = -1
        self._name, self._receiver, self._directory = name, receiver, directory
        self._agree, self._status = agree, status or ProcessStatus()
        self._state = asyncio.Condition()
        self._pins = 0
        self._flipping = False
        self._counts = Counter({"flips": 0, "failures": 0, "lost": 0, "bytes": 0})
        self._pauses_ms: deque[float] = deque(maxlen=RECENT_FLIPS)
        self._fetches_ms: deque[float] = deque(maxlen=RECENT_FLIPS)

    async def run(self) -> None:
        """Until cancelled. Raises ConfigError as `agree` does, and WeightSyncError if a flip leaves other parameters
        than the learner's."""
        try:
            while True:
                learner = await self._find()
                try:
                    await self._follow(learner)
                except LostWeightsError as error:
                    await self._lost(error)
        finally:
            await self._receiver.close()

    @asynccontextmanager
    async def pinned(self) -> AsyncIterator[Version]:
        """Within this block the engine's version does not change."""
        async with self._state:
            await self._state.wait_for(lambda: not self._flipping)
            self._pins += 1
        try:
            yield self.held
        finally:
            self._pins -= 1
            async with self._state:
                self._state.notify_all()

    async def settled(self) -> None:
        """Wait until no flip is under way that is not verified yet: only then is a group safe to commit."""
        async with self._state:
            await self._state.wait_for(lambda: not self._flipping)

    async def past(self, lineage: int, held: Version) -> None:
        """Wait until what is held is no longer this."""
        async with self._state:
            await self._state.wait_for(lambda: (self.lineage, self.held) != (lineage, held))

    def stats(self) -> dict[str, Any]:
        """weights/flips, weights/failures, weights/lost and weights/bytes (received) so far; weights/pauses_ms and
        weights/fetches_ms of the last flips; weights/floor_ms: of a plain copy of the same bytes."""
        return {
            **{f"weights/{name}": value for name, value in self._counts.items()},
            "weights/floor_ms": 1e3 * self._receiver.floor_s,
            "weights/pauses_ms": list(self._pauses_ms),
            "weights/fetches_ms": list(self._fetches_ms),
        }

    async def _find(self) -> Learner:
        """The learner in the directory; waits for one."""
        while True:
            try:
                first = await self._directory.lookup("weights/0", POLL_S)
                if self._agree is not None:
                    await self._agree()
                rest = [
                    await self._directory.lookup(f"weights/{rank}", POLL_S)
                    for rank in range(1, int(first["world"]))
                ]
            except DeadlineError:
                continue
            if all(entry["lineage"] == first["lineage"] for entry in rest):
                return Learner(tuple(entry["endpoint"] for entry in [first, *rest]), int(first["lineage"]))
            await asyncio.sleep(RETRY_S)  # a learner that is just coming back posts its ranks one by one

    async def _follow(self, learner: Learner) -> None:
        """Take this learner's versions until the directory names another, or a transfer fails."""
        newer_than = self.held if learner.lineage == self.lineage else NO_VERSION
        try:
            await self._receiver.open(learner)
        except TRANSFER_ERRORS as error:
            await self._failed(error)
            return
        while True:
            try:
                staged = await self._stage_newest(newer_than)
            except TRANSFER_ERRORS as error:
                await self._failed(error)
                return
            if staged is not None:
                await self._install(staged, learner)
                newer_than = staged.version
            elif await self._find() != learner:
                return

    async def _stage_newest(self, newer_than: Version) -> StagedWeights | None:
        """None when there is no newer version, or when it was gone before it had arrived."""
        version = await self._receiver.newest(newer_than, POLL_S)
        self._status.wait_ends(ANSWER)
        if version is None:
            return None
        try:
            return await self._receiver.stage(version)
        except SnapshotEvictedError as error:
            log.info("%s: %s", self._name, error)
            return None

    async def _install(self, staged: StagedWeights, learner: Learner) -> None:
        """On a mismatch the follower stays in its flip: nothing is committed any more, the worker ends."""
        while not await self._begin_flip():
            if learner.lineage == self.lineage:
                await self._tell()  # an evaluation takes long, and whoever is silent gets fenced
        try:
            pause_s = await self._receiver.flip(staged.version)
            await self._receiver.verify()
        except WeightSyncError as error:
            raise WeightSyncError(f"{self._name}: {error}") from error
        async with self._state:
            # A heartbeat reports the counts and what is held together.
            self._counts["flips"] += 1
            self._counts["bytes"] += staged.bytes
            self._pauses_ms.append(1e3 * pause_s)
            self._fetches_ms.append(1e3 * staged.seconds)
            self.held, self.lineage = staged.version, learner.lineage
            self._flipping = False
            self._state.notify_all()
        await self._tell()

    async def _begin_flip(self) -> bool:
        """Whether nothing pins the version any more, after some time."""
        async with self._state:
            try:
                async with asyncio.timeout(POLL_S):
                    # What is lost cannot be kept: an evaluation goes on at another version, as its tokens say.
                    await self._state.wait_for(lambda: self._pins == 0 or self.held == NO_VERSION)
            except TimeoutError:
                return False
            self._flipping = True
            return True

    async def _tell(self) -> None:
        """The learner counts who holds what; one that cannot be reached is found out by the next fetch."""
        try:
            await self._receiver.held(self.held)
        except TRANSFER_ERRORS as error:
            log.warning("%s could not acknowledge version %d: %s", self._name, self.held, error)

    async def _lost(self, error: LostWeightsError) -> None:
        log.warning("%s holds no version any more: %s", self._name, error)
        async with self._state:
            self._counts["lost"] += 1
            self.held, self.lineage = NO_VERSION, -1
            self._flipping = False
            self._state.notify_all()

    async def _failed(self, error: Exception) -> None:
        self._counts["failures"] += 1
        if isinstance(error, DeadlineError):
            self._status.wait_begins(ANSWER)
        log.warning("%s stays at version %d: %s", self._name, self.held, error)
        await asyncio.sleep(RETRY_S)
