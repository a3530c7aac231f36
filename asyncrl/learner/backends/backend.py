"""`Backend` holds the policy and the models beside it, their gradients and optimizers, on one process or on several.

    backend.policy              the model that is trained and published
    backend.models["critic"]    the models that the algorithm needs beside it, by name

The trainer does not depend on devices, shards or process groups; a backend does not depend on rewards, queues or steps.
Methods marked "Collective" are called on every rank in the same order, also by ranks without tokens.

Axes:  N packed tokens of a micro-batch · R rollouts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.config.sections.rules import require
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.models.roles import Loss
from asyncrl.sync.layout.layout import Layout


class Model(Protocol):
    """One network with its gradient and, if it is trained, its optimizer. `accumulate` of a frozen model raises
    TypeError."""

    def predict(self, batch: MicroBatch) -> Tensor:
        """Collective: [N] float32 on the CPU of every rank, without gradient, 0 where the loss mask is 0: the log-prob
        of each token, or a critic's value of the state before it."""
        ...

    def accumulate(self, batches: Sequence[MicroBatch], loss: Loss) -> None:
        """Collective: add the gradient of the losses of these micro-batches, summed over data ranks.

        Args:
            batches: equally many on every rank.
            loss: called once for each batch, in order, where there are outputs: under pipelining on the last stage.
        """
        ...

    def gradient_norm(self, scale: float) -> float:
        """Collective: the global norm of the accumulated gradient times `scale`. The gradient does not change."""
        ...

    def optimizer_step(self, scale: float, lr: float) -> float:
        """Collective: multiply the accumulated gradient by `scale`, clip it, make a step, and drop the gradient.

        Returns:
            The global gradient norm before clipping. If it is not finite, no parameter changes.
        """
        ...

    def forget_gradients(self) -> None:
        """Drop the accumulated gradient."""
        ...

    def copy_from_policy(self) -> None:
        """Copy the policy's weights, shard to shard.

        Raises:
            TypeError: The model is trained, or is the policy.
        """
        ...


class Policy(Model, Protocol):
    def predict_next(self, batch: MicroBatch) -> Tensor:
        """Collective: log-probs of every token that may follow each rollout, [R, vocabulary], as `predict`."""
        ...


class Backend(Protocol):
    """One rank's part of all models.

    rank, world            this process among all processes of the learner
    data_rank, data_world  its group among the groups of processes that have rows of their own (`mesh.py`)
    is_data_leader         whether it is the one of its group whose values are counted
    """

    rank: int
    world: int
    data_rank: int
    data_world: int
    is_data_leader: bool

    @property
    def policy(self) -> Policy: ...

    @property
    def models(self) -> Mapping[str, Model]:
        """The models beside the policy, by the names of `roles.MODELS`."""
        ...

    def exchange(self, value: Any) -> list[Any]:
        """Collective: a small msgpack-able value from every rank, in rank order, on every rank."""
        ...

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Collective: a tensor from each data leader, in order, on the CPU of every rank. All have one dtype, and the
        same sizes but for dimension 0."""
        ...

    def layout(self) -> Layout:
        """This rank's boxes of the policy, in checkpoint names; tied parameters once."""
        ...

    def local_tensors(self) -> Mapping[str, Tensor]:
        """This rank's live shards, by the names of `layout`."""
        ...

    def save(self, folder: Path) -> None:
        """Collective: write all models that change, their optimizers and the random state. Any world size can load
        them."""
        ...

    def stage(self) -> Callable[[Path], None]:
        """Collective: copy everything that `save` writes, so that training can go on.

        Returns:
            A function that writes the copy into a folder. It is called once, on every rank, from any thread.
        """
        ...

    def load(self, folder: Path) -> None:
        """Collective: the inverse of `save`, for a new backend.

        Raises:
            ConfigError: The folder lacks a trained model of this backend.
        """
        ...

    def export_hf(self, folder: Path) -> None:
        """Collective: write the policy as a Hugging Face folder."""
        ...

    def close(self) -> None: ...


def check_reference(same_shapes: bool, config: Config) -> None:
    """Raises ConfigError unless the policy's weights can be copied into the reference."""
    require(
        same_shapes,
        "reference.path",
        config.reference.path,
        "has another architecture than the policy, whose weights it takes over with reference.update_every",
        "set reference.path=null, or reference.update_every=null",
    )


def exchange_per_data_rank(backend: Backend, value: Any) -> list[Any]:
    """Collective: `backend.exchange` of the data leaders' values alone, in the order of data ranks."""
    every = backend.exchange([backend.is_data_leader, value if backend.is_data_leader else None])
    return [sent for leads, sent in every if leads]
