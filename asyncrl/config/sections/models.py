"""The sections of models: `model`, `critic`, `reference`, `reward_model` and `teacher`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from asyncrl.config.rules import Amount, Count, Positive, Rule, Section, key
from asyncrl.config.sections.learner import OptimizerConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoraConfig(Section):
    """Small adapters that are trained in place of the policy's weights: docs/models.md."""

    rank: Amount = key(0, "of each adapter; 0: none, all weights are trained")
    alpha: Positive = key(16.0, "an adapter's output is multiplied by alpha / rank")
    targets: tuple[str, ...] = key(ATTENTION + MLP, "matrices that get one, by the last part of their names")
    path: str | None = key(
        None, "PEFT folder of adapters that the policy begins with; none: B is 0", home=True
    )
    publish: Literal["adapter", "merged"] = key(
        "adapter",
        "what a version brings to engines. adapter: adapters alone, beside their own copy of model.path; merged: all "
        "weights",
    )

    @property
    def travels(self) -> bool:
        """Whether versions consist of adapters alone."""
        return self.rank > 0 and self.publish == "adapter"

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            bool(self.targets),
            "targets",
            "names no matrix",
            "leave it out, or set model.lora.targets='[q_proj,v_proj]'",
        )


@dataclass(frozen=True)
class ModelConfig(Section):
    scores: ClassVar[bool] = False
    """Whether the network scores texts, by one logit, in place of predicting tokens."""

    path: str = key(
        "???",
        "Hugging Face folder or hub name; a folder with config.json alone starts from random weights",
        home=True,
    )
    dtype: Literal["float32", "bfloat16"] = key("float32", "of the policy, in both pools")
    trust_remote_code: bool = key(False, "run model code that comes with the checkpoint")
    head_dtype: Literal["none", "float32"] = key(
        "none", "of the logits where they are computed, in both pools; none: rounded to dtype"
    )
    router_replay: bool = key(False, "the learner sends tokens to the experts that engines sent them to")
    vision: Literal["frozen", "train"] = key(
        "frozen", "the vision tower of a model for images; train: with the rest, by learner.optimizer"
    )
    image_pixels: Count | None = key(
        None, "most pixels of an image, which is scaled down to them; none: as the model's processor has it"
    )
    lora: LoraConfig = field(default_factory=LoraConfig)

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            self.vision == "frozen" or not self.lora.rank,
            "vision",
            "stands beside adapters, which leave all weights of the model as they are",
            f"set {at}.vision=frozen, or {at}.lora.rank=0",
        )

    @property
    def wide_head(self) -> bool:
        """Whether logits are float32 though the model is not."""
        return self.head_dtype == "float32" and self.dtype != "float32"


@dataclass(frozen=True)
class ScoringModelConfig(ModelConfig):
    """The section `model` where `asyncrl reward-model` trains it."""

    scores: ClassVar[bool] = True


@dataclass(frozen=True)
class CriticConfig(Section):
    """The value model of advantages that need one; safe_rlhf has a second one for the cost, of the same make."""

    path: str | None = key(
        None, "folder of the body; none: model.path. The value head starts at 0", home=True
    )
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    warmup_versions: Amount = key(0, "first versions in which only the critic learns")
    clip: Positive | None = key(
        0.5, "ε_v: how far a value may move from that at the version's start; none: no clip"
    )


@dataclass(frozen=True)
class ReferenceConfig(Section):
    """The frozen policy of KL terms and implicit rewards."""

    path: str | None = key(None, "none: model.path", home=True)
    update_every: Count | None = key(None, "versions after which it becomes the current policy; none: never")


@dataclass(frozen=True)
class RewardModelConfig(Section):
    """The implicit process reward model of prime, trained online on the outcomes."""

    path: str | None = key(None, "none: model.path", home=True)
    frozen: bool = key(False, "trained before, and not any more")
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            self.path is not None or not self.frozen,
            "path",
            "names no model that was trained before, and reward_model.frozen=true trains none",
            "set it to the folder of an implicit reward model, or reward_model.frozen=false",
        )


@dataclass(frozen=True)
class TeacherConfig(Section):
    """The policy that `advantage: distill` and `teacher_loss` learn from; the same tokenizer as the policy's."""

    path: str | None = key(None, "required for distill and algorithm.teacher_loss", home=True)
