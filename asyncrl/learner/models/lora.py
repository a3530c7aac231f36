"""LoRA (Hu et al., arXiv:2106.09685, equation 3): h = W x + alpha/r · B A x, with W frozen, B 0 at first.

    network      W (frozen)   A   B         trained, clipped, saved: A and B alone
    reference    W, adapters off            the policy as it was loaded, without memory of its own
    published    W + alpha/r · B A          a copy of the adapted matrices, computed after each step, shard by shard

Engines and exports get merged weights only.

Axes:  O outputs · I inputs · r rank
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from asyncrl.config.sections.models import LoraConfig
from asyncrl.config.sections.rules import require
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.models.roles import Loss
from asyncrl.learner.parallel.mesh import local_part
from asyncrl.models import text_body

BASE, DOWN, UP = ".base.", ".down", ".up"
ADAPTER: Final = "adapter"
"""The folder of an export with the adapters alone, in PEFT's names."""


class Adapted(nn.Module):
    """A frozen linear map and its adapter: `down` is A, `up` is B."""

    def __init__(self, base: nn.Linear, lora: LoraConfig) -> None:
        super().__init__()
        self.base, self.scale, self.on = base, lora.alpha / lora.rank, True
        dtype = base.weight.dtype  # allocated here, even if the base is on the meta device
        self.down = nn.Parameter(torch.empty(lora.rank, base.in_features, dtype=dtype))
        self.up = nn.Parameter(torch.zeros(base.out_features, lora.rank, dtype=dtype))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.base(x)
        return base + F.linear(F.linear(x, self.down), self.up) * self.scale if self.on else base


def adapt(causal_lm: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
    """Freeze the model and add adapters, which the seed makes equal on every rank. Raises ConfigError for a target that
    is no linear map of this model."""
    causal_lm.requires_grad_(False)
    body = set(text_body(causal_lm).modules())
    found = {
        name: module
        for name, module in causal_lm.named_modules()
        if isinstance(module, nn.Linear) and module in body and name.rpartition(".")[2] in lora.targets
    }
    missing = set(lora.targets) - {name.rpartition(".")[2] for name in found}
    require(
        not missing,
        "model.lora.targets",
        sorted(missing),
        f"{type(causal_lm).__name__} has no such linear maps below its head (experts are kept in one piece)",
        "leave them out of model.lora.targets",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, module in found.items():
            parent, _, own = name.rpartition(".")
            setattr(causal_lm.get_submodule(parent), own, Adapted(module, lora))


def without_adapters(name: str) -> str:
    """The name of a frozen matrix before it got an adapter."""
    return name.replace(BASE, ".")


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
        """Collective: after a step. B is cut by rows like its matrix; A is small, and gathered on every rank."""
        for name, (frozen, where) in self._from.items():
            down_rI, up_Or = (self._masters[where + part] for part in (DOWN, UP))
            whole_rI = down_rI.full_tensor() if isinstance(down_rI, DTensor) else down_rI
            merged_OI, frozen_OI, mine_Or = (local_part(t) for t in (self.tensors[name], frozen, up_Or))
            merged_OI.copy_(frozen_OI.to(mine_Or.dtype) + self._scale * mine_Or @ whole_rI)


class BaseUnderAdapters:
    """The reference as a `Model` without memory of its own: the policy with its adapters off."""

    def __init__(self, network: nn.Module, predict: Callable[[MicroBatch], Tensor]) -> None:
        self._network, self._predict = network, predict

    def predict(self, batch: MicroBatch) -> Tensor:
        adapted = [module for module in self._network.modules() if isinstance(module, Adapted)]
        try:
            for module in adapted:
                module.on = False
            return self._predict(batch)
        finally:
            for module in adapted:
                module.on = True

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


def peft_names(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters by PEFT's names."""
    names = {DOWN: ".lora_A.weight", UP: ".lora_B.weight"}
    return {
        f"base_model.model.{name.removesuffix(part)}{theirs}": tensor.detach()
        for name, tensor in parameters.items()
        for part, theirs in names.items()
        if name.endswith(part)
    }


def write_peft_config(folder: Path, lora: LoraConfig, base: str) -> None:
    """Write adapter_config.json, and rename the file of weights as PEFT requires."""
    (weights,) = folder.glob("model*.safetensors")
    weights.rename(folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": list(lora.targets),
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
