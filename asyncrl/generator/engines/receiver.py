"""The seam between the follower of the learner's versions and the memory in which an engine keeps its parameters.

    open(learner) ─▸ newest ─▸ stage(v) ─▸ flip(v) ─▸ verify ─▸ held(v) ─▸ newest …

Implementations: `LocalReceiver` for parameters in this process, `vllm/vllm_weights.py` for ranks that take their own
parts, `http/folder_receiver.py` for servers that load folders.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.config.schema import Config, SyncConfig
from asyncrl.device import accelerator
from asyncrl.device.streams import SideStream
from asyncrl.errors import WeightSyncError
from asyncrl.generator.threads import OneThread
from asyncrl.rpc.keys import client_keys
from asyncrl.sync.delta.delta import bits
from asyncrl.sync.factory import open_subscriber
from asyncrl.sync.layout.layout import Layout
from asyncrl.sync.layout.quantized import SCALE, quantized_layout
from asyncrl.sync.store.stored_subscriber import StoredSubscriber
from asyncrl.sync.stream.subscriber import StagedWeights, Subscriber
from asyncrl.sync.tensors.budget import SPARE_BYTES, copy_bytes
from asyncrl.sync.tensors.checksum import Checksum
from asyncrl.sync.tensors.quantization import dequantize
from asyncrl.sync.tensors.shards import BoxTensors, Shards, TensorBuffer, layout_of
from asyncrl.types import Version

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Longest wait for a transfer under way, at the end."""


class LostWeightsError(Exception):
    """The engine's weights are not those of its last flip: its server restarted, and needs the newest version."""


@dataclass(frozen=True, slots=True)
class Learner:
    """The source of weights: one endpoint for each rank, and the lineage of their versions."""

    endpoints: tuple[str, ...]
    lineage: int


WeightStream = Subscriber | StoredSubscriber
"""Blocking, used from one thread."""


@dataclass(frozen=True, slots=True)
class WeightReader:
    """The settings of one reader of the weight stream, as plain values that an engine's other processes can receive.

    run: its name · who: unique among the generators · keys: the folder of queue.keys · quantization: that of
    `generator`
    """

    run: str
    who: str
    sync: SyncConfig
    keys: str | None = None
    quantization: str | None = None

    @staticmethod
    def of(who: str, config: Config) -> WeightReader:
        return WeightReader(
            config.run.name, who, config.sync, config.queue.keys, config.generator.quantization
        )

    def open(self, learner: Learner, layout: Layout, staging: Mapping[str, BoxTensors]) -> WeightStream:
        """A stream from the learner into these tensors, which have the boxes of `layout`."""
        return open_subscriber(
            self.run,
            self.who,
            learner.endpoints,
            Shards(layout, staging),
            self.sync,
            learner.lineage,
            client_keys(self.keys),
        )

    def staging(self, layout: Layout, live: torch.device) -> TensorBuffer:
        """Memory for one version, by sync.staging: on the device `live`, or pinned on the host. auto: on the device if
        there is room, which an engine that this generator starts has left there."""
        if not accelerator.is_accelerator(live):
            return TensorBuffer(layout, live)
        on_device = not self.sync.receives_on_host
        if on_device and self.sync.staging == "auto":
            needs = copy_bytes(layout) + 2 * self.sync.bucket_bytes + SPARE_BYTES
            on_device = accelerator.memory_bytes(live)[0] >= needs
        where = str(live) if on_device else "pinned memory of the host"
        log.info("%s: %.2f GB of staging in %s", self.who, copy_bytes(layout) / 1e9, where)
        return TensorBuffer(layout, live) if on_device else TensorBuffer(layout, accelerator.CPU, pinned=True)


class WeightReceiver(ABC):
    """Brings versions into one engine, over a weight stream in a thread of its own. One call at a time.

    floor_s: seconds of one plain copy of a version · in_turn: a staged version keeps other generators waiting, so that
    it is staged only when nothing delays its flip
    """

    floor_s = 0.0
    in_turn = False

    def __init__(self) -> None:
        self._thread = OneThread("weights")
        self._stream: WeightStream | None = None

    @abstractmethod
    def _connect(self, learner: Learner) -> WeightStream:
        """Runs in the stream's thread."""

    async def open(self, learner: Learner) -> None:
        """Leave a former learner, and take versions from this one."""
        await self._leave()
        self._stream = await self._thread(self._connect, learner)

    async def newest(self, newer_than: Version, wait_s: float) -> Version | None:
        """The newest version above `newer_than`; None when none came in `wait_s`.

        Raises:
            DeadlineError, WeightSyncError, RefusedError: The learner is gone, or was replaced; `stage` too.
            LostWeightsError: See there; `flip` too.
        """
        return await self._thread(self._opened.newest, newer_than, wait_s)

    @abstractmethod
    async def stage(self, version: Version) -> StagedWeights:
        """Fetch this version beside the live parameters while the engine decodes.

        Raises SnapshotEvictedError for a version that is no longer available.
        """

    @abstractmethod
    async def flip(self, version: Version) -> float:
        """Make the staged version live between two decode steps. Returns the pause in seconds.

        Raises SnapshotEvictedError if the learner has taken it back, so that nothing has changed.
        """

    @abstractmethod
    async def verify(self) -> None:
        """Compare the live parameters with the learner's. Raises WeightSyncError on a difference."""

    async def held(self, version: Version) -> None:
        """Report to the learner that this version is flipped and verified, or still is. Raises as `newest`."""
        await self._thread(self._opened.held, version)

    async def close(self) -> None:
        """Leave the learner. A transfer that hangs does not keep the process from its end: the learner sees its
        connection close."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._leave()
        except TimeoutError:
            log.warning("a transfer of weights hangs: its thread ends with the process")
        self._thread.close()

    @property
    def _opened(self) -> WeightStream:
        assert self._stream is not None, "open comes first"
        return self._stream

    async def _leave(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await self._thread(stream.close)


class LocalReceiver(WeightReceiver):
    """For an engine that is one rank with every parameter whole, as tensors of this process.

    Under generator.quantization it multiplies in the dtype of its parameters: the projections of a version are written
    out in that, beside staging, before the flip (`sync/tensors/quantization.py`).

    live  the parameters under their checkpoint names; of tied ones, the first name only
    flip  flip(staged, version): make `staged` live between two decode steps. Returns the pause in seconds, without the
          wait of a drain
    """

    def __init__(
        self,
        live: Mapping[str, Tensor],
        flip: Callable[[Mapping[str, Tensor], Version], Awaitable[float]],
        reader: WeightReader,
    ) -> None:
        super().__init__()
        self._live, self._flip, self._reader = Shards(layout_of(live), live), flip, reader
        device = next((target.device for target in live.values()), torch.device("cpu"))
        self._layout = quantized_layout(self._live.layout, reader.quantization)
        buffer = reader.staging(self._layout, device)
        self.floor_s = min(buffer.floor(device) for _ in range(2))
        self._staging = {name: parts[0] for name, parts in buffer.shards.tensors.items()}
        # These are not staged as they are: the quantized ones, and those without elements, which take no memory.
        self._made = {
            name: torch.empty_like(target, device=buffer.memory.device)
            for name, target in live.items()
            if not target.numel() or name + SCALE in self._layout
        }
        self._staged: StagedWeights | None = None
        self._side = SideStream(device)

    def _connect(self, learner: Learner) -> WeightStream:
        return self._reader.open(learner, self._layout, self._staging)

    async def stage(self, version: Version) -> StagedWeights:
        self._staged = await self._thread(self._opened.stage, version)
        if self._made:
            await self._thread(self._write_out)
        return self._staged

    async def flip(self, version: Version) -> float:
        return await self._flip({**self._staging, **self._made}, version)

    async def verify(self) -> None:
        staged = self._staged
        if self._reader.sync.verify and staged is not None and staged.checksum is not None:
            whose = f"after the flip to version {staged.version} the engine's parameters"
            await self._thread(self._check, staged.checksum, whose)

    def _write_out(self) -> None:
        with self._side.entered():
            dequantize(self._staging, self._made)
            accelerator.wait_for_stream(self._live.device)

    def _check(self, checksum: Checksum, whose: str) -> None:
        """The checksum is of quantized elements and scales. Those that arrived stand for the live parameters that equal
        what was written out of them."""
        live, device = dict(self._live.tensors), self._live.device
        with self._side.entered():
            for weight, scale in ((name, name + SCALE) for name in [*live] if name + SCALE in self._layout):
                if not torch.equal(bits(*live[weight]), bits(self._made[weight].to(device))):
                    raise WeightSyncError(f"{whose} are not those that arrived: {weight}")
                live |= {name: (self._staging[name].to(device),) for name in (weight, scale)}
            checksum.check(Shards(self._layout, live), whose)
