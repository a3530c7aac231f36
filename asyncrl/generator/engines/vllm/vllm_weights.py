"""The weights of an engine whose parameters lie in vLLM's worker processes: the generator's end, and a rank's end.

generator process (`VllmReceiver`)              each rank (`RankWeights`)
newest    ── the learner
stage     ── stage(v) ────────────────────────▸ fetches its own part of v in a thread, while it decodes
          ── staged()? polled ────────────────▸ done on all ranks
flip      ── pause, flip(v), resume ──────────▸ copies it over its live parameters
verify    ── verify() ────────────────────────▸ hashes the live parameters in a thread, while it decodes
          ── verified()? polled ──────────────▸ done on all ranks
held      ── the learner, held(v) ────────────▸ reports it to the learner too

The calls come as messages, one at a time, and return at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from asyncrl.config.schema import ModelConfig
from asyncrl.device import accelerator
from asyncrl.device.streams import SideStream
from asyncrl.errors import AsyncRLError, ConfigError, DeadlineError, WeightSyncError
from asyncrl.generator.engines.receiver import (
    Learner,
    LostWeightsError,
    WeightReader,
    WeightReceiver,
    WeightStream,
)
from asyncrl.sync.layout.layout import Box, Layout
from asyncrl.sync.stream.snapshot import SnapshotEvictedError
from asyncrl.sync.stream.subscriber import StagedWeights
from asyncrl.sync.tensors.checksum import Checksum
from asyncrl.sync.tensors.shards import Shards
from asyncrl.types import Version

POLL_RANKS_S = (0.002, 0.05)
"""Between two polls of the ranks: the first wait, growing to the last."""


CallRanks = Callable[..., Awaitable[list[Any]]]
"""call(method, *args): the result of `vllm_worker.WeightsExtension.<method>` on each rank. Raises the error of one."""


class VllmReceiver(WeightReceiver):
    """Versions for the ranks of one engine.

    model          of the learner's policy: its dtype and adapters, and its path for errors
    flip           make the staged version live on all ranks, between two steps. Returns the pause in seconds
    check_weights  raises LostWeightsError if the ranks are not those that were prepared; None: they live as long as
                   the engine
    """

    def __init__(
        self,
        reader: WeightReader,
        model: ModelConfig,
        call: CallRanks,
        flip: Callable[[Version], Awaitable[float]],
        check_weights: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__()
        self._reader, self._model = reader, model
        self._call, self._flip, self._check_weights = call, flip, check_weights
        self._prepared = False

    def _connect(self, learner: Learner) -> WeightStream:
        # A stream without parameters only announces versions.
        return self._reader.open(learner, {}, {})

    async def open(self, learner: Learner) -> None:
        """Raises ConfigError if vLLM's model cannot be updated in place."""
        await self._leave()
        await self._prepare()
        await super().open(learner)
        await self._call("asyncrl_open", list(learner.endpoints), learner.lineage)

    async def newest(self, newer_than: Version, wait_s: float) -> Version | None:
        if self._check_weights is not None:
            with self._preparing_again():
                await self._check_weights()
        return await super().newest(newer_than, wait_s)

    async def stage(self, version: Version) -> StagedWeights:
        begun = time.monotonic()
        await self._call("asyncrl_stage", version)
        staged = await self._done("asyncrl_staged", f"version {version}")
        return StagedWeights(version, None, time.monotonic() - begun, sum(one["bytes"] for one in staged))

    async def flip(self, version: Version) -> float:
        with self._preparing_again():
            return await self._flip(version)

    async def verify(self) -> None:
        if self._reader.sync.verify:
            await self._call("asyncrl_verify")
            await self._done("asyncrl_verified", "the hash of what is live")

    async def held(self, version: Version) -> None:
        await super().held(version)
        await self._call("asyncrl_held", version)

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
        while None in (answers := await self._call(method)):
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
            lora = asdict(self._model.lora) if self._model.lora.travels else None
            floors_s = await self._call("asyncrl_prepare", self._model.dtype, asdict(self._reader), lora)
        except WeightSyncError as error:
            rule = f"vLLM's model of it cannot take new weights in place: {error}"
            remedy = "set generator.engine=transformers, or use another model"
            raise ConfigError("model.path", self._model.path, rule, remedy) from error
        self.floor_s = max(floors_s)
        self._prepared = True

    async def _leave(self) -> None:
        if self._stream is not None:
            await super()._leave()
            with contextlib.suppress(AsyncRLError):  # an engine that is gone has left
                await self._call("asyncrl_close")


# ---- a rank

EVICTED, BROKEN = "evicted", "broken"
"""Errors in a rank's report that the generator process distinguishes."""

BoxView = tuple[Box, Tensor]
"""A box of a checkpoint parameter, and the live view of its shape that holds it."""


def values_of(reports: Sequence[Mapping[str, Any]], who: str) -> list[Any]:
    """The results of all ranks (see `vllm_worker.Report`).

    Raises SnapshotEvictedError or WeightSyncError for the first rank that failed.
    """
    for rank, report in enumerate(reports):
        if "error" in report:
            text = f"{who}, rank {rank}: {report['detail']}"
            raise SnapshotEvictedError(text) if report["error"] == EVICTED else WeightSyncError(text)
    return [report["value"] for report in reports]


def rank_in_generator(of: Any, of_server: bool = False) -> int:
    """The number of a worker among those of all replicas.

    Args:
        of: vLLM's ParallelConfig
        of_server: whether the user has started it, not a generator

    Raises:
        RuntimeError: It is of the second replica of a server. Its reports would not come back; this error does.
    """
    if of_server and of.data_parallel_index:
        raise RuntimeError(
            "the server returns the results of its first replica alone: start it without replicas"
        )
    return int(of.data_parallel_index * of.world_size + of.rank)


class RankWeights:
    """The weights of one rank.

    views       the boxes of each checkpoint parameter that this rank holds
    layout      the same boxes as the planner takes them
    after_flip  called when the parameters have changed
    """

    def __init__(
        self,
        views: Mapping[str, Sequence[BoxView]],
        layout: Layout,
        reader: WeightReader,
        after_flip: Callable[[], None] = lambda: None,
    ) -> None:
        self._views, self._layout, self._reader = views, layout, reader
        self._after_flip = after_flip
        self._live_views = [view for name in layout for _, view in views.get(name, ())]
        self._device = next((view.device for view in self._live_views), torch.device("cpu"))
        buffer = reader.staging(layout, self._device)
        self.floor_s = min(buffer.floor(self._device) for _ in range(2))
        self._staging = buffer.shards
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._hashing = SideStream(self._device)
        self._stream: WeightStream | None = None
        self._staged: Future[StagedWeights] | None = None
        self._verified: Future[Version] | None = None
        self._checksum: Checksum | None = None
        self._live: Version | None = None

    def open(self, learner: Learner) -> None:
        """Take versions from this learner from now on."""
        self.close()
        self._stream = self._reader.open(learner, self._layout, self._staging.tensors)

    def stage(self, version: Version) -> None:
        """Begin to fetch exactly this version."""
        if self._stream is None:
            raise WeightSyncError(f"version {version} was asked for before a learner was named")
        self._staged = self._thread.submit(self._stream.stage, version)

    def staged(self) -> StagedWeights | None:
        """The result of the last `stage`; None while it runs. Raises its error."""
        if self._staged is None:
            raise WeightSyncError("no version was asked for")
        return self._staged.result() if self._staged.done() else None

    @torch.no_grad()
    def flip(self, version: Version) -> float:
        """Copy the staged version over the live parameters, between two steps of the engine. Returns the seconds."""
        staged = self.staged()
        if staged is None or staged.version != version:
            raise WeightSyncError(f"version {version} is not what lies in the staging memory: {staged}")
        begun = time.perf_counter()
        torch._foreach_copy_(self._live_views, self._staging.parts, non_blocking=True)
        self._after_flip()
        accelerator.wait_for_stream(self._device)  # not for what a relay sends to others
        self._live, self._checksum = version, staged.checksum
        return time.perf_counter() - begun

    def verify(self) -> None:
        """Begin to compare the live parameters with the learner's hash."""
        if self._live is None:
            raise WeightSyncError("there was no flip whose weights could be verified")
        self._verified = self._thread.submit(self._compare, self._live)

    def verified(self) -> Version | None:
        """The version that was compared; None while it runs. Raises WeightSyncError on a difference."""
        if self._verified is None:
            raise WeightSyncError("no version is being verified")
        return self._verified.result() if self._verified.done() else None

    def held(self, version: Version) -> None:
        """Report to the learner, in the thread; the next `stage` notices one that is gone."""
        if self._stream is not None:
            self._thread.submit(self._stream.held, version)

    def close(self) -> None:
        """Leave the learner once a transfer under way has ended, without a wait for that."""
        if self._stream is not None:
            self._thread.submit(self._stream.close)
            self._stream = self._staged = None

    @torch.no_grad()
    def _compare(self, version: Version) -> Version:
        if self._checksum is not None:
            with self._hashing.entered():
                live = {name: self._as_staged(name) for name in self._staging.tensors}
                whose = f"after the flip to version {version} the engine's parameters"
                self._checksum.check(Shards(self._layout, live), whose)
        return version

    def _as_staged(self, name: str) -> list[Tensor]:
        """The live boxes of a parameter in the checkpoint's dtype. If the engine keeps them in another dtype, they must
        equal the staged ones after the cast, which then stand for them."""
        found = []
        for (_, live), staged in zip(self._views[name], self._staging.tensors[name], strict=True):
            if live.dtype != staged.dtype and not torch.equal(live, staged.to(live.device, live.dtype)):
                raise WeightSyncError(f"{name} is not live as it was staged for version {self._live}")
            found.append(live if live.dtype == staged.dtype else staged)
        return found
