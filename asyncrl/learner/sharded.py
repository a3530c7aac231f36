"""`ShardedModel`: one network over all ranks, the float32 masters of its parameters, and its optimizer.

    parameters (model.dtype) ─▸ forward ─▸ backward ─▸ gradients of this micro-batch, summed over ranks by FSDP2
        ▲                                                   │ added up in float32
        └── publish ── masters ◂── optimizer step ◂─────────┘ the one division happens there

One process: the plain module. Several: every decoder layer and the root are sharded over a one-dimensional mesh.
A network in half precision keeps float32 masters, so that no small update is lost; the masters of one in float32 are
its parameters. A frozen network has neither masters of its own nor an optimizer.

Axes:  N packed tokens
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from asyncrl.config.schema import OptimizerConfig
from asyncrl.learner.attention import Documents
from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.dtensor_layout import layout_of_dtensors
from asyncrl.learner.networks import Critic, LanguageModel
from asyncrl.learner.storage import ModelState
from asyncrl.models import checkpoint_names
from asyncrl.sync.bucket import BoxTensors
from asyncrl.sync.layout import Layout
from asyncrl.sync.names import Names

WRAPPER: Final = "causal_lm."
"""Parameters of a language model go by the names that its checkpoint has for them."""


class ShardedModel:
    """`backend.Model`, and the policy. mesh: none for one process · optimizer: none for a frozen network · policy: what
    `copy_from_policy` copies."""

    def __init__(
        self,
        network: LanguageModel | Critic,
        optimizer: OptimizerConfig | None,
        device: torch.device,
        mesh: DeviceMesh | None,
        policy: ShardedModel | None = None,
    ) -> None:
        self.network, self._device, self._policy = network, device, policy
        network.to(device).requires_grad_(optimizer is not None)
        if mesh is not None:
            _shard(network, mesh)
        named = network.named_parameters()  # tied ones come once
        self._parameters = {name.removeprefix(WRAPPER): parameter for name, parameter in named}
        self._masters = {name: _master(parameter) for name, parameter in self._parameters.items()}
        self._optimizer = _adamw(self._masters, optimizer) if optimizer else None
        self._grad_clip = optimizer.grad_clip if optimizer else 0.0
        self.changes = optimizer is not None  # from what it was loaded with: goes into checkpoints

    def outputs(self, batch: MicroBatch) -> tuple[MicroBatch, tuple[Tensor, ...]]:
        """(the batch on the device, all that the network says)."""
        here = batch.to(self._device)
        return here, self.network(here, Documents(here.lengths_R, self._device))

    def forward(self, batch: MicroBatch) -> tuple[MicroBatch, Tensor]:
        if self._optimizer is None:
            raise TypeError("a frozen model is not trained: it has no gradient")
        here, (first_N, *_) = self.outputs(batch)
        return here, first_N

    @torch.no_grad()
    def predict(self, batch: MicroBatch) -> Tensor:
        _, (first_N, *_) = self.outputs(batch)
        self._reshard()
        return first_N.float().cpu()

    @torch.no_grad()
    def predict_next(self, batch: MicroBatch) -> Tensor:
        """Of a language model, see `Backend.predict_next`."""
        here = batch.to(self._device)
        (logp_RV,) = self.network(here, Documents(here.lengths_R, self._device), following=True)
        self._reshard()
        return cast(Tensor, logp_RV).float().cpu()

    def _reshard(self) -> None:
        """The root stays whole until its backward. Where none comes, the next forward would find old weights."""
        if isinstance(self.network, FSDPModule):
            self.network.reshard()

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is not parameter and parameter.grad is not None:
                grad = parameter.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                parameter.grad = None

    @torch.no_grad()
    def gradient_norm(self, scale: float) -> float:
        if not self._gradients():
            return 0.0  # no group had an advantage
        total = torch.nn.utils.get_total_norm(self._gradients())
        return scale * float(total.full_tensor() if isinstance(total, DTensor) else total)

    @torch.no_grad()
    def optimizer_step(self, scale: float, lr: float) -> float:
        norm, grads = self.gradient_norm(scale), self._gradients()
        if self._optimizer is not None and grads and math.isfinite(norm):
            torch._foreach_mul_(grads, scale * min(1.0, self._grad_clip / (norm + 1e-6)))
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self.publish_masters()
        self.forget_gradients()
        return norm

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self._masters.values() if master.grad is not None]

    def forget_gradients(self) -> None:
        for tensor in (*self._parameters.values(), *self._masters.values()):
            tensor.grad = None

    @torch.no_grad()
    def copy_from_policy(self) -> None:
        if self._policy is None or self._optimizer is not None:
            raise TypeError("only a frozen model beside a policy takes over the policy's weights")
        for name, parameter in self._parameters.items():
            parameter.copy_(self._policy._parameters[name])
        self.changes = True

    @torch.no_grad()
    def publish_masters(self) -> None:
        """Masters → the parameters that forward reads."""
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    def state(self) -> ModelState:
        """What a checkpoint keeps, live."""
        return ModelState(self._masters, self._optimizer)

    def parameters(self) -> Mapping[str, Tensor]:
        """Live, sharded, in checkpoint names."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def layout(self) -> Layout:
        return self._in_checkpoint()[0]

    def local_tensors(self) -> Mapping[str, Tensor]:
        """This rank's live shards."""
        # FSDP2 alone leaves one box of each parameter.
        return cast(dict[str, Tensor], self._in_checkpoint()[1])

    def _in_checkpoint(self) -> tuple[Layout, dict[str, BoxTensors]]:
        network = self.network
        names = checkpoint_names(network.causal_lm.config) if isinstance(network, LanguageModel) else Names()
        return layout_of_dtensors(self._parameters, names)


def _shard(network: nn.Module, mesh: DeviceMesh) -> None:
    full = torch.promote_types(next(network.parameters()).dtype, torch.float32)
    precision = MixedPrecisionPolicy(reduce_dtype=full)
    for module in (*_decoder_layers(network), network):
        fully_shard(module, mesh=mesh, mp_policy=precision)
        # FSDP takes the mean over ranks by default; gradients here are sums. Gloo knows no scaled reduction,
        # not even by 1, so the plain sum is asked for too.
        sharded = cast(FSDPModule, module)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def _decoder_layers(network: nn.Module) -> nn.ModuleList:
    """The outermost list of modules: `layers` in most families, `h` in GPT-2."""
    return next(module for module in network.modules() if isinstance(module, nn.ModuleList))


def _adamw(masters: Mapping[str, Tensor], config: OptimizerConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        masters.values(),
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def _master(parameter: nn.Parameter) -> Tensor:
    """What the optimizer steps on: the parameter, or a float32 copy of a half-precision one that is trained."""
    if not parameter.requires_grad or parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return parameter.detach().float().requires_grad_()
