"""The FSDP2 backend: this rank's place in the mesh, and its part of all models."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.learner import ranks
from asyncrl.learner.backends import storage
from asyncrl.learner.backends.backend import Model, check_reference
from asyncrl.learner.backends.boxes import as_one_box, whole_bytes
from asyncrl.learner.backends.checkpoint_source import origin_of
from asyncrl.learner.backends.fsdp.layers import prepare_layers
from asyncrl.learner.backends.fsdp.offload import Offload
from asyncrl.learner.backends.fsdp.sharded import ShardedModel
from asyncrl.learner.backends.fsdp.stages import load_stages
from asyncrl.learner.models.lora import ADAPTER, BaseUnderAdapters, write_peft_config
from asyncrl.learner.models.networks import LanguageModel, blueprint, check_vocabularies, load_network
from asyncrl.learner.models.roles import POLICY
from asyncrl.learner.parallel.mesh import PIPELINE, Mesh, ModelShape, axis_sizes
from asyncrl.models import load_model_config
from asyncrl.sync.layout.layout import Layout

REFERENCE = "reference"


class FsdpBackend:
    """`Backend` on RANK and WORLD_SIZE as torchrun sets them; on one process if they are not set."""

    def __init__(
        self, config: Config, models: Collection[str] = (), device: torch.device | None = None
    ) -> None:
        """
        Args:
            models: the models beside the policy, from `roles.MODELS`.
            device: None for the rank's own.

        Raises:
            ConfigError: A model cannot be loaded, or does not go with the policy.
        """
        check_vocabularies(models, config)
        names = (POLICY, *sorted(models))  # the same order on every rank
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        sizes = [axis_sizes(config.learner.parallel, self.world, _shape(name, config)) for name in names]
        device = device or ranks.own_device()
        offload = Offload.of(config.learner, device)
        if self.world > 1:
            ranks.join_process_group(device)
        self._mesh = mesh = Mesh(sizes[0], self.rank, device.type, config.learner.parallel.expert)
        self.data_rank, self.data_world = mesh.data_rank, mesh.data_world
        self.is_data_leader = mesh.is_data_leader
        self._config = config
        self._writers: dist.ProcessGroup | None = (
            None  # joins the threads of all ranks that write checkpoints
        )
        self._write_deadline = timedelta(seconds=config.checkpoint.deadline_s)
        self._models: dict[str, ShardedModel] = {}
        staged, stage = mesh.size(PIPELINE) > 1, mesh.index(PIPELINE)
        over_base = config.model.lora.rank > 0 and config.reference.path is None
        for name in names:
            if name == REFERENCE and over_base:
                continue
            optimizer, parallel = blueprint(name, config).optimizer, config.learner.parallel
            origin = origin_of(name, config)
            empty = origin is not None
            network = load_stages(name, config, stage, empty) if staged else load_network(name, config, empty)
            if optimizer is not None:
                prepare_layers(network, config.learner)
            policy = self._models.get(POLICY)
            self._models[name] = ShardedModel(
                network, optimizer, device, mesh, parallel, policy, offload, origin
            )
        self.policy = self._models[POLICY]
        self._lora = config.model.lora
        self._base: dict[str, Model] = {}
        if REFERENCE in names and over_base:
            self._base[REFERENCE] = BaseUnderAdapters(self.policy.network, self.policy.predict)
        if REFERENCE in models and config.reference.update_every is not None:
            shapes = [
                {name: tensor.shape for name, tensor in model.parameters().items()}
                for model in (self.policy, self._models[REFERENCE])
            ]
            check_reference(shapes[0] == shapes[1], config)

    @property
    def models(self) -> Mapping[str, Model]:
        return {name: model for name, model in self._models.items() if name != POLICY} | self._base

    def exchange(self, value: Any) -> list[Any]:
        return ranks.exchange(value)

    def gather(self, mine: Tensor) -> list[Tensor]:
        return ranks.gather(mine, self._mesh.data_leaders)

    def layout(self) -> Layout:
        return self.policy.layout()

    def local_tensors(self) -> Mapping[str, Tensor]:
        return self.policy.local_tensors()

    def save(self, folder: Path) -> None:
        storage.save(folder, self._state())

    def stage(self) -> Callable[[Path], None]:
        state = storage.staged(self._state())
        if self.world > 1 and self._writers is None:
            self._writers = dist.new_group(backend="gloo", timeout=self._write_deadline)
        return lambda folder: storage.save(folder, state, self._writers)

    def _state(self) -> dict[str, Tensor]:
        return storage.state_of(
            {name: model.state() for name, model in self._models.items() if model.changes}
        )

    def load(self, folder: Path) -> None:
        found = storage.models_in(folder)
        for name, model in self._models.items():
            model.changes |= name in found  # a reference that had been updated
        changing = {name: model for name, model in self._models.items() if model.changes}
        storage.load(folder, {name: model.state() for name, model in changing.items()})
        for model in changing.values():
            model.publish_masters()

    def load_policy(self, folder: Path) -> None:
        """Collective: load the policy's weights alone, for an export."""
        storage.load_weights(folder, POLICY, self.policy.state().masters)
        self.policy.publish_masters()

    def export_hf(self, folder: Path) -> None:
        layout, tensors, constants = self.layout(), self.local_tensors(), self.policy.constants()
        weights = {name: as_one_box(param, tensors[name]) for name, param in layout.items() if param.elements}
        mine = whole_bytes(layout) | {name: constant.nbytes for name, constant in constants.items()}
        sizes = {name: size for every in self.exchange(mine) for name, size in every.items()}
        storage.write_hf_weights(folder, {**weights, **constants}, sizes)
        adapters, beside = self.policy.adapters(), folder / ADAPTER
        if adapters:
            storage.write_hf_weights(beside, adapters)
        if self.rank == 0:
            if adapters:
                write_peft_config(beside, self._lora, self._config.model.path)
            causal_lm = cast(LanguageModel, self.policy.network).causal_lm
            storage.write_hf_configs(folder, causal_lm, self._config)
        self.exchange(None)

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def end_rank(code: int = 0) -> NoReturn:
    """End the process of one rank of several, after a success, without unwinding it.

    torch's caches of sharded operations keep the process group alive beyond `destroy_process_group`. Its threads then
    sometimes abort the interpreter while it exits, and a successful run would be reported as a crash.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _shape(name: str, config: Config) -> ModelShape:
    plan = blueprint(name, config)
    return ModelShape.of(load_model_config(dataclasses.replace(config.model, path=plan.path), plan.key))
