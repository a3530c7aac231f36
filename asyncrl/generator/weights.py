"""Following the learner's versions: find it, fetch into staging, flip, verify.

  directory ─▸ endpoints ─▸ stream ─▸ fetch (thread; the engine keeps generating)
      ▴                                  │ a version is staged whole
      │ lineage or endpoints changed     ▾
      └────────────────────────── flip between two decode steps ─▸ verify live parameters ─▸ held = version
                                         ▴                                                       │
       evaluations pin the version: the flip waits for them       the learner is told, leases are asked for again

The engine stands still for the flip alone: a copy of memory to memory, however long the transfer took.
A learner that is gone is no failure: the worker goes on with the version it holds until one appears.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from asyncrl.config.schema import SyncConfig
from asyncrl.errors import DeadlineError, RefusedError, WeightSyncError
from asyncrl.generator.engine import Engine
from asyncrl.sync.arena import Arena
from asyncrl.sync.bucket import Shards, dtype_name
from asyncrl.sync.layout import whole_layout
from asyncrl.types import NO_VERSION, Version

log = logging.getLogger(__name__)

POLL_S = 2.0
"""Longest wait for a new version before the directory is read again for a learner that came back."""

RETRY_S = 1.0
"""Pause after a failed transfer, so that a learner that answers with errors is not asked in a tight loop."""

RECENT_FLIPS = 32
"""Flips whose pauses the stats tell."""

TRANSFER_ERRORS = (DeadlineError, WeightSyncError, RefusedError)
"""What a stream raises when the learner is gone, or was replaced: worth another try."""

Result = TypeVar("Result")


class Staged(Protocol):
    """A version that lies whole in the staging tensors. digest: of the learner's parameters, or None."""

    @property
    def version(self) -> Version: ...
    @property
    def digest(self) -> int | None: ...
    @property
    def seconds(self) -> float: ...
    @property
    def bytes(self) -> int: ...


class WeightStream(Protocol):
    """Blocking, used from one thread. See `sync.subscriber.Subscriber`."""

    def newest(self, newer_than: Version, wait_s: float) -> Version | None: ...

    def stage(self, version: Version) -> Staged: ...

    def fetch(self, newer_than: Version, wait_s: float) -> Staged | None:
        """`newest` and `stage`, until one succeeds."""

    def held(self, version: Version) -> None:
        """Tell the learner that this version is flipped and verified, or still is."""

    def close(self) -> None: ...


class Directory(Protocol):
    """The broker's directory. Rank r of the learner posts {"endpoint", "world", "lineage"} as weights/<r>."""

    async def lookup(self, key: str, wait_s: float) -> Any: ...


@dataclass(frozen=True, slots=True)
class Learner:
    """Where the weights come from: one endpoint for each rank, and the lineage of their versions."""

    endpoints: tuple[str, ...]
    lineage: int


OpenStream = Callable[[Learner, Mapping[str, Tensor]], WeightStream]
"""(learner, staging) -> its weight stream into these tensors. Called in the stream's thread."""

Digest = Callable[[Mapping[str, Tensor]], int]


class WeightFollower:
    """Keeps one engine at the learner's newest version.

    held     the version flipped and verified, NO_VERSION before the first
    lineage  of `held`
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        directory: Directory,
        open_stream: OpenStream,
        digest: Digest,
        config: SyncConfig,
    ) -> None:
        self.held: Version = NO_VERSION
        self.lineage = -1
        self._name, self._engine, self._directory = name, engine, directory
        self._open_stream, self._digest, self._config = open_stream, digest, config
        self._live = engine.weight_targets()
        self._staging, self._floor_s = _staging_for(self._live, config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._state = asyncio.Condition()
        self._pins = 0
        self._flipping = False
        self._counts = Counter({"flips": 0, "failures": 0, "bytes": 0})
        self._pauses_ms: deque[float] = deque(maxlen=RECENT_FLIPS)
        self._fetches_ms: deque[float] = deque(maxlen=RECENT_FLIPS)

    async def run(self) -> None:
        """Until cancelled. Raises WeightSyncError if a flip leaves other parameters than the learner's."""
        try:
            while True:
                await self._follow(await self._find())
        finally:
            self._thread.shutdown(wait=False)

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
        """weights/flips, weights/failures and weights/bytes (received) so far; weights/pauses_ms and
        weights/fetches_ms of the last flips; weights/floor_ms: of a plain copy of the same bytes."""
        return {
            **{f"weights/{name}": value for name, value in self._counts.items()},
            "weights/floor_ms": 1e3 * self._floor_s,
            "weights/pauses_ms": list(self._pauses_ms),
            "weights/fetches_ms": list(self._fetches_ms),
        }

    async def _find(self) -> Learner:
        """The learner in the directory; waits for one."""
        while True:
            try:
                first = await self._directory.lookup("weights/0", POLL_S)
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
        try:
            stream = await self._in_thread(lambda: self._open_stream(learner, self._staging))
        except TRANSFER_ERRORS as error:
            await self._failed(error)
            return
        newer_than = self.held if learner.lineage == self.lineage else NO_VERSION
        try:
            while True:
                try:
                    staged = await self._in_thread(partial(stream.fetch, newer_than, POLL_S))
                except TRANSFER_ERRORS as error:
                    await self._failed(error)
                    return
                if staged is not None:
                    await self._install(staged, learner, stream)
                    newer_than = staged.version
                elif await self._find() != learner:
                    return
        finally:
            await self._in_thread(stream.close)

    async def _install(self, staged: Staged, learner: Learner, stream: WeightStream) -> None:
        while not await self._begin_flip():
            if learner.lineage == self.lineage:
                await self._tell(stream)  # an evaluation takes long, and whoever is silent gets fenced
        pause_s = await self._engine.flip(self._staging, staged.version)
        await self._verify(staged)
        async with self._state:
            self.held, self.lineage = staged.version, learner.lineage
            self._flipping = False
            self._state.notify_all()
        await self._tell(stream)
        self._counts["flips"] += 1
        self._counts["bytes"] += staged.bytes
        self._pauses_ms.append(1e3 * pause_s)
        self._fetches_ms.append(1e3 * staged.seconds)

    async def _begin_flip(self) -> bool:
        """Whether nothing pins the version any more, after some time."""
        async with self._state:
            try:
                async with asyncio.timeout(POLL_S):
                    await self._state.wait_for(lambda: self._pins == 0)
            except TimeoutError:
                return False
            self._flipping = True
            return True

    async def _tell(self, stream: WeightStream) -> None:
        """The learner counts who holds what; one that cannot be reached is found out by the next fetch."""
        try:
            await self._in_thread(partial(stream.held, self.held))
        except TRANSFER_ERRORS as error:
            log.warning("%s could not acknowledge version %d: %s", self._name, self.held, error)

    async def _verify(self, staged: Staged) -> None:
        """On a mismatch the follower stays in its flip: nothing is committed any more, the worker ends."""
        if not self._config.verify or staged.digest is None:
            return
        live = await self._in_thread(lambda: self._digest(self._live))
        if live != staged.digest:
            raise WeightSyncError(
                f"{self._name}: after the flip to version {staged.version} the engine's parameters hash to "
                f"{live:016x}, the learner's to {staged.digest:016x}"
            )

    async def _failed(self, error: Exception) -> None:
        self._counts["failures"] += 1
        log.warning("%s stays at version %d: %s", self._name, self.held, error)
        await asyncio.sleep(RETRY_S)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _staging_for(live: Mapping[str, Tensor], config: SyncConfig) -> tuple[dict[str, Tensor], float]:
    """Memory for one version of the parameters, in one stretch, and the least seconds that a flip from it can take."""
    layout = whole_layout({name: (target.shape, dtype_name(target.dtype)) for name, target in live.items()})
    shards = Shards(layout, live)
    on_host = config.backend == "gloo" or config.stored
    arena = Arena(shards, torch.device("cpu") if on_host else None)
    floor_s = min(arena.floor(shards.device) for _ in range(2))
    # A parameter without elements takes no memory.
    empty = {name: torch.empty_like(target) for name, target in live.items() if not target.numel()}
    return empty | {name: parts[0] for name, parts in arena.shards.tensors.items()}, floor_s
