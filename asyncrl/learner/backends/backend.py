"""`Backend` holds the policy and the models beside it, their gradients and optimizers, on one process or on several.

    backend.policy              the model that is trained and published
    backend.models["critic"]    the models that the algorithm needs beside it, by name

The trainer does not depend on devices, shards or process groups; a backend does not depend on rewards, queues or steps.
Methods marked "Collective" are called on every rank in the same order, also by ranks without tokens.

Axes:  N packed tokens of a micro-batch · R rollouts
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.algorithms.roles import POLICY, REFERENCE, Loss
from asyncrl.learner.backends import storage
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.models.lora import ADAPTER, is_base, write_peft_config
from asyncrl.learner.ranks import process_group
from asyncrl.sync.layout.layout import Layout
from asyncrl.sync.tensors.shards import BoxTensors
from asyncrl.system.rank_process import rank_and_world


class Model(Protocol):
    """One network with its gradient and, if it is trained, its optimizer. `accumulate` of a frozen model raises
    TypeError."""

    def predict(self, batch: MicroBatch) -> Tensor:
        """Collective: [N] float32 on the CPU of every rank, without gradient, 0 where the loss mask is 0: the log-prob
        of each token, or a critic's value of the state before it. A teacher that gives its most likely tokens has
        [N, 2 + 2K], see `most_likely` of models/logprobs.py."""
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
        Returns the global gradient norm before clipping; if it is not finite, no parameter changes."""
        ...

    def forget_gradients(self) -> None:
        """Drop the accumulated gradient."""
        ...

    def copy_from_policy(self) -> None:
        """Copy the policy's weights, shard to shard. Raises TypeError if the model is trained, or is the policy."""
        ...


class Policy(Model, Protocol):
    def predict_next(self, batch: MicroBatch) -> Tensor:
        """Collective: log-probs of every token that may follow each rollout, [R, vocabulary], as `predict`."""
        ...


class StoredModel(Policy, Protocol):
    """A model that a backend holds. changes: whether it differs from what it was loaded with; then checkpoints keep
    it."""

    changes: bool

    def adapters(self) -> tuple[Layout, Mapping[str, BoxTensors]]:
        """(layout, live shards) of this rank's adapters, in PEFT's names; nothing where all weights are trained."""
        ...

    def without_adapters(self) -> Model:
        """The network that the adapters were put into."""
        ...

    def in_checkpoint(self) -> tuple[Layout, Mapping[str, BoxTensors]]:
        """(layout, live shards) of this rank, in checkpoint names; tied parameters once."""
        ...

    def write_parameters(self) -> None:
        """Collective: copy masters into the parameters, after they were loaded."""
        ...


class Backend(ABC):
    """One rank's part of all models, by RANK and WORLD_SIZE; the only one if they are not set.

    rank, world            this process among all processes of the learner
    data_rank, data_world  its group among the groups of processes that have rows of their own (`mesh.py`)
    is_data_leader         whether it is the one of its group whose values are counted
    """

    policy: Policy
    _models: Mapping[str, StoredModel]

    def __init__(
        self, config: Config, models: Iterable[str], data_rank: int, data_leaders: Sequence[int]
    ) -> None:
        """models: the names of those beside the policy. data_leaders: the leader of each data rank, in order."""
        self.rank, self.world = rank_and_world()
        self.data_rank, self.data_world = data_rank, len(data_leaders)
        self.is_data_leader = self.rank in data_leaders
        self._config, self._data_leaders = config, data_leaders
        self._over_base = any(map(self.is_base, models))
        self._writers: dist.ProcessGroup | None = None  # the threads of all ranks that write checkpoints

    @cached_property
    def models(self) -> Mapping[str, Model]:
        """The models beside the policy, by the names of `roles.ROLES`."""
        held: dict[str, Model] = {name: model for name, model in self._models.items() if name != POLICY}
        based = {REFERENCE: self._models[POLICY].without_adapters()} if self._over_base else {}
        return held | based

    def is_base(self, name: str) -> bool:
        """Whether the model is the policy with its adapters off, and has no memory of its own."""
        return is_base(name, self._config)

    def exchange(self, value: Any) -> list[Any]:
        """Collective: a small value from every rank, in rank order, on every rank."""
        return process_group.exchange(value)

    def gather(self, mine: Tensor) -> list[Tensor]:
        """Collective: a tensor from each data leader, in order, on the CPU of every rank."""
        return process_group.gather(mine, self._data_leaders)

    def layout(self) -> Layout:
        """This rank's boxes of what a version consists of, in checkpoint names; tied parameters once."""
        return self._published()[0]

    def local_tensors(self) -> Mapping[str, Any]:
        """This rank's live shards, by the names of `layout`: a tensor, or one for each of several boxes."""
        return self._published()[1]

    def save(self, folder: Path) -> None:
        """Collective: write all models that change, their optimizers and the random state. Any world size can load
        them."""
        storage.save_state(folder, self._state())

    def copy_state(self) -> Callable[[Path], None]:
        """Collective: copy everything that `save` writes, so that training can go on. Returns a function that writes
        the copy into a folder; it is called once, on every rank, from any thread."""
        state = storage.staged(self._state())
        if self._writers is None and dist.is_initialized():
            deadline = timedelta(seconds=self._config.checkpoint.deadline_s)
            self._writers = dist.new_group(backend="gloo", timeout=deadline)
        return lambda folder: storage.save_state(folder, state, self._writers)

    def load(self, folder: Path) -> None:
        """Collective: the inverse of `save`, for a new backend. Raises ConfigError if the folder lacks a trained
        model."""
        found = storage.models_in(folder)
        for name, model in self._models.items():
            model.changes |= name in found  # a reference that had been updated
        # Also on a rank that holds no part of a missing model: it would wait for the others in the collective.
        storage.require_models(folder, {name for name, model in self._models.items() if model.changes})
        self._load_state(folder)
        for model in self._models.values():
            if model.changes:
                model.write_parameters()

    def export_hf(self, folder: Path) -> None:
        """Collective: write the policy as a Hugging Face folder, its adapters merged and in a folder of their own."""
        lora = self._config.model.lora
        if lora.rank:
            beside = folder / ADAPTER
            self._write_weights(beside, *self._models[POLICY].adapters(), {})
            if self.rank == 0:
                write_peft_config(beside, lora, self._config.model.path)
        self._write_weights(folder, *self._models[POLICY].in_checkpoint(), self._constants())
        if self.rank == 0:
            storage.write_hf_configs(folder, self._causal_lm(), self._config)
        self.exchange(None)

    def park(self) -> None:
        """Move everything to the host's memory and free the device's, for `placement.colocate`. Raises ConfigError if
        this backend cannot."""
        rule = f"takes turns with a backend that parks its memory, which {type(self).__name__} does not"
        raise ConfigError("placement.colocate", True, rule, "set placement.colocate=false")

    def fetch(self) -> None:
        """Have everything on the device again, bit for bit. Nothing is parked to begin with."""
        return

    @abstractmethod
    def close(self) -> None: ...

    def _write_weights(
        self, folder: Path, layout: Layout, tensors: Mapping[str, BoxTensors], constants: Mapping[str, Tensor]
    ) -> None:
        """Collective: write safetensors of all ranks' shards. constants: tensors that each rank has whole."""
        weights = {
            name: storage.as_one_box(param, tensors[name]) for name, param in layout.items() if param.elements
        }
        mine = storage.whole_bytes(layout) | {name: constant.nbytes for name, constant in constants.items()}
        sizes = {name: size for every in self.exchange(mine) for name, size in every.items()}
        storage.write_hf_weights(folder, {**weights, **constants}, sizes)

    def _published(self) -> tuple[Layout, Mapping[str, BoxTensors]]:
        policy = self._models[POLICY]
        return policy.adapters() if self._config.model.lora.travels else policy.in_checkpoint()

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Everything that `save` writes: live tensors by flat names, see `storage.state_of`."""

    @abstractmethod
    def _load_state(self, folder: Path) -> None:
        """Collective: fill the masters and optimizers of the models that change, and the random state."""

    @abstractmethod
    def _causal_lm(self) -> PreTrainedModel:
        """A model of the policy's configuration; its weights are not read."""

    def _constants(self) -> Mapping[str, Tensor]:
        """The policy's tensors that are not trained and that an export has, whole."""
        return {}


def check_reference(same_shapes: bool, config: Config) -> None:
    """Raises ConfigError unless the policy's weights can be copied into the reference."""
    rule = "has another architecture than the policy, whose weights it takes over with reference.update_every"
    remedy = "set reference.path=null, or reference.update_every=null"
    require(same_shapes, "reference.path", config.reference.path, rule, remedy)


def exchange_per_data_rank(backend: Backend, value: Any) -> list[Any]:
    """Collective: `backend.exchange` of the data leaders' values alone, in the order of data ranks."""
    every = backend.exchange([backend.is_data_leader, value if backend.is_data_leader else None])
    return [sent for leads, sent in every if leads]
