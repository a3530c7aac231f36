"""LoRA (Hu et al., arXiv:2106.09685, equation 3): h = W x + alpha/r · B A x, with W frozen, B 0 at first.

Learner and embedded engine put the same adapters into the same model, so both compute the same sums.

Axes:  O outputs · I inputs · r rank
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.config.config_consistency import Registry
from asyncrl.config.rules import require
from asyncrl.config.sections.models import LoraConfig, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.models.loading import WEIGHT_FILES, checkpoint_tensors, empty_causal_lm, text_body
from asyncrl.sync.layout.predicted_sharding import Shapes

BASE, DOWN, UP = ".base.", ".down", ".up"

PEFT_PARTS = {DOWN: "lora_A", UP: "lora_B"}

PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

UNLIKE = (
    *("use_rslora", "use_dora", "use_qalora", "bias", "lora_bias", "rank_pattern", "alpha_pattern"),
    *("modules_to_save", "fan_in_fan_out", "layers_to_transform", "layer_replication"),
    *("trainable_token_indices", "target_parameters"),
)
"""Settings of PEFT that make other sums of A and B, or other tensors."""

FROZEN = "frozen"
"""The entry of the queue's registry with the digest of the learner's frozen weights."""

STRIDE, SAMPLE, WHOLE = 1 << 20, 1 << 16, 1 << 26
"""A digest reads SAMPLE of every STRIDE bytes, so that 60 GB take seconds and no large matrix is left out. It reads
files of at most WHOLE bytes whole."""


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


def read_adapters(causal_lm: PreTrainedModel, lora: LoraConfig) -> None:
    """Begin with the adapters in the folder `model.lora.path`, as PEFT has saved them. Raises ConfigError for adapters
    of another kind, size or place."""
    assert lora.path is not None
    folder, live = Path(lora.path), peft_names(dict(causal_lm.named_parameters()))
    try:
        saved = json.loads((folder / PEFT_CONFIG).read_text(encoding="utf-8"))
        found = load_file(folder / PEFT_WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise _other_adapters(
            lora, f"cannot be read ({error})", "give a folder that PEFT has saved"
        ) from error
    ours = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": sorted(lora.targets)}
    for name, value in ours.items():
        theirs = saved.get(name)
        theirs = sorted(theirs) if isinstance(theirs, list) else theirs
        key = {"r": "rank", "lora_alpha": "alpha"}.get(name, "targets")
        if theirs != value:
            raise _other_adapters(lora, f"has {name} {theirs}", f"set model.lora.{key} to it")
    if odd := next((name for name in UNLIKE if saved.get(name) not in (None, False, "none", [], {})), None):
        raise _other_adapters(lora, f"has {odd} {saved[odd]!r}, which is not done here", "train one without")
    for name in sorted(live.keys() | found.keys()):
        here, there = (tuple(of[name].shape) if name in of else "nothing" for of in (live, found))
        if here != there:
            raise _other_adapters(lora, f"has {there} at {name}, the model {here}", "use that of this model")
        live[name].copy_(found[name])


def _other_adapters(lora: LoraConfig, why: str, remedy: str) -> ConfigError:
    return ConfigError("model.lora.path", lora.path, why, remedy)


def without_adapters(name: str) -> str:
    """The name of a frozen matrix before it got an adapter."""
    return name.replace(BASE, ".")


def peft_names(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters by PEFT's names."""
    return {
        peft_name(name): tensor.detach() for name, tensor in parameters.items() if name.endswith((DOWN, UP))
    }


def peft_name(name: str) -> str:
    """The name of an adapter's A or B in PEFT."""
    linear, _, own = name.rpartition(".")
    return f"base_model.model.{linear}.{PEFT_PARTS['.' + own]}.weight"


def peft_config(lora: LoraConfig, base: str) -> dict[str, Any]:
    """PEFT's adapter_config.json."""
    return {
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


def live_tensors(causal_lm: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a whole model that a version consists of, by their names on the way: its adapters alone if it has
    some."""
    return peft_names(dict(causal_lm.named_parameters())) or checkpoint_tensors(causal_lm)


def adapter_shapes(model: ModelConfig) -> Shapes:
    """The shapes of the adapters of a model, by their names on the way. Only config.json is read. Raises ConfigError as
    `adapt`."""
    empty = empty_causal_lm(model)
    adapt(empty, model.lora, seed=0)
    return {name: (tuple(tensor.shape), model.dtype) for name, tensor in live_tensors(empty).items()}


# ---- what the adapters stand beside, which does not travel


async def check_base(registry: Registry, model: ModelConfig, wait_s: float) -> None:
    """Raises ConfigError if the frozen weights here are others than the learner's, and DeadlineError if the learner has
    not posted their digest within wait_s."""
    if not model.lora.travels:
        return
    theirs = await registry.lookup(FROZEN, wait_s)
    ours = await asyncio.to_thread(base_digest, model.path)
    require(
        ours == theirs,
        "model.path",
        model.path,
        f"has other files of weights here ({ours}) than at the learner ({theirs}), and adapters alone travel",
        "give all machines the same files, or set model.lora.publish=merged",
    )


@lru_cache
def base_digest(path: str) -> str:
    """A digest of config.json and the files of weights: of their names, their sizes and a part of their bytes."""
    cached = None if Path(path).is_dir() else try_to_load_from_cache(path, "config.json")
    folder = Path(cached).parent if isinstance(cached, str) else Path(path)
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(
        {found for pattern in ("config.json", *WEIGHT_FILES) for found in folder.glob(pattern)}
    ):
        size = file.stat().st_size
        digest.update(f"{file.name}|{size}|".encode())
        with file.open("rb") as opened:
            for start in range(0, size, STRIDE if size > WHOLE else SAMPLE):
                opened.seek(start)
                digest.update(opened.read(SAMPLE))
    return digest.hexdigest()
