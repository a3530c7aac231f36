"""The FSDP2 backend: this rank's place in the mesh, and its part of all models."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.config.schema import Config
from asyncrl.device import accelerator
from asyncrl.device.parked import ParkedTensors, storages_of
from asyncrl.learner.algorithms.roles import POLICY, REFERENCE
from asyncrl.learner.backends import storage
from asyncrl.learner.backends.backend import Backend, check_reference
from asyncrl.learner.backends.fsdp.sharded import ShardedModel
from asyncrl.learner.backends.storage import ModelState
from asyncrl.learner.models.networks import LanguageModel, blueprint, check_vocabularies
from asyncrl.learner.parallel.mesh import Mesh, ModelShape, axis_sizes
from asyncrl.learner.ranks import process_group
from asyncrl.models.loading import load_model_config
from asyncrl.system.rank_process import rank_and_world


class FsdpBackend(Backend):
    """`Backend` with FSDP2, on GPUs or CPUs."""

    policy: ShardedModel
    _models: dict[str, ShardedModel]

    def __init__(
        self, config: Config, models: Collection[str] = (), device: torch.device | None = None
    ) -> None:
        """models: those beside the policy, from `roles.ROLES`. Raises ConfigError for a model that cannot be loaded,
        or does not go with the policy. device: None for the rank's own."""
        check_vocabularies(models, config)
        names = (POLICY, *sorted(models))  # the same order on every rank
        rank, world = rank_and_world()
        sizes = [axis_sizes(config.learner.parallel, world, _shape(name, config)) for name in names]
        self._device = device = device or process_group.own_device()
        self._parked = ParkedTensors()
        if world > 1:
            process_group.join_process_group(device, config)
        mesh = Mesh(sizes[0], rank, device.type, config.learner.parallel.expert)
        super().__init__(config, models, mesh.data_rank, mesh.data_leaders)
        self._models = {}
        for name in names:
            if not self.is_base(name):
                self._models[name] = ShardedModel(name, config, device, mesh, self._models.get(POLICY))
        self.policy = self._models[POLICY]
        if REFERENCE in models and config.reference.update_every is not None:
            shapes = [
                {name: tensor.shape for name, tensor in model.parameters().items()}
                for model in (self.policy, self._models[REFERENCE])
            ]
            check_reference(shapes[0] == shapes[1], config)

    def load_policy(self, folder: Path) -> None:
        """Collective: load the policy's weights alone, for an export."""
        storage.load_weights(folder, POLICY, self.policy.state().masters)
        self.policy.write_parameters()

    def park(self) -> None:
        live = (tensor for model in self._models.values() for tensor in model.live())
        self._parked.park(storages_of(live))
        accelerator.free_cached(self._device)

    def fetch(self) -> None:
        self._parked.fetch()

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _stored(self) -> dict[str, ModelState]:
        return {name: model.state() for name, model in self._models.items() if model.changes}

    def _state(self) -> dict[str, Any]:
        return storage.state_of(self._stored())

    def _load_state(self, folder: Path) -> None:
        storage.load(folder, self._stored())

    def _causal_lm(self) -> PreTrainedModel:
        return cast(LanguageModel, self.policy.network).causal_lm

    def _constants(self) -> Mapping[str, Tensor]:
        return self.policy.constants()


def _shape(name: str, config: Config) -> ModelShape:
    plan = blueprint(name, config)
    return ModelShape.of(load_model_config(dataclasses.replace(config.model, path=plan.path), plan.key))
