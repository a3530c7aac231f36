"""`ShardedModel`: one network over all ranks, the float32 masters of its parameters, and its optimizer.

    parameters (model.dtype) ─▸ forward ─▸ backward ─▸ gradients of this micro-batch, summed over ranks by FSDP2
        ▲                                                   │ added up in float32
        └── publish ── masters ◂── optimizer step ◂─────────┘ the one division happens there

One process: the plain module. Several: matrices are cut over the mesh's tp axis, then every decoder layer and the root
are sharded over its shard axis, once for each index of replicate.
A network in half precision keeps float32 masters, so that no small update is lost; the masters of one in float32 are
its parameters. A frozen network has neither masters of its own nor an optimizer.

Axes:  N packed tokens
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from asyncrl.config.schema import OptimizerConfig
from asyncrl.config.sections.parallel import ParallelConfig
from asyncrl.learner.backends.checkpoint_source import CheckpointSource, allocate, is_empty, move
from asyncrl.learner.backends.dtensor_layout import layout_of_dtensors
from asyncrl.learner.backends.fsdp.layers import decoder_layers
from asyncrl.learner.backends.fsdp.offload import Offload, ParkedState
from asyncrl.learner.backends.fsdp.pipeline import Pipeline
from asyncrl.learner.backends.fsdp.stages import ModelStage, ModelStages
from asyncrl.learner.backends.fsdp.tied_embeddings import TiedEmbedding
from asyncrl.learner.backends.storage import ModelState
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.models.attention import Documents
from asyncrl.learner.models.lora import Adapted, Merged, peft_names
from asyncrl.learner.models.networks import (
    Critic,
    LanguageModel,
    name_at_start,
    named_constants,
    named_parameters,
    spread_over_tensor,
)
from asyncrl.learner.models.roles import Loss
from asyncrl.learner.parallel.context import ContextParallel
from asyncrl.learner.parallel.experts import experts_of, spread_experts
from asyncrl.learner.parallel.mesh import CONTEXT, PIPELINE, TENSOR, Mesh
from asyncrl.learner.parallel.tensor_parallel import local_part
from asyncrl.models import checkpoint_names
from asyncrl.sync.layout.layout import Layout
from asyncrl.sync.layout.names import Names
from asyncrl.sync.tensors.bucket import BoxTensors

KEPT_WHOLE_BYTES: Final = 1 << 28
"""Parameters of a network so small stay whole from a forward to its backward: gathering them again takes longer than
the memory is worth."""


class ShardedModel:
    """`backend.Model`, and the policy. network: whole, or this rank's stages of a pipeline · optimizer: none for a
    frozen network · policy: what `copy_from_policy` copies · offload: where the optimizer's state waits between
    steps · origin: what fills a network that is empty."""

    def __init__(
        self,
        network: LanguageModel | Critic | ModelStages,
        optimizer: OptimizerConfig | None,
        device: torch.device,
        mesh: Mesh,
        parallel: ParallelConfig,
        policy: ShardedModel | None = None,
        offload: Offload | None = None,
        origin: CheckpointSource | None = None,
    ) -> None:
        self._stages = network if isinstance(network, ModelStages) else None
        self.network = network.network if isinstance(network, ModelStages) else network
        self._device, self._policy = device, policy
        self._several = mesh.device_mesh is not None
        context = mesh.axis(CONTEXT)
        self._context = (
            ContextParallel(context.get_group(), parallel.context_way) if context is not None else None
        )
        move(network, device)
        if optimizer is None:
            network.requires_grad_(False)
        for part in network.parts if isinstance(network, ModelStages) else [network]:
            if mesh.experts is not None:
                spread_experts(part, mesh.experts)
            if (tensor := mesh.axis(TENSOR)) is not None:
                spread_over_tensor(
                    part.network if isinstance(part, ModelStage) else part, tensor, parallel.sequence
                )
            if mesh.fsdp is not None:
                _shard(part, mesh.fsdp, mesh.expert_fsdp)
        if origin is not None:
            self._fill(network, origin)
        self._parameters = self._parameters_here()
        self._masters = {name: _master(parameter) for name, parameter in self._parameters.items()}
        trained = {name: master for name, master in self._masters.items() if master.requires_grad}
        self._optimizer = _adamw(trained, optimizer) if optimizer else None
        # All of a frozen one: it may take over the policy's.
        self._kept = trained if optimizer else self._masters
        self._parked = (
            ParkedState(self._optimizer, offload) if self._optimizer and offload is not None else None
        )
        scale = next((module.scale for module in network.modules() if isinstance(module, Adapted)), None)
        self._merged = Merged(self._parameters, self._masters, scale) if scale is not None else None
        self._grad_clip = optimizer.grad_clip if optimizer else 0.0
        self.changes = optimizer is not None  # from what it was loaded with: goes into checkpoints
        self._pipeline: Pipeline | None = None
        self._tied: TiedEmbedding | None = None
        if self._stages is not None and (axis := mesh.axis(PIPELINE)) is not None:
            self._pipeline = Pipeline(self._stages, axis.get_group(), device, self._documents)
            if self._stages.tied in self._masters:
                self._tied = TiedEmbedding(self._masters[self._stages.tied], axis.get_group())

    def _fill(self, network: nn.Module, origin: CheckpointSource) -> None:
        """What is empty, now that it is cut."""
        empty = {name for name, tensor in self._tensors_here().items() if is_empty(tensor)}
        allocate(network, self._device)
        here = self._tensors_here()
        origin.fill({name_at_start(self.network, name): here[name] for name in here if name in empty})

    def _parameters_here(self) -> dict[str, nn.Parameter]:
        return self._stages.named_parameters_here() if self._stages else named_parameters(self.network)

    def _tensors_here(self) -> dict[str, Tensor]:
        """Parameters and constants."""
        stages = self._stages
        constants = stages.named_constants_here() if stages else named_constants(self.network)
        return {**self._parameters_here(), **constants}

    def accumulate(self, batches: Sequence[MicroBatch], loss: Loss) -> None:
        if self._optimizer is None:
            raise TypeError("a frozen model is not trained: it has no gradient")
        if self._tied is not None:
            self._tied.begin()
        if self._pipeline is not None:
            self._pipeline.accumulate(batches, loss)
            self._take_gradients()
            return
        for batch in batches:
            here, said = self._outputs(batch)
            loss(here, *said).backward()
            self._take_gradients()

    def _outputs(self, batch: MicroBatch) -> tuple[MicroBatch, tuple[Tensor, ...]]:
        """(the batch on the device, all that the network says)."""
        here = batch.to(self._device)
        return here, self.network(here, self._documents(here))

    @torch.no_grad()
    def predict(self, batch: MicroBatch) -> Tensor:
        if self._pipeline is not None:
            return self._pipeline.predict(batch)
        _, (first_N, *_) = self._outputs(batch)
        self._reshard()
        return first_N.float().cpu()

    @torch.no_grad()
    def predict_next(self, batch: MicroBatch) -> Tensor:
        """Of a language model, see `Backend.predict_next`."""
        if self._pipeline is not None:
            return self._pipeline.predict(batch, following=True)
        here = batch.to(self._device)
        (logp_RV,) = self.network(here, self._documents(here), following=True)
        self._reshard()
        return cast(Tensor, logp_RV).float().cpu()

    def _documents(self, batch: MicroBatch) -> Documents:
        return Documents(batch.lengths_R, self._device, self._context, self.network.token_multiple)

    def _reshard(self) -> None:
        """What stays whole until its backward. Where none comes, the next forward would find old weights."""
        for module in self.network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _take_gradients(self) -> None:
        """Of one micro-batch, or of one schedule of a pipeline, to the float32 masters."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is not parameter and parameter.grad is not None:
                grad = parameter.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                parameter.grad = None

    @torch.no_grad()
    def gradient_norm(self, scale: float) -> float:
        """Each element counts on one of the ranks that hold it."""
        repeated = None
        if self._tied is not None:
            self._tied.join()
            repeated = self._tied.repeated
        counted = [grad for grad in self._gradients() if _counts_here(grad) and grad is not repeated]
        mine = [local_part(grad) for grad in counted]
        norm = torch.nn.utils.get_total_norm(mine).to(self._device)  # 0 of none: no group had an advantage
        if self._several:
            square = norm.double().square()
            dist.all_reduce(square)
            norm = square.sqrt()
        return scale * float(norm)

    @torch.no_grad()
    def optimizer_step(self, scale: float, lr: float) -> float:
        norm, grads = self.gradient_norm(scale), self._gradients()
        if self._optimizer is not None and grads and math.isfinite(norm):
            torch._foreach_mul_(grads, scale * min(1.0, self._grad_clip / (norm + 1e-6)))
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._fetch_state()
            self._optimizer.step()
            if self._parked is not None:
                self._parked.park()
            self.publish_masters()
        self.forget_gradients()
        return norm

    def _fetch_state(self) -> None:
        if self._parked is not None:
            self._parked.fetch()

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
        """∀ Masters → the parameters that forward reads, and those that are published."""
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])
        if self._merged is not None:
            self._merged.refresh()

    def state(self) -> ModelState:
        """What a checkpoint keeps, live."""
        self._fetch_state()
        return ModelState(self._kept, self._optimizer)

    def parameters(self) -> Mapping[str, Tensor]:
        """Live, sharded, in checkpoint names, adapters merged; without memory those that another pipeline stage answers
        for."""
        here = self._parameters if self._merged is None else self._merged.tensors
        every = self._stages.of_all_ranks(here) if self._stages else here
        return {name: parameter.detach() for name, parameter in every.items()}

    def adapters(self) -> Mapping[str, Tensor]:
        """Live, sharded, as PEFT names them; none where all weights are trained."""
        return peft_names(self._parameters) if self._merged is not None else {}

    def constants(self) -> Mapping[str, Tensor]:
        """What the checkpoint has beside its parameters, such as the biases of DeepSeek-V3's routers: whole on
        every rank, and trained by nobody. As `parameters`, of all pipeline stages."""
        return self._stages.constants_of_all_ranks() if self._stages else named_constants(self.network)

    def layout(self) -> Layout:
        return self._in_checkpoint()[0]

    def local_tensors(self) -> Mapping[str, Tensor]:
        """This rank's live shards."""
        # FSDP2 alone leaves one box of each parameter.
        return cast(dict[str, Tensor], self._in_checkpoint()[1])

    def _in_checkpoint(self) -> tuple[Layout, dict[str, BoxTensors]]:
        network = self.network
        names = checkpoint_names(network.causal_lm.config) if isinstance(network, LanguageModel) else Names()
        return layout_of_dtensors(self.parameters(), names)


def _shard(network: nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh | None) -> None:
    """expert_mesh: of experts that are spread already, none: they are not, and are sharded like all else."""
    full = torch.promote_types(next(network.parameters()).dtype, torch.float32)
    precision = MixedPrecisionPolicy(reduce_dtype=full)
    again = sum(parameter.nbytes for parameter in network.parameters()) > KEPT_WHOLE_BYTES
    # A stage goes forward and backward many times before its gradients are reduced: it stays whole meanwhile.
    again = again and not isinstance(network, ModelStage)
    if expert_mesh is not None:
        for module in experts_of(network):
            # By rows: there may be fewer experts on a rank than ranks that share them.
            fully_shard(module, mesh=expert_mesh, shard_placement_fn=lambda _: Shard(1), mp_policy=precision)
            _sum_gradients(module)
    for module in (*decoder_layers(network), network):
        reshard = again and module is not network
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard)
        _sum_gradients(module)


def _sum_gradients(module: nn.Module) -> None:
    """FSDP takes the mean over ranks by default; gradients here are sums. Gloo knows no scaled reduction, not even by
    1, so the plain sum is asked for too."""
    sharded = cast(FSDPModule, module)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def _counts_here(tensor: Tensor) -> bool:
    """Whether this rank is the first of those that hold the same part."""
    if not isinstance(tensor, DTensor):
        return True
    at = tensor.device_mesh.get_coordinate() or ()
    return all(
        not index
        for index, placement in zip(at, tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    )


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
