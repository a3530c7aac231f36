"""One rank of an engine whose parameters live in another process: stage a version there, flip it, hash what is live.

    open ──▸ stage(v) in a thread, while the rank decodes ──▸ staged()? ──▸ flip(v) between two steps ──▸ verify()

The calls come as messages from the generator process (`vllm_engine.py`), one at a time, and return at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from asyncrl.config.schema import SyncConfig
from asyncrl.errors import WeightSyncError
from asyncrl.sync.digest import MOD, digest
from asyncrl.sync.layout import Box, Layout
from asyncrl.sync.plan import ALIGN
from asyncrl.sync.subscriber import Staged, Subscriber
from asyncrl.types import Version

TAKEN_BACK, BROKEN = "taken back", "broken"
"""How a rank's report names the errors that the generator process tells apart."""

Places = Mapping[str, Sequence[tuple[Box, Tensor]]]
"""Of each checkpoint parameter the boxes that are here, each with the live view of its shape."""


class Staging:
    """Memory for one version of what `layout` says, in one stretch. boxes: {name: one tensor per box}."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        starts, end = {}, 0
        for name, param in layout.items():
            starts[name] = end
            end += -(-param.bytes // ALIGN) * ALIGN
        self.memory = torch.empty(end, dtype=torch.uint8, device=device)
        self.boxes: dict[str, list[Tensor]] = {}
        self.flat: dict[str, Tensor] = {}
        for name, param in layout.items():
            dtype = getattr(torch, param.dtype)
            flat = self.memory[starts[name] : starts[name] + param.bytes].view(dtype)
            pieces = flat.split([box.elements for box in param.boxes])
            self.boxes[name] = [piece.view(box.shape) for piece, box in zip(pieces, param.boxes, strict=True)]
            self.flat[name] = flat if len(param.boxes) > 1 else self.boxes[name][0] if param.boxes else flat


class RankWeights:
    """See above. after_flip: what an engine must do once its parameters have changed."""

    def __init__(
        self, places: Places, layout: Layout, sync: SyncConfig, after_flip: Callable[[], None] = lambda: None
    ) -> None:
        self._places, self._layout, self._sync = places, layout, sync
        self._after_flip = after_flip
        self._device = next(
            (live.device for found in places.values() for _, live in found), torch.device("cpu")
        )
        on_host = sync.backend == "gloo"
        self._staging = Staging(layout, torch.device("cpu") if on_host else self._device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._subscriber: Subscriber | None = None
        self._staged: Future[Staged] | None = None
        self._digest: int | None = None
        self._live: Version | None = None

    def open(self, who: str, endpoints: Sequence[str], lineage: int) -> None:
        """Take versions from this learner from now on."""
        self.close()
        self._subscriber = Subscriber(who, endpoints, self._layout, self._sync, self._staging.flat, lineage)

    def stage(self, version: Version) -> None:
        """Begin to fetch exactly this version."""
        if self._subscriber is None:
            raise WeightSyncError(f"version {version} was asked for before a learner was named")
        self._staged = self._thread.submit(self._subscriber.stage, version)

    def staged(self) -> Staged | None:
        """What the last `stage` came to; None while it runs. Raises what it raised."""
        if self._staged is None:
            raise WeightSyncError("no version was asked for")
        return self._staged.result() if self._staged.done() else None

    @torch.no_grad()
    def flip(self, version: Version) -> float:
        """Copy the staged version over the live parameters. Seconds. The engine must be between two steps."""
        staged = self.staged()
        if staged is None or staged.version != version:
            raise WeightSyncError(f"version {version} is not what lies in the staging memory: {staged}")
        begun = time.perf_counter()
        live = [view for found in self._places.values() for _, view in found]
        torch._foreach_copy_(live, [box for name in self._places for box in self._staging.boxes[name]])
        self._after_flip()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._live, self._digest = version, staged.digest
        return time.perf_counter() - begun

    def verify(self) -> None:
        """Compare what is live with what the learner sent. Raises WeightSyncError on a difference."""
        if self._digest is None:
            return
        found = sum(self._digest_of(name) for name in self._places) % MOD
        if found != self._digest:
            raise WeightSyncError(
                f"after the flip to version {self._live} the engine's parameters hash to {found:016x}, "
                f"the learner's to {self._digest:016x}"
            )

    def close(self) -> None:
        """Leave the learner, after a transfer that may still run; the engine does not wait for that."""
        if self._subscriber is not None:
            self._thread.submit(self._subscriber.close)
            self._subscriber = self._staged = None

    def _digest_of(self, name: str) -> int:
        """In the checkpoint's dtype: a parameter that the engine keeps in another must equal the staged one, cast."""
        total, param = 0, self._layout[name]
        for (box, live), staged in zip(self._places[name], self._staging.boxes[name], strict=True):
            if live.dtype == staged.dtype:
                total += digest(live, box, param.shape, name)
            elif torch.equal(live, staged.to(live.device, live.dtype)):
                total += digest(staged, box, param.shape, name)
            else:
                raise WeightSyncError(f"{name} is not live as it was staged for version {self._live}")
        return total
