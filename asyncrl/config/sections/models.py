"""The sections of models: `model`, `critic`, `reference`, `reward_model` and `teacher`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.config.limits import Amount, Count, Positive
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.config.sections.rules import Rule, Section, key

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoraConfig(Section):
    """Small adapters that are trained in place of the policy's weights: docs/models.md."""

    rank: Amount = key(0, "of each adapter; 0: none, all weights are trained")
    alpha: Positive = key(16.0, "what an adapter says is multiplied by alpha / rank")
    targets: tuple[str, ...] = key(ATTENTION + MLP, "matrices that get one, by the last part of their names")

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            bool(self.targets),
            "model.lora.targets",
            self.targets,
            "names no matrix",
            "leave it out, or set model.lora.targets='[q_proj,v_proj]'",
        )


class PathSection(Section):
    """A section whose `path` may begin with ~."""

    path: str | None

    def __post_init__(self) -> None:
        if self.path is not None:
            object.__setattr__(self, "path", os.path.expanduser(self.path))


@dataclass(frozen=True)
class ModelConfig(PathSection):
    path: str = key(
        "???", "Hugging Face folder or hub name; a folder with config.json alone starts from random weights"
    )
    dtype: Literal["float32", "bfloat16"] = key("float32", "of the policy, in both pools")
    trust_remote_code: bool = key(False, "run model code that comes with the checkpoint")
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True)
class CriticConfig(PathSection):
    """The value model of advantages that need one; safe_rlhf has a second one for the cost, of the same make."""

    path: str | None = key(None, "folder of the body; none: model.path. The value head starts at 0")
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    warmup_versions: Amount = key(0, "first versions in which only the critic learns")
    clip: Positive | None = key(
        0.5, "ε_v: how far a value may move from that at the version's start; none: no clip"
    )


@dataclass(frozen=True)
class ReferenceConfig(PathSection):
    """The frozen policy of KL terms and implicit rewards."""

    path: str | None = key(None, "none: model.path")
    update_every: Count | None = key(None, "versions after which it becomes the current policy; none: never")


@dataclass(frozen=True)
class RewardModelConfig(PathSection):
    """The implicit process reward model of prime, trained online on the outcomes."""

    path: str | None = key(None, "none: model.path")
    frozen: bool = key(False, "trained before, and not any more")
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            self.path is not None or not self.frozen,
            "reward_model.path",
            self.path,
            "names no model that was trained before, and reward_model.frozen=true trains none",
            "set it to the folder of an implicit reward model, or reward_model.frozen=false",
        )


@dataclass(frozen=True)
class TeacherConfig(PathSection):
    """The policy that `advantage: distill` learns from; the same tokenizer as the policy's."""

    path: str | None = key(None, "required for distill")
