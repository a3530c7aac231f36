"""`Backend`: what holds the policy, its gradients and its optimizer, on one process or on many.

The trainer knows nothing of devices, shards or process groups; a backend knows nothing of rewards, queues or
steps. Every rank calls the collective methods (marked ∀) in the same order.

Axes:  N packed tokens of a micro-batch
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from asyncrl.learner.batch import MicroBatch
from asyncrl.sync.layout import Layout


class Backend(Protocol):
    rank: int
    world: int

    def forward(self, batch: MicroBatch) -> tuple[MicroBatch, Tensor, Tensor]:
        """∀ (the batch on the device, log-probs, entropies), both [N] float32, 0 where the loss mask is 0."""
        ...

    def backward(self, loss: Tensor) -> None:
        """∀ Add the gradient of `loss`, summed over ranks, to what has accumulated."""
        ...

    def optimizer_step(self, scale: float, lr: float) -> float:
        """∀ Multiply the accumulated gradient by `scale`, clip it, step, forget it. Returns the global
        gradient norm before clipping. If that is not finite nothing moves."""
        ...

    def forget_gradients(self) -> None:
        """Drop what has accumulated."""
        ...

    def exchange(self, value: Any) -> list[Any]:
        """∀ A small msgpack-able value from every rank, in rank order, on every rank."""
        ...

    def layout(self) -> Layout:
        """What this rank holds, in checkpoint names; tied parameters once."""
        ...

    def local_tensors(self) -> Mapping[str, Tensor]:
        """This rank's live shards, by the names of `layout`."""
        ...

    def save(self, folder: Path) -> None:
        """∀ Policy, optimizer and random state, loadable at any world size."""
        ...

    def load(self, folder: Path) -> None:
        """∀ The inverse of `save`."""
        ...

    def export_hf(self, folder: Path) -> None:
        """∀ A folder that plain transformers reads."""
        ...

    def close(self) -> None: ...
