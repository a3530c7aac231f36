"""`Masters`: the tensors that an optimizer steps on, and the gradients that they collect.

    parameters (model.dtype) ─▸ forward ─▸ backward ─▸ float32 gradients, summed over ranks (`reduction.py`)
        ▲                                                   │ take_gradients
        └── write_parameters ── masters ◂── step ◂──────────┘ divides once, by the global denominator

The masters of half-precision parameters are float32 copies, so that no small update is lost; float32 parameters are
their own masters, and so are frozen ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.learner.backends.fsdp.offload import Offload, ParkedState
from asyncrl.learner.backends.storage import ModelState
from asyncrl.learner.models.lora import Merged
from asyncrl.learner.parallel.mesh import local_part


class Masters:
    """The masters of one network's parameters on this rank, by name.

    parameters  the network computes with them
    tensors     their masters
    optimizer   AdamW on the masters that are trained; None for a frozen network
    tied        the token table that another pipeline stage has as well, if this rank has a copy of one
    merged      the matrices with their LoRA adapters added, which each step computes anew; None if nobody takes them
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig | None,
        device: torch.device,
        several: bool,
        offload: Offload | None,
        adapter_scale: float | None,
        merges: bool,
    ) -> None:
        """
        config         None for a frozen network
        several        whether other ranks hold other parts
        offload        where optimizer state waits between steps; None: on the device
        adapter_scale  of LoRA; None without adapters
        merges         whether versions of merged weights are published
        """
        self.parameters, self._device, self._several = parameters, device, several
        self.tensors = {name: _master(parameter) for name, parameter in parameters.items()}
        for name, master in self.tensors.items():
            if master.requires_grad:
                parameters[name].grad_dtype = master.dtype  # so that micro-batches are added up in it
        self._trained = {name: master for name, master in self.tensors.items() if master.requires_grad}
        self.optimizer = _adamw(self._trained, config) if config else None
        self._grad_clip = config.grad_clip if config else 0.0
        self._parked = ParkedState(self.optimizer, offload) if self.optimizer and offload else None
        self.tied: TiedEmbedding | None = None
        self._norm: float | None = None  # of the accumulated gradients of all ranks, once it is known
        self._adapter_scale = adapter_scale
        self.merged = self._merge() if merges else None

    @property
    def exported(self) -> Mapping[str, Tensor]:
        """Collective: the parameters with their adapters merged, live if `merged` is."""
        merged = self.merged or self._merge()
        return self.parameters if merged is None else merged.tensors

    def _merge(self) -> Merged | None:
        """Collective: None without adapters."""
        scale = self._adapter_scale
        return None if scale is None else Merged(self.parameters, self.tensors, scale)

    def begin_accumulation(self) -> None:
        """To be called before more gradient is added."""
        self._norm = None
        if self.tied is not None:
            self.tied.begin()

    def take_gradients(self) -> None:
        """Move the gradients that the parameters have collected to the masters."""
        for name, parameter in self.parameters.items():
            master = self.tensors[name]
            if master is not parameter and parameter.grad is not None:
                grad = local_part(parameter.grad)
                if master.grad is None:
                    # Not FSDP's DTensor: that one has float32 in it and is described as the parameter's dtype.
                    master.grad = torch.empty_like(master)
                    local_part(master.grad).copy_(grad)
                else:
                    local_part(master.grad).add_(grad)
                parameter.grad = None

    @torch.no_grad()
    def gradient_norm(self, scale: float) -> float:
        """Collective: see `Model`. Each element counts on one of the ranks that hold it. The ranks add up once for all
        calls until more gradient is added."""
        if self._norm is None:
            self._norm = self._total_norm()
        return scale * self._norm

    def _total_norm(self) -> float:
        repeated = None
        if self.tied is not None:
            self.tied.join()
            repeated = self.tied.repeated
        counted = [grad for grad in self._gradients() if _counts_here(grad) and grad is not repeated]
        mine = [local_part(grad) for grad in counted]
        # 0 without gradients: no group had an advantage.
        norm = torch.nn.utils.get_total_norm(mine).to(self._device)
        if self._several:
            square = norm.double().square()
            dist.all_reduce(square)
            norm = square.sqrt()
        return float(norm)

    @torch.no_grad()
    def step(self, scale: float, lr: float) -> float:
        """Collective: see `Model.optimizer_step`."""
        norm, grads = self.gradient_norm(scale), self._gradients()
        if self.optimizer is not None and grads and math.isfinite(norm):
            torch._foreach_mul_(grads, scale * min(1.0, self._grad_clip / (norm + 1e-6)))
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            if self._parked is not None:
                self._parked.fetch()
            self.optimizer.step()
            if self._parked is not None:
                self._parked.park()
            self.write_parameters()
        self.forget_gradients()
        return norm

    def forget_gradients(self) -> None:
        self._norm = None
        for tensor in (*self.parameters.values(), *self.tensors.values()):
            tensor.grad = None

    @torch.no_grad()
    def write_parameters(self) -> None:
        """Collective: copy the masters into the parameters, and merge adapters anew."""
        for name, parameter in self.parameters.items():
            if self.tensors[name] is not parameter:
                parameter.copy_(self.tensors[name])
        if self.merged is not None:
            self.merged.refresh()

    def state(self) -> ModelState:
        """The live tensors that a checkpoint keeps: all of a frozen network, because it may take over the policy's."""
        if self._parked is not None:
            self._parked.fetch()
        return ModelState(self._trained if self.optimizer else self.tensors, self.optimizer)

    def live(self) -> Iterator[Tensor]:
        """All that this rank has on its device: of optimizer state, the part that is not parked."""
        for tensor in (*self.parameters.values(), *self.tensors.values()):
            yield tensor.data
            if tensor.grad is not None:
                yield tensor.grad
        if self.merged is not None:
            yield from self.merged.tensors.values()
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self.tensors.values() if master.grad is not None]


def _counts_here(tensor: Tensor) -> bool:
    """Whether this rank counts the tensor in a norm: true on one of the ranks that hold the same part."""
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
    if not parameter.requires_grad or parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return parameter.detach().float().requires_grad_()


class TiedEmbedding:
    """A copy of a token table that is also the head. The first pipeline stage looks tokens up in its copy, the last one
    computes logits with its own; each accumulates its own part of the gradient.

        first stage   a ──┐                       ┌── a + b ─▸ optimizer step
                          ├─ once a step, `join` ─┤                            equal on both, so the copies stay equal
        last stage    b ──┘                       └── a + b ─▸ optimizer step

    master  this stage's copy, sharded as on the other stage
    group   the pipeline's ranks, first to last
    """

    def __init__(self, master: Tensor, group: dist.ProcessGroup) -> None:
        self._master, self._group = master, group
        self._first = dist.get_rank(group) == 0
        self._other = dist.get_world_size(group) - 1 if self._first else 0
        self._joined = False

    @property
    def repeated(self) -> Tensor | None:
        """The gradient that the first stage has too and that is counted there; None on the first stage."""
        return None if self._first else self._master.grad

    def begin(self) -> None:
        """To be called before more gradient is added: a joined gradient remains on the first stage alone."""
        if self._joined and not self._first:
            self._master.grad = None
        self._joined = False

    @torch.no_grad()
    def join(self) -> None:
        """Collective: give both stages the sum of their gradients. Further calls do nothing."""
        if self._joined or self._master.grad is None:  # then the other stage has no gradient either
            return
        self._joined = True
        mine = local_part(self._master.grad)
        if mine.numel() == 0:
            return
        theirs = torch.empty_like(mine)
        for sends in (self._first, not self._first):
            if sends:
                dist.send(mine, group=self._group, group_dst=self._other)
            else:
                dist.recv(theirs, group=self._group, group_src=self._other)
        mine += theirs
