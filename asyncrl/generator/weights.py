"""Following the learner's versions: find it, fetch into staging, flip, verify.

  registry ──▸ endpoints ─▸ open ─▸ newest, stage (the engine keeps generating; see receiver.py)
      ▴                                  │ a version is staged whole
      │ lineage or endpoints changed     ▾
      └────────────────────────── flip between two decode steps ─▸ verify live parameters ─▸ held = version
                                         ▴                                                       │
       evaluations pin the version: the flip waits for them       reported to the learner; leases are requested anew

The engine stands still for the flip alone: a copy of memory to memory, however long the transfer took.
A learner that is gone is no failure: the worker keeps the version it holds until one appears.
An engine that lost its weights (a server that restarted) holds none, until the newest have come again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from asyncrl.config.config_consistency import Registry
from asyncrl.errors import DeadlineError, RefusedError, WeightSyncError
from asyncrl.generator.engines.receiver import Learner, LostWeightsError, WeightReceiver
from asyncrl.sync.stream.snapshot import SnapshotEvictedError
from asyncrl.sync.stream.subscriber import StagedWeights
from asyncrl.telemetry import decisions, tracing
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import NO_VERSION, Version

log = logging.getLogger(__name__)

POLL_S = 2.0
"""Longest wait for a new version before the registry is read again for a learner that came back."""

RETRY_S = 1.0
"""Pause after a failed transfer, so that errors of a learner make no tight loop."""

RECENT_FLIPS = 32
"""Flips whose pauses the stats contain."""

ANSWER = "an answer of the learner"
"""The wait for a learner that is gone, as the status of the process shows it."""

TRANSFER_ERRORS = (DeadlineError, WeightSyncError, RefusedError)
"""Errors of a stream whose learner is gone, or was replaced: worth another try."""


class WeightFollower:
    """Keeps one engine at the learner's newest version.

    held      the version flipped and verified, NO_VERSION before the first; `lineage` is its lineage
    registry  rank r of the learner posts {"endpoint", "world", "lineage"} in it as weights/<r>
    agree     compares the configurations of this process and of a learner that was found. Raises ConfigError where they
              differ in a key that all must share, and DeadlineError while the learner has not posted its own
    status    receives the wait for a learner that is gone
    """

    def __init__(
        self,
        name: str,
        receiver: WeightReceiver,
        registry: Registry,
        agree: Callable[[], Awaitable[None]] | None = None,
        status: ProcessStatus | None = None,
    ) -> None:
        self.held: Version = NO_VERSION
        self.lineage = -1
        self._name, self._receiver, self._registry = name, receiver, registry
        self._agree, self._status = agree, status or ProcessStatus()
        self._state = asyncio.Condition()
        self._pins = 0
        self._flipping = False
        self._failure = ""  # the last one since a learner has answered
        self._counts = Counter({"flips": 0, "failures": 0, "lost": 0, "bytes": 0})
        self._pauses_ms: deque[float] = deque(maxlen=RECENT_FLIPS)
        self._fetches_ms: deque[float] = deque(maxlen=RECENT_FLIPS)

    async def run(self) -> None:
        """Run until cancelled. Raises ConfigError as `agree` does, and WeightSyncError if a flip leaves other
        parameters than the learner's."""
        try:
            while True:
                learner = await self._find()
                try:
                    await self._follow(learner)
                except LostWeightsError as error:
                    await self._lost(error)
        finally:
            await self._receiver.close()

    @property
    def flipping(self) -> bool:
        """Whether a flip is under way that is not verified yet."""
        return self._flipping

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
        """Wait until another version than this is held."""
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
        """Wait for a learner in the registry."""
        while True:
            try:
                first = await self._registry.lookup("weights/0", POLL_S)
                if self._agree is not None:
                    await self._agree()
                rest = [
                    await self._registry.lookup(f"weights/{rank}", POLL_S)
                    for rank in range(1, int(first["world"]))
                ]
            except DeadlineError:
                continue
            if all(entry["lineage"] == first["lineage"] for entry in rest):
                return Learner(tuple(entry["endpoint"] for entry in [first, *rest]), int(first["lineage"]))
            await asyncio.sleep(RETRY_S)  # a learner that is just coming back posts its ranks one by one

    async def _follow(self, learner: Learner) -> None:
        """Take this learner's versions until the registry has another, or a transfer fails."""
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
                if await self._install(staged, learner):
                    newer_than = staged.version
            elif await self._find() != learner:
                return

    async def _stage_newest(self, newer_than: Version) -> StagedWeights | None:
        """Returns None if there is no newer version, or if it was evicted before it had arrived."""
        version = await self._receiver.newest(newer_than, POLL_S)
        self._status.wait_ends(ANSWER)
        self._failure = ""
        if version is None:
            return None
        if self._receiver.in_turn:
            async with self._state:
                if not await self._unpinned():
                    return None
        try:
            with tracing.span("weights", "fetch", version=version) as at_end:
                staged = await self._receiver.stage(version)
                at_end["bytes"] = staged.bytes
            return staged
        except SnapshotEvictedError as error:
            log.info("%s: %s", self._name, error)
            return None

    async def _install(self, staged: StagedWeights, learner: Learner) -> bool:
        """Whether the version is live; the learner may have taken it back. If the checksums differ, `_flipping` stays
        true, so that no group is committed; the error ends the worker."""
        while not await self._begin_flip():
            if learner.lineage == self.lineage:
                await (
                    self._acknowledge()
                )  # an evaluation takes long, and the learner fences silent generators
        decisions.note("weights", learner.lineage, staged.version)
        try:
            with tracing.span("weights", "flip", version=staged.version):
                pause_s = await self._receiver.flip(staged.version)
            with tracing.span("weights", "verify", version=staged.version):
                await self._receiver.verify()
        except SnapshotEvictedError as error:
            log.info("%s: %s", self._name, error)
            async with self._state:
                self._flipping = False
                self._state.notify_all()
            return False
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
        await self._acknowledge()
        return True

    async def _begin_flip(self) -> bool:
        """Returns whether the flip may go on, as nothing pins the version."""
        async with self._state:
            self._flipping = await self._unpinned()
            return self._flipping

    async def _unpinned(self) -> bool:
        """Wait for a while until nothing pins the version. Returns whether nothing does. With the lock of `_state`."""
        try:
            async with asyncio.timeout(POLL_S):
                # If the engine lost its weights, no pin counts: an evaluation goes on with the new version.
                await self._state.wait_for(lambda: self._pins == 0 or self.held == NO_VERSION)
        except TimeoutError:
            return False
        return True

    async def _acknowledge(self) -> None:
        """The learner counts which generator holds which version. The next fetch notices one that is gone."""
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
        held = "has no weights yet" if self.held == NO_VERSION else f"stays at version {self.held}"
        if self._failure != (failure := f"{held}: {error}"):  # once, however long the learner is gone
            log.warning("%s %s", self._name, failure)
        self._failure = failure
        await asyncio.sleep(RETRY_S)
