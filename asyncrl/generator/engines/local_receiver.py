"""The receiver of an engine in this process that has every parameter whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from asyncrl.config.schema import SyncConfig
from asyncrl.generator.engines.engine import LocalEngine
from asyncrl.generator.engines.receiver import Learner, StreamReceiver, WeightReader, WeightStream
from asyncrl.sync.stream.subscriber import StagedWeights
from asyncrl.sync.tensors.bucket import Shards, layout_of
from asyncrl.types import Version

OpenStream = Callable[[Learner, Mapping[str, Tensor]], WeightStream]
"""(learner, staging) -> its weight stream into these tensors. Called in the stream's thread."""


class LocalReceiver(StreamReceiver):
    """See `WeightReceiver`. The live parameters are hashed in the thread of the stream."""

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
        self._staged: StagedWeights | None = None

    def _connect(self, learner: Learner) -> WeightStream:
        return self._open_stream(learner, self._staging)

    async def stage(self, version: Version) -> StagedWeights:
        self._staged = await self._thread(self._opened.stage, version)
        return self._staged

    async def flip(self, version: Version) -> float:
        return await self._engine.flip(self._staging, version)

    async def verify(self) -> None:
        staged = self._staged
        if self._verify and staged is not None and staged.checksum is not None:
            whose = f"after the flip to version {staged.version} the engine's parameters"
            await self._thread(staged.checksum.check, self._live, whose)


def local_receiver(engine: LocalEngine, reader: WeightReader) -> LocalReceiver:
    """The receiver of an engine that is one rank with every parameter whole."""
    live = engine.weight_targets()
    layout = layout_of(live)
    device = next((target.device for target in live.values()), torch.device("cpu"))
    buffer = reader.staging(layout, device)
    floor_s = min(buffer.floor(device) for _ in range(2))
    # A parameter without elements takes no memory.
    staging = {name: torch.empty_like(target) for name, target in live.items() if not target.numel()}
    staging |= {name: parts[0] for name, parts in buffer.shards.tensors.items()}

    def open_to(learner: Learner, into: Mapping[str, Tensor]) -> WeightStream:
        return reader.open(learner, layout, into)

    return LocalReceiver(engine, staging, open_to, reader.sync, floor_s)
