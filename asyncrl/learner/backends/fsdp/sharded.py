"""`ShardedModel`: one network over all ranks, with its masters (`masters.py`).

On one process it is the plain module. On several, matrices are cut over the mesh's tp axis, then every decoder layer
and the root are sharded over its shard axis, once for each index of replicate. A frozen network has no optimizer.

Axes:  N packed tokens
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from asyncrl.config.schema import Config, LearnerConfig
from asyncrl.config.sections.learner import ParallelConfig
from asyncrl.errors import TrainingError
from asyncrl.learner.algorithms.roles import Loss
from asyncrl.learner.backends.backend import Model
from asyncrl.learner.backends.checkpoint_source import CheckpointSource, allocate, is_empty, move, origin_of
from asyncrl.learner.backends.dtensor_layout import layout_of_dtensors
from asyncrl.learner.backends.fsdp.masters import Masters, TiedEmbedding
from asyncrl.learner.backends.fsdp.offload import Offload
from asyncrl.learner.backends.fsdp.pipeline import Pipeline, reshard
from asyncrl.learner.backends.fsdp.reduction import Reduction
from asyncrl.learner.backends.fsdp.stages import ModelStage, ModelStages, load_stages
from asyncrl.learner.backends.storage import ModelState
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.shared_prompts import sources
from asyncrl.learner.models.documents import Documents
from asyncrl.learner.models.lora import BaseUnderAdapters
from asyncrl.learner.models.networks import (
    Critic,
    LanguageModel,
    blueprint,
    check_tokens,
    load_network,
    name_at_start,
    named_constants,
    named_parameters,
    spread_over_tensor,
)
from asyncrl.learner.parallel.context import ContextParallel
from asyncrl.learner.parallel.experts import expert_modules, spread_experts
from asyncrl.learner.parallel.mesh import CONTEXT, PIPELINE, TENSOR, Mesh
from asyncrl.models.adapters import DOWN, UP, Adapted, peft_names, without_adapters
from asyncrl.models.loading import checkpoint_names, towers
from asyncrl.models.vision import media_inputs
from asyncrl.sync.layout.layout import Layout
from asyncrl.sync.layout.names import Names
from asyncrl.sync.tensors.shards import BoxTensors

KEPT_WHOLE_BYTES: Final = 1 << 28
"""The parameters of a network of at most this size stay whole from a forward to its backward: gathering them again
takes longer than the memory is worth."""


class ShardedModel:
    """The FSDP2 backend's `Policy` and `Model`: one class, because a policy is a model with more methods.

    Raises ConfigError if it cannot be loaded or cut, or the state of its optimizer cannot be offloaded.

    name    POLICY or one of `roles.ROLES`
    policy  the model that `copy_from_policy` copies
    """

    def __init__(
        self,
        name: str,
        config: Config,
        device: torch.device,
        mesh: Mesh,
        policy: ShardedModel | None = None,
    ) -> None:
        learner, parallel = config.learner, config.learner.parallel
        optimizer, offload = blueprint(name, config).optimizer, Offload.of(learner, device)
        origin = origin_of(name, config)
        empty = origin is not None
        network: LanguageModel | Critic | ModelStages
        if mesh.size(PIPELINE) > 1:
            network = load_stages(name, config, mesh.index(PIPELINE), empty)
        else:
            network = load_network(name, config, empty)
        if optimizer is not None:
            prepare_layers(network, learner)
        self._stages = network if isinstance(network, ModelStages) else None
        self.network = network.network if isinstance(network, ModelStages) else network
        self._device, self._policy, self._shares = device, policy, learner.shares
        self._context: ContextParallel | None = None
        if (context := mesh.axis(CONTEXT)) is not None:
            self._context = ContextParallel(context.get_group(), parallel.context_way)
        move(network, device)
        if optimizer is None:
            network.requires_grad_(False)
        parts = network.parts if isinstance(network, ModelStages) else [network]
        for part in parts:
            _spread(part, mesh, parallel)
        if origin is not None:
            self._fill(network, origin)
        self._reduction = Reduction(parts, once=learner.reduce_gradients == "step")
        scale = next((module.scale for module in network.modules() if isinstance(module, Adapted)), None)
        several = mesh.device_mesh is not None
        merges = not config.model.lora.travels
        self._masters = Masters(self._parameters(), optimizer, device, several, offload, scale, merges)
        self.changes = optimizer is not None  # from what it was loaded with: then checkpoints keep it
        self._pipeline: Pipeline | None = None
        if self._stages is not None and (axis := mesh.axis(PIPELINE)) is not None:
            kind = parallel.pipeline_schedule
            self._pipeline = Pipeline(self._stages, kind, axis.get_group(), device, self._documents)
            if (table := self._masters.tensors.get(self._stages.tied or "")) is not None:
                self._masters.tied = TiedEmbedding(table, axis.get_group())

    def _fill(self, network: nn.Module, origin: CheckpointSource) -> None:
        """Allocate and read the tensors that are still empty, now that the network is cut."""

        def tensors() -> dict[str, Tensor]:
            stages = self._stages
            constants = stages.named_constants_here() if stages else named_constants(self.network)
            return {**self._parameters(), **constants}

        empty = {name for name, tensor in tensors().items() if is_empty(tensor)}
        allocate(network, self._device)
        here = tensors()
        origin.fill({name_at_start(self.network, name): here[name] for name in here if name in empty})

    def _parameters(self) -> dict[str, nn.Parameter]:
        return self._stages.named_parameters_here() if self._stages else named_parameters(self.network)

    def accumulate(self, batches: Sequence[MicroBatch], loss: Loss) -> None:
        if self._masters.optimizer is None:
            raise TypeError("a frozen model is not trained: it has no gradient")
        check_batches(self.network, batches, pipelined=self._pipeline is not None)
        self._masters.begin_accumulation()
        if self._pipeline is not None:
            self._pipeline.accumulate(batches, loss)
        else:
            self._reduction.begin()
            for batch in batches:
                here = batch.to(self._device)
                loss(here, *self.network(here, self._documents(batch))).backward()
        self._masters.take_gradients()

    def predict(self, batch: MicroBatch) -> Tensor:
        return self._first_output(batch)

    def predict_next(self, batch: MicroBatch) -> Tensor:
        return self._first_output(batch, following=True)

    @torch.no_grad()
    def _first_output(self, batch: MicroBatch, **options: Any) -> Tensor:
        """Collective: float32 on the CPU of every rank."""
        check_batches(self.network, [batch], pipelined=self._pipeline is not None)
        if self._pipeline is not None:
            return self._pipeline.predict(batch, **options)
        here = batch.to(self._device)
        first, *_ = self.network(here, self._documents(batch), **options)
        reshard(self.network)
        return cast(Tensor, first).float().cpu()

    def _documents(self, batch: MicroBatch) -> Documents:
        """batch: on the CPU."""
        lengths, media = batch.segment_lengths, None
        if batch.media:
            media = media_inputs(cast(LanguageModel, self.network).causal_lm, batch.texts(lengths))
        multiple = self.network.token_multiple
        source_N = sources(batch) if self._shares else None
        return Documents(lengths, self._device, self._context, multiple, batch.loss_mask_N, media, source_N)

    def gradient_norm(self, scale: float) -> float:
        self._reduce()
        return self._masters.gradient_norm(scale)

    def optimizer_step(self, scale: float, lr: float) -> float:
        self._reduce()
        return self._masters.step(scale, lr)

    def _reduce(self) -> None:
        """Collective: the masters have the sums over all ranks."""
        self._reduction.finish()
        self._masters.take_gradients()

    def forget_gradients(self) -> None:
        self._reduction.forget()
        self._masters.forget_gradients()

    @torch.no_grad()
    def copy_from_policy(self) -> None:
        if self._policy is None or self._masters.optimizer is not None:
            raise TypeError("only a frozen model beside a policy takes over the policy's weights")
        for name, parameter in self._masters.parameters.items():
            parameter.copy_(self._policy._masters.parameters[name])
        self.changes = True

    def live(self) -> Iterator[Tensor]:
        """All that this rank has on its device."""
        return self._masters.live()

    def state(self) -> ModelState:
        """The live tensors that a checkpoint keeps."""
        return self._masters.state()

    def write_parameters(self) -> None:
        self._masters.write_parameters()

    def parameters(self) -> Mapping[str, Tensor]:
        """Live and sharded, in the network's names, adapters merged. Parameters of other pipeline stages have no
        memory."""
        here = self._masters.exported
        if self._stages is not None:
            every = self._stages.of_all_ranks(self._masters.parameters)
            named = {without_adapters(name): p for name, p in every.items() if not name.endswith((DOWN, UP))}
            here = {name: p if p.is_meta else here[name] for name, p in named.items()}
        return {name: parameter.detach() for name, parameter in here.items()}

    def adapters(self) -> tuple[Layout, Mapping[str, BoxTensors]]:
        """Those of other stages have no memory."""
        here = self._masters.parameters
        every = self._stages.of_all_ranks(here) if self._stages else here
        return layout_of_dtensors(peft_names(every), Names())

    def without_adapters(self) -> Model:
        every = (self._stages or self.network).modules()
        return BaseUnderAdapters([module for module in every if isinstance(module, Adapted)], self.predict)

    def constants(self) -> Mapping[str, Tensor]:
        """The checkpoint's tensors that are not trained, such as the biases of DeepSeek-V3's routers: whole on every
        rank; those of other pipeline stages have no memory."""
        here = self._stages.constants_of_all_ranks() if self._stages else named_constants(self.network)
        return {_names(self.network).there(name): tensor for name, tensor in here.items()}

    def in_checkpoint(self) -> tuple[Layout, dict[str, BoxTensors]]:
        return layout_of_dtensors(self.parameters(), _names(self.network))


def check_batches(network: LanguageModel | Critic, batches: Sequence[MicroBatch], pipelined: bool) -> None:
    """Raises TrainingError as `check_tokens`, and for images that this network does not read, or not as it is cut."""
    config = network.body.config
    name = config.name_or_path or type(network.body).__name__
    for batch in batches:
        check_tokens(batch, config.get_text_config().vocab_size, name)
    if not any(batch.media for batch in batches):
        return
    if not isinstance(network, LanguageModel) or not towers(network.causal_lm):
        raise TrainingError(f"a group has images, and a {type(network).__name__} of {name} reads none")
    if pipelined or network.token_multiple > 1:
        raise TrainingError(
            "a group has images, which are read where one rank has the whole stream: set "
            "learner.parallel.pipeline=1 and learner.parallel.sequence=false"
        )


def _names(network: nn.Module) -> Names:
    """The names of its parameters in the checkpoint."""
    return checkpoint_names(network.causal_lm.config) if isinstance(network, LanguageModel) else Names()


def _spread(part: LanguageModel | Critic | ModelStage, mesh: Mesh, parallel: ParallelConfig) -> None:
    """Cut a network, or one pipeline stage of it, over the mesh."""
    if mesh.experts is not None:
        spread_experts(part, mesh.experts)
    if (tensor := mesh.axis(TENSOR)) is not None:
        spread_over_tensor(part.network if isinstance(part, ModelStage) else part, tensor, parallel.sequence)
    if mesh.fsdp is not None:
        _shard(part, mesh.fsdp, mesh.expert_fsdp)


def _shard(network: nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh | None) -> None:
    """expert_mesh: for experts that are spread already; None: they are sharded like the other modules."""
    full = torch.promote_types(next(network.parameters()).dtype, torch.float32)
    precision = MixedPrecisionPolicy(reduce_dtype=full)
    again = sum(parameter.nbytes for parameter in network.parameters()) > KEPT_WHOLE_BYTES
    # A stage goes forward and backward many times before its gradients are reduced: it stays whole meanwhile.
    again = again and not isinstance(network, ModelStage)
    if expert_mesh is not None:
        for module in expert_modules(network):
            # By rows: there may be fewer experts on a rank than ranks that share them.
            fully_shard(module, mesh=expert_mesh, shard_placement_fn=lambda _: Shard(1), mp_policy=precision)
            _sum_gradients(module)
    for module in (*decoder_layers(network), network):
        reshard_after = again and module is not network
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after)
        _sum_gradients(module)


def _sum_gradients(module: nn.Module) -> None:
    """Gradients are sums here, where FSDP takes the mean over ranks by default. Gloo has no scaled reduction, not even
    by 1, so the plain sum is requested too."""
    sharded = cast(FSDPModule, module)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def prepare_layers(network: nn.Module, config: LearnerConfig) -> None:
    """Apply `learner.compile` and `learner.activation_checkpointing` to decoder layers, before they are sharded.

        layer(…) ─▸ FSDP's hooks ─▸ checkpoint ─▸ compiled forward   parameters are whole from the first hook on

    Under checkpointing a layer keeps its input alone and runs again in the backward pass. No random state is saved for
    it: networks are in eval mode, without dropout. A compiled layer takes any number of tokens; attention, whose shapes
    depend on the documents, is not compiled (`attention.py`).
    """
    for layer in decoder_layers(network):
        forward: Callable[..., Any] = layer.forward
        if config.compile:
            forward = torch.compile(forward, dynamic=True)
        if config.activation_checkpointing == "layers":
            forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
        if forward is not layer.forward:
            layer.forward = forward


def decoder_layers(network: nn.Module) -> list[nn.Module]:
    """The layers in the outermost list of modules (`layers` in most families, `h` in GPT-2), or in that of each
    pipeline stage of this rank. Layers of other stages are left out: they have no parameters here."""
    if isinstance(network, ModelStages):
        return [layer for stage in network.parts for layer in decoder_layers(stage)]
    whole = network.network if isinstance(network, ModelStage) else network
    decoder = getattr(whole, "body", whole)  # a vision tower has layers too
    layers = next(module for module in decoder.modules() if isinstance(module, nn.ModuleList))
    return [layer for layer in layers if next(layer.parameters(), None) is not None]
