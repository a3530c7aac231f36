"""`Backend`: what holds the policy and the models beside it, their gradients and optimizers, on one process or on many.

    backend.forward … optimizer_step     the policy
    backend.models["critic"]             what the algorithm needs beside it: a `Model` per name

The trainer knows nothing of devices, shards or process groups; a backend knows nothing of rewards, queues or
steps. Every rank calls the collective methods (marked ∀) in the same order, whether it has tokens or not.

Axes:  N packed tokens of a micro-batch
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from torch import Tensor

from asyncrl.learner.batch import MicroBatch
from asyncrl.sync.layout import Layout

POLICY: Final = "policy"
MODELS: Final = frozenset({"critic", "cost_critic", "reference", "reward_model", "teacher"})
"""What may stand beside the policy: critics say values, the others log-probs. Reference and teacher are frozen."""


class Model(Protocol):
    """A network beside the policy. Critics and the reward model are trained, of the others `forward` raises TypeError;
    those others may copy the policy."""

    def predict(self, batch: MicroBatch) -> Tensor:
        """∀ [N] float32 on the CPU, without gradient, 0 where the loss mask is 0: the log-prob of each token; of
        critics the value of the state before it. Not between a `forward` and its `backward`."""
        ...

    def forward(self, batch: MicroBatch) -> tuple[MicroBatch, Tensor]:
        """∀ (the batch on the device, what `predict` says but with gradient and on the device)."""
        ...

    def backward(self, loss: Tensor) -> None:
        """∀ As `Backend.backward`, for this model's own gradient."""
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
    rank: int
    world: int

    @property
    def models(self) -> Mapping[str, Model]:
        """Beside the policy, by the names of MODELS: those that were asked for."""
        ...

    def forward(self, batch: MicroBatch) -> tuple[MicroBatch, Tensor, Tensor]:
        """∀ (the batch on the device, log-probs, entropies), both [N] float32, 0 where the loss mask is 0."""
        ...

    def predict(self, batch: MicroBatch) -> Tensor:
        """∀ The policy's log-probs [N] float32 on the CPU, without gradient. Not between `forward` and `backward`."""
        ...

    def predict_next(self, batch: MicroBatch) -> Tensor:
        """∀ The policy's log-probs of every token that may follow each rollout, [R, vocabulary] float32 on the CPU, as
        `predict`."""
        ...

    def backward(self, loss: Tensor) -> None:
        """∀ Add the gradient of `loss`, summed over ranks, to what has accumulated."""
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
        """∀ A tensor of every rank, in rank order, on the CPU of every rank. One dtype; sizes of dimension 0 may
        differ, those of the others must not."""
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

    def load(self, folder: Path) -> None:
        """∀ The inverse of `save`, for a backend just made. Raises ConfigError for a folder that lacks a trained model
        of this backend."""
        ...

    def export_hf(self, folder: Path) -> None:
        """∀ The policy as a folder that plain transformers reads."""
        ...

    def close(self) -> None: ...
