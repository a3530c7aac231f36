"""The Megatron-core backend: this rank's place in the grid, and its part of all models.

It computes on GPUs, one process each, as Megatron-core does.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.learner import ranks
from asyncrl.learner.backends import storage
from asyncrl.learner.backends.backend import Model, check_reference
from asyncrl.learner.backends.megatron import state
from asyncrl.learner.backends.megatron.architecture import architecture
from asyncrl.learner.backends.megatron.grid import check_model, make_grid
from asyncrl.learner.backends.megatron.model import MegatronModel
from asyncrl.learner.backends.megatron.network import Head, build
from asyncrl.learner.models.networks import Critic, blueprint, check_vocabularies
from asyncrl.learner.models.roles import POLICY
from asyncrl.models import load_model_config
from asyncrl.sync.layout.layout import Layout


class MegatronBackend:
    """`Backend` on RANK and WORLD_SIZE as torchrun sets them; on one process if they are not set."""

    def __init__(self, config: Config, models: Collection[str] = ()) -> None:
        """
        Args:
            models: the models beside the policy, from `roles.MODELS`.

        Raises:
            ConfigError: There is no GPU, or a model cannot be loaded, or does not fit the policy or `learner.parallel`.
        """
        check_vocabularies(models, config)
        logging.getLogger("megatron").setLevel(logging.WARNING)  # else it lists every parameter
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self._grid = make_grid(config.learner.parallel, self.rank, self.world)
        self.data_rank, self.data_world = self._grid.data_rank, self._grid.data
        self.is_data_leader = self._grid.is_data_leader
        self._config, self._device = config, _device(config)
        _join(self._device, self.world)
        self._initialise()
        self._writers: dist.ProcessGroup | None = None
        self._models: dict[str, MegatronModel] = {}
        for name in (POLICY, *sorted(models)):  # the same order on every rank
            self._models[name] = self._load(name)
        self.policy = self._models[POLICY]
        if "reference" in models and config.reference.update_every is not None:
            check_reference(self._models["reference"].gpt == self.policy.gpt, config)

    def _initialise(self) -> None:
        """Make Megatron's process groups, in the order of `grid.py`."""
        found = self._grid
        ps.initialize_model_parallel(
            tensor_model_parallel_size=found.tensor,
            pipeline_model_parallel_size=found.pipeline,
            virtual_pipeline_model_parallel_size=found.chunks if found.chunks > 1 else None,
            expert_model_parallel_size=found.expert,
            expert_tensor_parallel_size=found.expert_tensor,
            distributed_timeout_minutes=int(ranks.COLLECTIVE_DEADLINE.total_seconds() // 60),
        )
        model_parallel_cuda_manual_seed(self._config.run.seed)

    def _load(self, name: str) -> MegatronModel:
        config, found = self._config, self._grid
        plan = blueprint(name, config)
        model = dataclasses.replace(config.model, path=plan.path)
        hf = load_model_config(model, plan.key)
        shape = architecture(hf, plan.key, plan.path)
        check_model(found, shape.gpt)
        head: Head = "values" if plan.make is Critic else "logprobs"
        chunks = build(shape, found, getattr(torch, model.dtype), hf, head, self._device)
        gpt, read = shape.padded(found.tensor), state.reader(model, config.run.seed, plan.key)
        for chunk in chunks:
            state.fill(chunk.body_parameters(), gpt, chunk.place, read)
        return MegatronModel(name, chunks, gpt, found, plan.optimizer, self._device, self._models.get(POLICY))

    @property
    def models(self) -> Mapping[str, Model]:
        return {name: model for name, model in self._models.items() if name != POLICY}

    def exchange(self, value: Any) -> list[Any]:
        return ranks.exchange(value)

    def gather(self, mine: Tensor) -> list[Tensor]:
        return ranks.gather(mine, self._grid.data_leaders)

    def layout(self) -> Layout:
        return self.policy.in_checkpoint()[0]

    def local_tensors(self) -> Mapping[str, Any]:
        return self.policy.in_checkpoint()[1]

    def save(self, folder: Path) -> None:
        state.save_models(folder, {name: model for name, model in self._models.items() if model.changes})

    def stage(self) -> Callable[[Path], None]:
        written = state.stage_models({name: model for name, model in self._models.items() if model.changes})
        if self._writers is None:
            deadline = timedelta(seconds=self._config.checkpoint.deadline_s)
            self._writers = dist.new_group(backend="gloo", timeout=deadline)
        return lambda folder: storage.save(folder, written, self._writers)

    def load(self, folder: Path) -> None:
        state.load_models(folder, self._models)

    def export_hf(self, folder: Path) -> None:
        every = self.exchange(state.export_bytes(self.policy))
        state.export_policy(
            folder, self.policy, {name: size for sizes in every for name, size in sizes.items()}
        )
        if self.rank == 0:
            state.export_configs(folder, self._config)
        self.exchange(None)

    def close(self) -> None:
        ps.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def _device(config: Config) -> torch.device:
    ranks.own_device()
    try:
        return torch.device(torch.cuda.current_device())
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            "learner.backend",
            config.learner.backend,
            f"computes on GPUs, and there is none ({str(error).splitlines()[0]})",
            "set learner.backend=fsdp",
        ) from error


def _join(device: torch.device, world: int) -> None:
    """Make the process group, which Megatron needs even for one process."""
    if world > 1:
        ranks.join_process_group(device)
    elif not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
