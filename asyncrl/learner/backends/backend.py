"""`Backend`: what holds the policy and the models beside it, their gradients and optimizers, on one process or on many.

    backend.accumulate … optimizer_step  the policy
    backend.models["critic"]             what the algorithm needs beside it: a `AuxiliaryModel` per name

The trainer knows nothing of devices, shards or process groups; a backend knows nothing of rewards, queues or
steps. Every rank calls the collective methods (marked ∀) in the same order, whether it has tokens or not.

Axes:  N packed tokens of a micro-batch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.models.roles import Loss
from asyncrl.sync.layout.layout import Layout


class AuxiliaryModel(Protocol):
    """A network beside the policy. Critics and the reward model are trained, of the others `accumulate` raises
    TypeError; those others may copy the policy."""

    def predict(self, batch: MicroBatch) -> Tensor:
        """∀ [N] float32 on the CPU, without gradient, 0 where the loss mask is 0: the log-prob of each token; of
        critics the value of the state before it."""
        ...

    def accumulate(self, batches: Sequence[MicroBatch], loss: Loss) -> None:
        """∀ As `Backend.accumulate`, for this model's own gradient."""
        ...

    def gradient_norm(self, scale: float) -> float:
        """∀ As `Backend.gradient_norm`, of this model's own gradient."""
        ...

    def optimizer_step(self, scale: float, lr: float) -> float:
        """∀ As `Backend.optimizer_step`, with this model's own optimizer."""
        ...

    def forget_gradients(self) -> None:
        """Drop what has accumulated."""
        ...

    def copy_from_policy(self) -> None:
        """Take over the policy's weights of now, shard to shard. Raises TypeError for a model that is trained."""
        ...


class Backend(Protocol):
    """rank, world: among all processes of the learner · data_rank, data_world: among those with rows of their own; the
    ranks of one data rank are given the same rows, and one of them `speaks` for them, see `mesh.py`."""

    rank: int
    world: int
    data_rank: int
    data_world: int
    speaks: bool

    @property
    def models(self) -> Mapping[str, AuxiliaryModel]:
        """Beside the policy, by the names of MODELS: those that were asked for."""
        ...

    def accumulate(self, batches: Sequence[MicroBatch], loss: Loss) -> None:
        """∀ Add the gradient of the losses of these micro-batches, summed over data ranks, to what has accumulated.
        Every rank has equally many. `loss` is called once for each, in order, wherever there are outputs: under
        pipelining on the last stage alone."""
        ...

    def predict(self, batch: MicroBatch) -> Tensor:
        """∀ The policy's log-probs [N] float32 on the CPU, without gradient, on every rank."""
        ...

    def predict_next(self, batch: MicroBatch) -> Tensor:
        """∀ The policy's log-probs of every token that may follow each rollout, [R, vocabulary] float32 on the CPU, as
        `predict`."""
        ...

    def gradient_norm(self, scale: float) -> float:
        """∀ The global norm of the accumulated gradient times `scale`, which stays as it is."""
        ...

    def optimizer_step(self, scale: float, lr: float) -> float:
        """∀ Multiply the accumulated gradient by `scale`, clip it, step, forget it. Returns the global
        gradient norm before clipping. If that is not finite nothing moves."""
        ...

    def forget_gradients(self) -> None:
        """Drop what has accumulated, of the policy."""
        ...

    def exchange(self, value: Any) -> list[Any]:
        """∀ A small msgpack-able value from every rank, in rank order, on every rank."""
        ...

    def gather(self, mine: Tensor) -> list[Tensor]:
        """∀ A tensor of every data rank (of the one that speaks), in their order, on the CPU of every rank. One dtype;
        sizes of dimension 0 may differ, those of the others must not."""
        ...

    def layout(self) -> Layout:
        """What this rank holds of the policy, in checkpoint names; tied parameters once."""
        ...

    def local_tensors(self) -> Mapping[str, Tensor]:
        """This rank's live shards, by the names of `layout`."""
        ...

    def save(self, folder: Path) -> None:
        """∀ All models that change, their optimizers and the random state, loadable at any world size."""
        ...

    def stage(self) -> Callable[[Path], None]:
        """∀ Copy what `save` keeps, so that it may change again. The function that comes back writes the copy into a
        folder, as `save` does: once, on every rank, from any thread, while other methods are being called."""
        ...

    def load(self, folder: Path) -> None:
        """∀ The inverse of `save`, for a backend just made. Raises ConfigError for a folder that lacks a trained model
        of this backend."""
        ...

    def export_hf(self, folder: Path) -> None:
        """∀ The policy as a folder that plain transformers reads."""
        ...

    def close(self) -> None: ...


def of_rows(backend: Backend, value: Any) -> list[Any]:
    """∀ `backend.exchange` of what is counted over rows: from the ranks that speak, in the order of data ranks."""
    every = backend.exchange([backend.speaks, value if backend.speaks else None])
    return [said for speaks, said in every if speaks]
