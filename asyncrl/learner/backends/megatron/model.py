"""`MegatronModel`: one network over all ranks, its gradients and its optimizer.

    micro-batches ─▸ schedule (plain, 1F1B, interleaved) ─▸ gradients added up in float32 buffers, on each rank
                                                                │ once a step: summed over data ranks and parts
    parameters ◂── all-gather ◂── masters ◂── AdamW on 1/(dp · cp) of the elements ◂── the one division

Schedules, buffers and optimizer are Megatron's (DistributedOptimizer for any number of ranks). A frozen network
has neither buffers nor optimizer.

Axes:  N packed tokens
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.learner.algorithms.roles import Loss
from asyncrl.learner.backends.megatron.adapters import LinearAdapters, merged_weights
from asyncrl.learner.backends.megatron.grid import Grid
from asyncrl.learner.backends.megatron.layers import Packed
from asyncrl.learner.backends.megatron.network import PackedGpt
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.shared_prompts import computed_tokens, sources
from asyncrl.learner.models.lora import BaseUnderAdapters
from asyncrl.learner.models.networks import check_tokens
from asyncrl.learner.parallel.context import ContextParallel
from asyncrl.models.adapters import peft_name
from asyncrl.sync.layout.layout import Layout, ParamLayout
from asyncrl.sync.layout.megatron import Gpt, MegatronPart, checkpoint_views
from asyncrl.sync.tensors.shards import BoxTensors, dtype_name

MOMENTS = ("exp_avg", "exp_avg_sq")


class MegatronModel:
    """The Megatron backend's `Policy` and `Model`.

    chunks     those of this rank, with their weights
    optimizer  None for a frozen network
    policy     the model that `copy_from_policy` copies
    """

    def __init__(
        self,
        name: str,
        chunks: Sequence[PackedGpt],
        gpt: Gpt,
        found: Grid,
        optimizer: OptimizerConfig | None,
        device: torch.device,
        policy: MegatronModel | None,
        merges: bool = False,
        shares: bool = False,
        context: ContextParallel | None = None,
    ) -> None:
        """merges: whether versions of merged weights are published. shares: whether repeated prompts are computed
        once. context: the ranks that share the tokens, if there are several"""
        self.name, self.chunks, self.gpt = name, list(chunks), gpt
        self._context = context
        self._grid, self._device, self._policy, self._shares = found, device, policy, shares
        self._clip = optimizer.grad_clip if optimizer else 0.0
        self._accumulated = False
        self._norm: float | None = None  # of the gradient that was summed over ranks; None: not summed yet
        self.changes = optimizer is not None  # from what it was loaded with: then checkpoints keep it
        self._wrapped: list[nn.Module] = list(chunks)  # under Megatron's data parallelism, if trained
        self._optimizer: Any = None
        self._merged: list[dict[str, Tensor]] | None = self._merge() if merges else None
        if optimizer is None:
            for chunk in chunks:
                chunk.requires_grad_(False)
            return
        self._wrapped = [
            DistributedDataParallel(
                chunk.config,
                DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
                chunk,
            )
            for chunk in chunks
        ]
        self._optimizer = get_megatron_optimizer(
            _core_config(optimizer, chunks[0].config.bf16),
            cast(Any, self._wrapped),
            config_overrides={},  # weight decay on every parameter, as the other backend has it
        )

    # ------------------------------------------------------------------ passes

    def accumulate(self, batches: Sequence[MicroBatch], loss: Loss) -> None:
        if self._optimizer is None:
            raise TypeError("a frozen model is not trained: it has no gradient")
        if self._norm is not None:
            raise RuntimeError(
                f"{self.name}: its gradient was summed over ranks; make a step or drop it first"
            )

        def differentiate(number: int, batch: MicroBatch, outputs: Any) -> Tensor:
            return loss(batch, *outputs) if number < len(batches) else 0.0 * outputs[0].sum()

        # An interleaved schedule needs a multiple of the stages.
        rounds = self._grid.pipeline if self._grid.chunks > 1 else 1
        fill = [MicroBatch.empty()] * (-len(batches) % rounds)
        if batches:
            self._run([*batches, *fill], differentiate)
            self._accumulated = True

    @torch.no_grad()
    def predict(self, batch: MicroBatch) -> Tensor:
        likely = self.chunks[0].likely
        return self._first_output(batch, (batch.tokens, *(likely.width if likely else ())))

    @torch.no_grad()
    def predict_next(self, batch: MicroBatch) -> Tensor:
        return self._first_output(batch, (batch.rollouts, self.gpt.vocab), following=True)

    def _first_output(self, batch: MicroBatch, shape: tuple[int, ...], following: bool = False) -> Tensor:
        """Collective: the first output of the last stage, on the CPU of every rank."""
        first = torch.zeros(shape, device=self._device)

        def keep(number: int, _: MicroBatch, outputs: Any) -> Tensor:
            if number == 0:
                first.copy_(outputs if following else outputs[0])
            return first.sum()

        fill = [MicroBatch.empty()] * (self._grid.pipeline - 1 if self._grid.chunks > 1 else 0)
        self._run([batch, *fill], keep, forward_only=True, following=following)
        if self._grid.pipeline > 1:
            last = ps.get_pipeline_model_parallel_last_rank()
            dist.broadcast(first, last, group=ps.get_pipeline_model_parallel_group())
        return first.cpu()

    def _run(
        self,
        batches: Sequence[MicroBatch],
        conclude: Any,
        forward_only: bool = False,
        following: bool = False,
    ) -> None:
        """Run all micro-batches through all stages. conclude: (number of the micro-batch, batch, outputs of the head) →
        a sum to differentiate."""
        source = [sources(batch) if self._shares else None for batch in batches]
        tokens = [computed_tokens(batch, source_N) for batch, source_N in zip(batches, source, strict=True)]
        multiple = self._grid.tensor * (self._context.multiple if self._context else 1)
        lengths = [-(-count // multiple) * multiple for count in tokens]
        if self._grid.chunks > 1:  # Megatron's interleaved stages exchange one shape
            lengths = [max(lengths)] * len(lengths)

        def step(batch_of: Iterator[tuple[int, MicroBatch]], chunk: nn.Module) -> tuple[Any, Any]:
            number, batch = next(batch_of)
            check_tokens(batch, self.gpt.vocab, self.name)
            here = batch.to(self._device)
            packed = Packed.of(batch, lengths[number], self._device, self._context, source[number])
            outputs = chunk(here, packed, following=following)

            def losses(output: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
                return conclude(number, here, output), torch.tensor(0, dtype=torch.int), {}

            return outputs, losses

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[enumerate(batches) for _ in self._wrapped],
            model=self._wrapped,
            num_microbatches=len(batches),
            seq_length=lengths[0],  # not used with variable lengths
            micro_batch_size=1,
            forward_only=forward_only,
        )

    # ------------------------------------------------------------------ steps

    @torch.no_grad()
    def gradient_norm(self, scale: float) -> float:
        if not self._accumulated:
            return 0.0  # no group had an advantage
        if self._norm is None:
            finalize_model_grads(cast(Any, self._wrapped))
            self._optimizer.prepare_grads()
            self._norm = float(self._optimizer.get_grad_norm())
        return scale * self._norm

    @torch.no_grad()
    def optimizer_step(self, scale: float, lr: float) -> float:
        norm = self.gradient_norm(scale)
        if self._accumulated and math.isfinite(norm):
            for chunk in self._wrapped:
                cast(Any, chunk).scale_gradients(scale * min(1.0, self._clip / (norm + 1e-6)))
            self._optimizer.prepare_grads()
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step_with_ready_grads()
            self._refresh_merged()
        self.forget_gradients()
        return norm

    def forget_gradients(self) -> None:
        if self._accumulated:
            for chunk in self._wrapped:
                cast(Any, chunk).zero_grad_buffer()
            self._optimizer.zero_grad()
        self._accumulated, self._norm = False, None

    @torch.no_grad()
    def copy_from_policy(self) -> None:
        if self._policy is None or self._optimizer is not None:
            raise TypeError("only a frozen model beside a policy takes over the policy's weights")
        for mine, theirs in zip(self.chunks, self._policy.chunks, strict=True):
            for name, parameter in mine.named_parameters():
                parameter.copy_(theirs.get_parameter(name))
        self.changes = True

    # ------------------------------------------------------------------ checkpoints

    def in_checkpoint(self) -> tuple[dict[str, ParamLayout], dict[str, BoxTensors]]:
        """Weights tied between two stages belong to the first. Adapters are merged, live if versions have them so."""
        layout: dict[str, ParamLayout] = {}
        views: dict[str, BoxTensors] = {}
        for chunk, merged in zip(self.chunks, self._merged or self._merge(), strict=True):
            own = {name: p.detach() for name, p in chunk.body_parameters().items() if not is_copy(p)} | merged
            held, found = checkpoint_views(own, dtype_name(chunk.config.params_dtype), self.gpt, chunk.place)
            layout |= held
            views |= {name: boxes[0] if len(boxes) == 1 else boxes for name, boxes in found.items()}
        return layout, views

    def adapters(self) -> tuple[Layout, Mapping[str, BoxTensors]]:
        layout: dict[str, ParamLayout] = {}
        views: dict[str, BoxTensors] = {}
        for chunk in self.chunks:
            for name, parameter in chunk.adapter_parameters().items():
                parts = chunk.parts(name, self.gpt)
                boxes, there = [part.box for part in parts], peft_name(parts[0].name)
                dtype = dtype_name(chunk.config.params_dtype)
                layout[there] = ParamLayout(parts[0].shape, dtype, tuple(boxes))
                pieces = parameter.detach().split([box.shape[0] for box in boxes])
                views[there] = pieces[0] if len(pieces) == 1 else list(pieces)
        return layout, views

    def without_adapters(self) -> BaseUnderAdapters:
        every = [module for chunk in self.chunks for module in chunk.modules()]
        return BaseUnderAdapters([m for m in every if isinstance(m, LinearAdapters)], self.predict)

    def _merge(self) -> list[dict[str, Tensor]]:
        """The weights with their adapters, of each chunk; empty where there are none."""
        return [dict(merged_weights(chunk)) for chunk in self.chunks]

    def _refresh_merged(self) -> None:
        for chunk, kept in zip(self.chunks, self._merged or [], strict=False):
            for name, merged in merged_weights(chunk):
                kept[name].copy_(merged)

    def shards(self) -> Iterator[Shard]:
        """The live tensors of this rank that a checkpoint keeps: masters and moments, or a frozen network's
        parameters."""
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                parts = chunk.parts(name, self.gpt)
                shape, copy = tuple(parameter.shape), is_copy(parameter)
                if self._optimizer is None:
                    yield Shard(parts, shape, 0, {"": parameter.detach().view(-1)}, None, copy)
                    continue
                for owner in self._optimizer.chained_optimizers:
                    if parameter in owner.model_param_gbuf_map:
                        start = owner._get_model_param_range_map(parameter)["param"].start
                        yield Shard(parts, shape, start, *_stepped(owner, parameter), copy)

    def write_parameters(self) -> None:
        if self._optimizer is not None:
            for owner in self._optimizer.chained_optimizers:
                owner._copy_main_params_to_model_params()
            for chunk in self._wrapped:
                cast(Any, chunk).start_param_sync(force_sync=True)
            self._refresh_merged()


class Shard(NamedTuple):
    """A flat range of one parameter, from element `start` on.

    parts    the checkpoint boxes that the parameter consists of
    tensors  the range of the master, under "", and of each moment
    counter  of optimizer steps; None for a frozen network
    copy     whether it is the copy of a tied weight that another stage saves
    """

    parts: list[MegatronPart]
    shape: tuple[int, ...]
    start: int
    tensors: dict[str, Tensor]
    counter: StepCounter | None
    copy: bool


class StepCounter:
    """The number of steps that AdamW has made.

    torch's AdamW keeps a tensor for each parameter. Those of Apex and TransformerEngine, which Megatron prefers, keep a
    number for each group.
    """

    def __init__(self, group: dict[str, Any], state: dict[str, Any]) -> None:
        self._group, self._state = group, state
        if "step" not in state and "step" not in group:
            state["step"] = torch.zeros((), dtype=torch.float32)
        self.value = torch.tensor(float(state["step"] if "step" in state else group["step"]))

    def put_back(self) -> None:
        """Set the optimizer's count to `value`, after it was loaded."""
        if "step" in self._state:
            self._state["step"].copy_(self.value)
        else:
            self._group["step"] = int(self.value)


def is_copy(parameter: Tensor) -> bool:
    """Whether it is the head's copy of an embedding on the first stage."""
    return getattr(parameter, "shared", False)


def _stepped(owner: Any, parameter: nn.Parameter) -> tuple[dict[str, Tensor], StepCounter]:
    """({"": the master, moment: …}, counter) of the range that this rank steps on. Missing moments are made."""
    group, number = owner.model_param_group_index_map[parameter]
    found = owner.optimizer.param_groups[group]
    master = found["params"][number]
    moments = owner.optimizer.state[master]
    for key in MOMENTS:
        if key not in moments:
            moments[key] = torch.zeros_like(master)
    tensors = {"": master.detach(), **{key: moments[key] for key in MOMENTS}}
    return {key: tensor.view(-1) for key, tensor in tensors.items()}, StepCounter(found, moments)


def _core_config(optimizer: OptimizerConfig, bf16: bool) -> CoreOptimizerConfig:
    return CoreOptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        bf16=bf16,
        use_distributed_optimizer=True,
        clip_grad=0.0,  # `optimizer_step` clips and scales in one multiplication
    )
