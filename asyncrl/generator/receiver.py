"""The seam between the follower of the learner's versions and wherever an engine keeps its parameters.

    open(learner) ─▸ newest ─▸ stage(v) ─▸ flip(v) ─▸ verify ─▸ newest …

`LocalReceiver` is for an engine whose parameters are tensors of this process; one whose ranks are elsewhere brings its
own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from asyncrl.config.schema import SyncConfig
from asyncrl.errors import WeightSyncError
from asyncrl.generator.engine import LocalEngine
from asyncrl.sync.bucket import dtype_name
from asyncrl.sync.digest import digest_layout
from asyncrl.sync.layout import Layout, whole_layout
from asyncrl.sync.subscriber import Subscriber
from asyncrl.types import Version

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Learner:
    """Where the weights come from: one endpoint for each rank, and the lineage of their versions."""

    endpoints: tuple[str, ...]
    lineage: int


class Staged(Protocol):
    """A version that lies whole in the staging memory. digest: of the learner's parameters, or None."""

    @property
    def version(self) -> Version: ...
    @property
    def digest(self) -> int | None: ...
    @property
    def seconds(self) -> float: ...


class WeightReceiver(Protocol):
    """Brings versions into one engine. One call at a time."""

    async def open(self, learner: Learner) -> None:
        """Take versions from this learner from now on; a former one is left."""
        ...

    async def newest(self, newer_than: Version, wait_s: float) -> Version | None:
        """The newest version above `newer_than`; None when none came in `wait_s`.

        Here and in `stage`: raises DeadlineError, WeightSyncError or RefusedError when the learner is gone, or
        was replaced.
        """
        ...

    async def stage(self, version: Version) -> Staged:
        """Bring this version beside the live parameters while the engine decodes. TakenBackError: it is gone."""
        ...

    async def flip(self, version: Version) -> float:
        """Make the staged version live between two decode steps. The pause in seconds."""
        ...

    async def verify(self) -> None:
        """Compare the live parameters with the learner's. Raises WeightSyncError on a difference."""
        ...

    async def close(self) -> None: ...


class WeightStream(Protocol):
    """Blocking, used from one thread."""

    def newest(self, newer_than: Version, wait_s: float) -> Version | None: ...

    def stage(self, version: Version) -> Staged: ...

    def close(self) -> None: ...


OpenStream = Callable[[Learner, Mapping[str, Tensor]], WeightStream]
"""(learner, staging) -> its weight stream into these tensors. Called in the stream's thread."""

Digest = Callable[[Mapping[str, Tensor]], int]


class LocalReceiver:
    """See `WeightReceiver`: for an engine in this process. The stream and the digest run in a thread."""

    def __init__(
        self, engine: LocalEngine, open_stream: OpenStream, digest: Digest, config: SyncConfig
    ) -> None:
        self._engine, self._open_stream, self._digest = engine, open_stream, digest
        self._verify = config.verify
        self._live = engine.weight_targets()
        self._staging = {key: _staging_for(target, config) for key, target in self._live.items()}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._stream: WeightStream | None = None
        self._staged: Staged | None = None

    async def open(self, learner: Learner) -> None:
        await self._leave()
        self._stream = await self._in_thread(lambda: self._open_stream(learner, self._staging))

    async def newest(self, newer_than: Version, wait_s: float) -> Version | None:
        return await self._in_thread(partial(self._opened.newest, newer_than, wait_s))

    async def stage(self, version: Version) -> Staged:
        self._staged = await self._in_thread(partial(self._opened.stage, version))
        return self._staged

    async def flip(self, version: Version) -> float:
        return await self._engine.flip(self._staging, version)

    async def verify(self) -> None:
        staged = self._staged
        if not self._verify or staged is None or staged.digest is None:
            return
        live = await self._in_thread(lambda: self._digest(self._live))
        if live != staged.digest:
            raise WeightSyncError(
                f"after the flip to version {staged.version} the engine's parameters hash to "
                f"{live:016x}, the learner's to {staged.digest:016x}"
            )

    async def close(self) -> None:
        await self._leave()
        self._thread.shutdown(wait=False)

    @property
    def _opened(self) -> WeightStream:
        assert self._stream is not None, "open comes first"
        return self._stream

    async def _leave(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            await self._in_thread(stream.close)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def local_receiver(engine: LocalEngine, who: str, config: SyncConfig) -> LocalReceiver:
    """The receiver of an engine that is one rank with every parameter whole. who: unique among the generators."""
    layout = layout_of(engine.weight_targets())

    def open_stream(learner: Learner, staging: Mapping[str, Tensor]) -> Subscriber:
        return Subscriber(who, learner.endpoints, layout, config, staging, learner.lineage)

    return LocalReceiver(engine, open_stream, partial(digest_layout, layout), config)


def layout_of(targets: Mapping[str, Tensor]) -> Layout:
    """Every parameter whole."""
    return whole_layout({name: (target.shape, dtype_name(target.dtype)) for name, target in targets.items()})


def _staging_for(target: Tensor, config: SyncConfig) -> Tensor:
    device = torch.device("cpu") if config.backend == "gloo" else target.device
    return torch.empty_like(target, device=device, requires_grad=False)
