"""The seam between the follower of the learner's versions and wherever an engine keeps its parameters.

    open(learner) ─▸ newest ─▸ stage(v) ─▸ flip(v) ─▸ verify ─▸ held(v) ─▸ newest …

`LocalReceiver` is for an engine whose parameters are tensors of this process; one whose ranks are elsewhere brings its
own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from asyncrl.config.schema import Config, SyncConfig
from asyncrl.generator.engines.engine import LocalEngine
from asyncrl.generator.threads import OneThread
from asyncrl.rpc.keys import client_keys
from asyncrl.sync.factory import open_stream
from asyncrl.sync.layout.layout import Layout
from asyncrl.sync.tensors.bucket import BoxTensors, Shards, layout_of
from asyncrl.sync.tensors.checksum import Checksum
from asyncrl.sync.tensors.tensor_buffer import TensorBuffer
from asyncrl.types import Version


class LostWeightsError(Exception):
    """The engine has other weights than it was flipped to: its server restarted. Whatever is held must come again."""


@dataclass(frozen=True, slots=True)
class Learner:
    """Where the weights come from: one endpoint for each rank, and the lineage of their versions."""

    endpoints: tuple[str, ...]
    lineage: int


class StagedVersion(Protocol):
    """A version that lies whole in the staging memory. checksum: what it must hash to, None where nobody is to look."""

    @property
    def version(self) -> Version: ...
    @property
    def checksum(self) -> Checksum | None: ...
    @property
    def seconds(self) -> float: ...
    @property
    def bytes(self) -> int: ...


class WeightReceiver(Protocol):
    """Brings versions into one engine. One call at a time."""

    @property
    def floor_s(self) -> float:
        """Seconds of one plain copy of a version: no flip can be shorter."""
        ...

    async def open(self, learner: Learner) -> None:
        """Take versions from this learner from now on; a former one is left."""
        ...

    async def newest(self, newer_than: Version, wait_s: float) -> Version | None:
        """The newest version above `newer_than`; None when none came in `wait_s`.

        Here and in `stage`: raises DeadlineError, WeightSyncError or RefusedError when the learner is gone, or
        was replaced. Here and in `flip`: LostWeightsError.
        """
        ...

    async def stage(self, version: Version) -> StagedVersion:
        """Bring this version beside the live parameters while the engine decodes. SnapshotEvictedError: it is gone."""
        ...

    async def flip(self, version: Version) -> float:
        """Make the staged version live between two decode steps. The pause in seconds."""
        ...

    async def verify(self) -> None:
        """Compare the live parameters with the learner's. Raises WeightSyncError on a difference."""
        ...

    async def held(self, version: Version) -> None:
        """Tell the learner that this version is flipped and verified, or still is. Raises as `newest`."""
        ...

    async def close(self) -> None: ...


class WeightStream(Protocol):
    """Blocking, used from one thread. See `sync.subscriber.Subscriber`."""

    def newest(self, newer_than: Version, wait_s: float) -> Version | None: ...

    def stage(self, version: Version) -> StagedVersion: ...

    def held(self, version: Version) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WeightReader:
    """Who takes weights, and by which settings: plain values, which reach an engine's other processes too.

    run: its name · who: unique among the generators · keys: the folder of queue.keys
    """

    run: str
    who: str
    sync: SyncConfig
    keys: str | None = None

    @staticmethod
    def of(who: str, config: Config) -> WeightReader:
        return WeightReader(config.run.name, who, config.sync, config.queue.keys)

    def open(self, learner: Learner, layout: Layout, staging: Mapping[str, BoxTensors]) -> WeightStream:
        """Its stream into these tensors, as `layout` says."""
        return open_stream(
            self.run,
            self.who,
            learner.endpoints,
            layout,
            self.sync,
            staging,
            learner.lineage,
            client_keys(self.keys),
        )

    def staging(self, layout: Layout, live: torch.device) -> TensorBuffer:
        """Memory for one version, where the parameters live or on the host, as sync.backend says."""
        on_host = self.sync.backend == "gloo" or self.sync.stored
        return TensorBuffer.for_layout(layout, torch.device("cpu") if on_host else live)


OpenStream = Callable[[Learner, Mapping[str, Tensor]], WeightStream]
"""(learner, staging) -> its weight stream into these tensors. Called in the stream's thread."""


class HoldsStream:
    """A weight stream, while there is one, and the thread that it runs in."""

    def __init__(self) -> None:
        self._thread = OneThread("weights")
        self._stream: WeightStream | None = None

    @property
    def _opened(self) -> WeightStream:
        assert self._stream is not None, "open comes first"
        return self._stream

    async def _leave(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await self._thread(stream.close)


class LocalReceiver(HoldsStream):
    """See `WeightReceiver`: for an engine in this process, which has every parameter whole. The stream and the hash of
    what is live run in a thread."""

    def __init__(
        self,
        engine: LocalEngine,
        staging: Mapping[str, Tensor],
        open_stream: OpenStream,
        config: SyncConfig,
        floor_s: float = 0.0,
    ) -> None:
        super().__init__()
        self._engine, self._open_stream = engine, open_stream
        self._verify = config.verify
        live = engine.weight_targets()
        self._live = Shards(layout_of(live), live)
        self._staging, self.floor_s = staging, floor_s
        self._staged: StagedVersion | None = None

    async def open(self, learner: Learner) -> None:
        await self._leave()
        self._stream = await self._thread(self._open_stream, learner, self._staging)

    async def newest(self, newer_than: Version, wait_s: float) -> Version | None:
        return await self._thread(self._opened.newest, newer_than, wait_s)

    async def stage(self, version: Version) -> StagedVersion:
        self._staged = await self._thread(self._opened.stage, version)
        return self._staged

    async def flip(self, version: Version) -> float:
        return await self._engine.flip(self._staging, version)

    async def verify(self) -> None:
        staged = self._staged
        if self._verify and staged is not None and staged.checksum is not None:
            whose = f"after the flip to version {staged.version} the engine's parameters"
            await self._thread(staged.checksum.check, self._live, whose)

    async def held(self, version: Version) -> None:
        await self._thread(self._opened.held, version)

    async def close(self) -> None:
        await self._leave()
        self._thread.close()


def local_receiver(engine: LocalEngine, reader: WeightReader) -> LocalReceiver:
    """The receiver of an engine that is one rank with every parameter whole."""
    live = engine.weight_targets()
    layout = layout_of(live)
    device = next((target.device for target in live.values()), torch.device("cpu"))
    arena = reader.staging(layout, device)
    floor_s = min(arena.floor(device) for _ in range(2))
    # A parameter without elements takes no memory.
    staging = {name: torch.empty_like(target) for name, target in live.items() if not target.numel()}
    staging |= {name: parts[0] for name, parts in arena.shards.tensors.items()}

    def open_to(learner: Learner, into: Mapping[str, Tensor]) -> WeightStream:
        return reader.open(learner, layout, into)

    return LocalReceiver(engine, staging, open_to, reader.sync, floor_s)
