"""The FSDP2 backend: this rank's place among the others, and the models that all of them hold together.

Ranks talk by gloo on the CPU and by NCCL between GPUs.

Axes:  N packed tokens
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, cast

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.learner import storage
from asyncrl.learner.backend import POLICY, Model
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.networks import LanguageModel, blueprint, check_vocabularies, load_network
from asyncrl.learner.sharded import ShardedModel
from asyncrl.sync.layout import Layout

COLLECTIVE_DEADLINE = timedelta(minutes=10)
MESH_AXIS = "data"


class FsdpBackend:
    """`Backend` on RANK and WORLD_SIZE as torchrun sets them (neither set: one process).

    models: what stands beside the policy, of `backend.MODELS`. Raises ConfigError for a model that cannot be loaded
    or does not go with the policy.
    """

    def __init__(self, config: Config, models: Collection[str] = ()) -> None:
        check_vocabularies(models, config)
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        device = _device()
        mesh = _join(device, self.world) if self.world > 1 else None
        self._model_path = config.model.path
        self._models: dict[str, ShardedModel] = {}
        for name in (POLICY, *sorted(models)):  # the same order on every rank
            network, optimizer = load_network(name, config), blueprint(name, config).optimizer
            self._models[name] = ShardedModel(network, optimizer, device, mesh, self._models.get(POLICY))
        self._policy = self._models[POLICY]
        if "reference" in models and config.reference.update_every is not None:
            _check_same_shapes(self._policy, self._models["reference"], config)

    @property
    def models(self) -> Mapping[str, Model]:
        return {name: model for name, model in self._models.items() if name != POLICY}

    def forward(self, batch: MicroBatch) -> tuple[MicroBatch, Tensor, Tensor]:
        here, (logp_N, entropy_N) = self._policy.outputs(batch)
        return here, logp_N, entropy_N

    def predict(self, batch: MicroBatch) -> Tensor:
        return self._policy.predict(batch)

    def predict_next(self, batch: MicroBatch) -> Tensor:
        return self._policy.predict_next(batch)

    def backward(self, loss: Tensor) -> None:
        self._policy.backward(loss)

    def gradient_norm(self, scale: float) -> float:
        return self._policy.gradient_norm(scale)

    def optimizer_step(self, scale: float, lr: float) -> float:
        return self._policy.optimizer_step(scale, lr)

    def forget_gradients(self) -> None:
        self._policy.forget_gradients()

    def exchange(self, value: Any) -> list[Any]:
        if self.world == 1:
            return [value]
        packed = torch.frombuffer(bytearray(msgpack.packb(value)), dtype=torch.uint8)
        return [msgpack.unpackb(message.numpy().tobytes()) for message in _gather_bytes(packed)]

    def gather(self, mine: Tensor) -> list[Tensor]:
        here = mine.detach().cpu().contiguous()
        if self.world == 1:
            return [here]
        every = _gather_bytes(here.reshape(-1).view(torch.uint8))
        return [part.view(here.dtype).reshape(-1, *here.shape[1:]) for part in every]

    def layout(self) -> Layout:
        return self._policy.layout()

    def local_tensors(self) -> Mapping[str, Tensor]:
        return self._policy.local_tensors()

    def save(self, folder: Path) -> None:
        storage.save(folder, {name: model.state() for name, model in self._models.items() if model.changes})

    def load(self, folder: Path) -> None:
        found = storage.models_in(folder)
        for name, model in self._models.items():
            model.changes |= name in found  # a reference that had moved on
        changing = {name: model for name, model in self._models.items() if model.changes}
        storage.load(folder, {name: model.state() for name, model in changing.items()})
        for model in changing.values():
            model.publish_masters()

    def export_hf(self, folder: Path) -> None:
        storage.write_hf_weights(folder, self._policy.parameters())
        if self.rank == 0:
            causal_lm = cast(LanguageModel, self._policy.network).causal_lm
            storage.write_hf_configs(folder, causal_lm, self._model_path)
        self.exchange(None)

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def end_rank() -> NoReturn:
    """Leave the process of one rank of several, successfully and at once.

    torch's caches of sharded operations keep the process group alive beyond `destroy_process_group`, and now
    and then its threads abort the interpreter on its way out:
    a run that went well would be reported as a crash.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _join(device: torch.device, world: int) -> DeviceMesh:
    """Meet the other ranks. Small values always travel on the CPU."""
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=COLLECTIVE_DEADLINE)
    return init_device_mesh(device.type, (world,), mesh_dim_names=(MESH_AXIS,))


def _gather_bytes(mine: Tensor) -> list[Tensor]:
    """uint8 of any length from every rank, in rank order."""
    world = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    longest = max(int(size) for size in sizes)
    every = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(every, nn.functional.pad(mine, (0, longest - len(mine))))
    return [padded[: int(size)] for padded, size in zip(every, sizes, strict=True)]


def _check_same_shapes(policy: ShardedModel, reference: ShardedModel, config: Config) -> None:
    """Raise ConfigError unless the policy's weights can be copied into the reference."""
    shapes = [{name: t.shape for name, t in model.parameters().items()} for model in (policy, reference)]
    require(
        shapes[0] == shapes[1],
        "reference.path",
        config.reference.path,
        "has another architecture than the policy, whose weights it takes over with reference.update_every",
        "set reference.path=null, or reference.update_every=null",
    )
