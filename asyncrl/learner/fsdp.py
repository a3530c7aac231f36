"""The FSDP2 backend. One process: the plain module. Several: every decoder layer and the root are sharded
over a one-dimensional device mesh, gloo on the CPU, NCCL on GPUs.

Gradients are sums, over tokens, micro-batches and ranks; the one division happens in `optimizer_step`. A
policy in half precision keeps float32 masters: gradients are collected and the optimizer steps on those, so
that no small update is lost, and generators get exactly what the learner computes with.

Axes:  N packed tokens · T of them under the loss mask · D hidden size · V vocabulary
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, cast

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from asyncrl.config.schema import ModelConfig, OptimizerConfig
from asyncrl.learner import storage
from asyncrl.learner.attention import PACKED, Documents
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.logprobs import token_logprobs
from asyncrl.models import load_causal_lm
from asyncrl.sync.layout import Box, Layout, ParamLayout

COLLECTIVE_DEADLINE = timedelta(minutes=10)
MESH_AXIS = "data"


class Policy(nn.Module):
    """A causal language model that answers with log-probs. They are computed inside `forward`, because only
    there is the sharded head whole."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, batch: MicroBatch, documents: Documents) -> tuple[Tensor, Tensor]:
        """(logp_N, entropy_N), 0 outside the loss mask."""
        body = self.causal_lm.base_model(
            input_ids=batch.token_ids_N[None],
            position_ids=batch.position_ids_N[None],
            documents=documents,
            use_cache=False,
        )
        at_T = torch.nonzero(batch.loss_mask_N)[:, 0]
        # Token t is predicted at t-1.
        hidden_TD = body.last_hidden_state[0].index_select(0, at_T - 1)
        weight_VD = self.causal_lm.get_output_embeddings().weight
        logp_T, entropy_T = token_logprobs(
            hidden_TD, weight_VD, batch.token_ids_N[at_T], temperature=batch.temperature
        )
        zeros_N = logp_T.new_zeros(batch.tokens)
        return zeros_N.index_copy(0, at_T, logp_T), zeros_N.index_copy(0, at_T, entropy_T)


class FsdpBackend:
    """`Backend` on RANK and WORLD_SIZE as torchrun sets them (neither set: one process).

    Raises ConfigError as `load_causal_lm` does.
    """

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, seed: int) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self._device = _device()
        self._model_path = model.path
        self._grad_clip = optimizer.grad_clip
        self._causal_lm = load_causal_lm(model, seed, attention=PACKED)
        cast(nn.Module, self._causal_lm).to(self._device)
        self._policy = Policy(self._causal_lm)
        if self.world > 1:
            _join(self._device)
            _shard(self._policy, self._causal_lm, self.world, self._device)
        self._parameters = dict(self._causal_lm.named_parameters())  # tied ones come once
        self._masters = {name: _master(p) for name, p in self._parameters.items()}
        self._optimizer = torch.optim.AdamW(
            self._masters.values(),
            lr=optimizer.lr,
            betas=(optimizer.betas[0], optimizer.betas[1]),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )

    def forward(self, batch: MicroBatch) -> tuple[MicroBatch, Tensor, Tensor]:
        here = batch.to(self._device)
        logp_N, entropy_N = self._policy(here, Documents(here.lengths_R, self._device))
        return here, logp_N, entropy_N

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is not parameter and parameter.grad is not None:
                grad = parameter.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                parameter.grad = None

    @torch.no_grad()
    def optimizer_step(self, scale: float, lr: float) -> float:
        grads = [m.grad for m in self._masters.values() if m.grad is not None]
        if not grads:
            return 0.0  # no group had an advantage
        total = torch.nn.utils.get_total_norm(grads)
        norm = scale * float(total.full_tensor() if isinstance(total, DTensor) else total)
        if torch.isfinite(torch.tensor(norm)):
            torch._foreach_mul_(grads, scale * min(1.0, self._grad_clip / (norm + 1e-6)))
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._publish_masters()
        self.forget_gradients()
        return norm

    def forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._policy.zero_grad(set_to_none=True)

    def exchange(self, value: Any) -> list[Any]:
        if self.world == 1:
            return [value]
        packed = torch.frombuffer(bytearray(msgpack.packb(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(packed)]))
        longest = max(int(size) for size in sizes)
        padded = nn.functional.pad(packed, (0, longest - len(packed)))
        every = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(every, padded)
        return [
            msgpack.unpackb(message.numpy()[: int(size)].tobytes())
            for message, size in zip(every, sizes, strict=True)
        ]

    def layout(self) -> Layout:
        return {name: _param_layout(parameter) for name, parameter in self._parameters.items()}

    def local_tensors(self) -> Mapping[str, Tensor]:
        return {name: _local(parameter) for name, parameter in self._parameters.items()}

    def save(self, folder: Path) -> None:
        storage.save(folder, self._masters, self._optimizer)

    def load(self, folder: Path) -> None:
        storage.load(folder, self._masters, self._optimizer)
        self._publish_masters()

    def export_hf(self, folder: Path) -> None:
        tensors = {name: parameter.detach() for name, parameter in self._parameters.items()}
        storage.write_hf_weights(folder, tensors)
        if self.rank == 0:
            storage.write_hf_configs(folder, self._causal_lm, self._model_path)
        self.exchange(None)

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @torch.no_grad()
    def _publish_masters(self) -> None:
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])


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


def _join(device: torch.device) -> None:
    """Small values always travel on the CPU."""
    if not dist.is_initialized():
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=COLLECTIVE_DEADLINE)


def _shard(policy: Policy, causal_lm: PreTrainedModel, world: int, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=(MESH_AXIS,))
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    layers = cast(nn.ModuleList, causal_lm.base_model.layers)
    for module in (*layers, policy):
        fully_shard(module, mesh=mesh, mp_policy=precision)
        # FSDP takes the mean over ranks by default; gradients here are sums. Gloo knows no scaled reduction,
        # not even by 1, so the plain sum is asked for too.
        sharded = cast(FSDPModule, module)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def _master(parameter: nn.Parameter) -> Tensor:
    """What the optimizer steps on: the parameter, or a float32 copy of a half-precision one."""
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().float().requires_grad_()


def _local(parameter: Tensor) -> Tensor:
    detached = parameter.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _param_layout(parameter: Tensor) -> ParamLayout:
    shape, dtype = tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")
    if not isinstance(parameter, DTensor):
        return ParamLayout(shape, dtype, (Box.whole(shape),))
    local, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    box = Box(tuple(offsets), tuple(local))
    return ParamLayout(shape, dtype, (box,) if box.elements else ())
