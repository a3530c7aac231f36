"""LoRA (Hu et al., arXiv:2106.09685, equation 3): h = W x + alpha/r · B A x, with W frozen, B 0 at first.

    network      W (frozen)   A   B         trained, clipped, saved: A and B alone
    reference    W, adapters off            the policy as it was loaded, without memory of its own
    published    A   B, or W + alpha/r · B A, by model.lora.publish
    exported     W + alpha/r · B A, and A and B beside it, in PEFT's names

Axes:  O outputs · I inputs · r rank
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from asyncrl.config.schema import Config
from asyncrl.config.sections.models import LoraConfig
from asyncrl.learner.algorithms.roles import REFERENCE, Loss
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.parallel.mesh import local_part
from asyncrl.models.adapters import (
    DOWN,
    PEFT_CONFIG,
    PEFT_WEIGHTS,
    UP,
    peft_config,
    without_adapters,
)

ADAPTER: Final = "adapter"
"""The folder of an export with the adapters alone, in PEFT's names."""


class Merged:
    """A network's parameters with adapters merged, in the names of the network without adapters.

    tensors: merged copies, which `refresh` computes, and the live parameters that have no adapter
    """

    def __init__(self, parameters: Mapping[str, Tensor], masters: Mapping[str, Tensor], scale: float) -> None:
        self._masters, self._scale = masters, scale
        self.tensors: dict[str, Tensor] = {}
        self._from: dict[str, tuple[Tensor, str]] = {}  # name → the frozen matrix, and its adapter's
        for name, parameter in parameters.items():
            if name.endswith((DOWN, UP)):
                continue
            plain = without_adapters(name)
            where = plain.removesuffix(".weight")
            if where + UP in parameters and plain != name:
                self._from[plain] = (parameter.detach(), where)
                parameter = parameter.detach().clone()
            self.tensors[plain] = parameter
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Collective: after a step. B is cut like its matrix by rows, A by columns, and the rows of A are gathered."""
        for name, (frozen, where) in self._from.items():
            down_rI, up_Or = (self._masters[where + part] for part in (DOWN, UP))
            if isinstance(down_rI, DTensor):
                columns = [
                    p if isinstance(p, Shard) and p.dim == 1 else Replicate() for p in down_rI.placements
                ]
                down_rI = down_rI.redistribute(placements=columns)
            parts = (self.tensors[name], frozen, up_Or, down_rI)
            merged_OI, frozen_OI, mine_Or, mine_rI = (local_part(tensor) for tensor in parts)
            merged_OI.copy_(frozen_OI.to(mine_Or.dtype) + self._scale * mine_Or @ mine_rI)


class Switched(Protocol):
    """Adapters that can be left out of a forward."""

    on: bool


def is_base(name: str, config: Config) -> bool:
    """Whether a model is the policy with its adapters off, and has no memory of its own."""
    return name == REFERENCE and config.model.lora.rank > 0 and config.reference.path is None


class BaseUnderAdapters:
    """The reference as a `Model` without memory of its own: the policy with its adapters off."""

    def __init__(self, adapters: Sequence[Switched], predict: Callable[[MicroBatch], Tensor]) -> None:
        self._adapters, self._predict = adapters, predict

    def predict(self, batch: MicroBatch) -> Tensor:
        try:
            for each in self._adapters:
                each.on = False
            return self._predict(batch)
        finally:
            for each in self._adapters:
                each.on = True

    def accumulate(self, batches: Sequence[MicroBatch], loss: Loss) -> NoReturn:
        raise TypeError("a frozen model is not trained: it has no gradient")

    def gradient_norm(self, scale: float) -> float:
        return 0.0

    def optimizer_step(self, scale: float, lr: float) -> float:
        return 0.0

    def forget_gradients(self) -> None:
        return

    def copy_from_policy(self) -> NoReturn:
        raise TypeError("the base under adapters does not change")


def write_peft_config(folder: Path, lora: LoraConfig, base: str) -> None:
    """Write adapter_config.json, and rename the file of weights as PEFT requires."""
    (weights,) = folder.glob("model*.safetensors")
    weights.rename(folder / PEFT_WEIGHTS)
    (folder / PEFT_CONFIG).write_text(json.dumps(peft_config(lora, base), indent=2), encoding="utf-8")
