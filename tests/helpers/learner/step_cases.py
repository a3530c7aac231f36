"""Steps of a learner that differ in what they compute with: families, images, adapters, recorded experts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_cases import MODELS
from image_cases import group as picture_group
from learner_cases import random_group, small_config
from model_families import FAMILIES, save_family

from asyncrl.config.schema import Config, LearnerConfig, ModelConfig
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.models import LoraConfig
from asyncrl.models.loading import load_model_config
from asyncrl.models.routing import RouterShape
from asyncrl.types import Group


@dataclass(frozen=True)
class StepCase:
    """family: of `model_families` · model: keys of the section `model`"""

    family: str
    model: dict[str, Any] = field(default_factory=dict)

    def config(self, folder: Path, dtype: str = "bfloat16") -> Config:
        save_family(self.family, folder / "model")
        return small_config(
            folder,
            model=ModelConfig(path=str(folder / "model"), dtype=dtype, **self.model),
            learner=LearnerConfig(micro_batch_tokens=64),
            algorithm=AlgorithmConfig(proximal="frozen"),
        )

    def groups(self, config: Config) -> list[Group]:
        """Two, with advantages; where the model reads no images, one has rollouts of two segments."""
        if self.family in MODELS:
            rewards = np.array([0, 1, 0, 1], np.float32)
            made = [picture_group(Path(config.model.path), ordinal) for ordinal in range(2)]
            return [replace(group, rewards=rewards) for group in made]
        made = [random_group(0, segments=2), random_group(1)]
        return [_routed(group, config.model) for group in made] if config.model.router_replay else made


def _routed(group: Group, model: ModelConfig) -> Group:
    """With a random choice of experts for each token and layer."""
    shape, random = RouterShape.of(load_model_config(model)), np.random.default_rng(0)
    assert shape is not None
    chosen = [random.permutation(shape.experts)[: shape.top_k] for _ in range(group.tokens * shape.layers)]
    experts = np.concatenate(chosen).reshape(group.tokens, shape.width).astype(np.int16)
    return replace(group, columns={**group.columns, "experts": experts})


LORA = LoraConfig(rank=2, targets=("q_proj", "v_proj"))

STEPS = {
    **{family: StepCase(family) for family in FAMILIES},
    "adapters": StepCase("qwen2", {"lora": LORA}),
    "adapters, merged": StepCase("qwen2", {"lora": replace(LORA, publish="merged")}),
    "a head in float32": StepCase("qwen2", {"head_dtype": "float32"}),
    **{
        f"{family}, replayed": StepCase(family, {"router_replay": True})
        for family in ("qwen3-moe", "deepseek-v3", "gpt-oss", "qwen3.5-moe")
    },
    **{f"{family}, trained": StepCase(family, {"vision": "train"}) for family in MODELS},
}

QUICK = {
    "qwen2",
    "qwen3-next",
    "adapters, merged",
    "a head in float32",
    "qwen3-moe, replayed",
    "qwen3-vl, trained",
}

EACH_STEP = [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in STEPS]
"""Of the quick tests: one of each kind of layer and input."""
