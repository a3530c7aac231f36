"""One rank of an engine whose parameters live in another process: stage a version there, flip it, hash what is live.

    open ─▸ stage(v) ─▸ staged()? ─▸ flip(v) between steps ─▸ verify() ─▸ verified()? ─▸ held(v)

`stage` and `verify` begin work that a thread does while the rank decodes; `staged` and `verified` poll its result.
The calls come as messages from the generator process (`vllm_engine.py`), one at a time, and return at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.generator.engines.receiver import Learner, WeightReader, WeightStream
from asyncrl.sync.layout.layout import Box, Layout
from asyncrl.sync.stream.snapshot import SnapshotEvictedError
from asyncrl.sync.stream.subscriber import StagedWeights
from asyncrl.sync.tensors.bucket import Shards
from asyncrl.sync.tensors.checksum import Checksum
from asyncrl.types import Version

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


class RankWeights:
    """The weights of one rank.

    Args:
        views: The boxes of each checkpoint parameter that this rank holds.
        layout: The same boxes as the planner takes them.
        after_flip: Called when the parameters have changed.
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
        torch._foreach_copy_(self._live_views, self._staging.parts)
        self._after_flip()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
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
