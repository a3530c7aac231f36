"""The sections of training before reinforcement learning: `sft`, `reward_model_training` and `dpo`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from asyncrl.config.rules import Count, Limit, NotNegative, Positive, Rule, Section, key
from asyncrl.config.sections.learner import OptimizerConfig

Smoothing = Annotated[float, Limit(least=0, below=0.5)]


@dataclass(frozen=True)
class OfflineConfig(Section):
    """The keys that these sections share. Ranks, parallelism and memory are those of `learner`."""

    steps: Count | None = key(None, "most optimizer steps; none: as many as epochs take")
    epochs: Count | None = key(None, "most passes over the tasks; none: as many as steps take")
    batch_size: Count = key(64, "examples of one step, over all ranks")
    max_tokens: Count | None = key(
        None, "of one example; longer ones are left out, and counted as train/left_out; none: no limit"
    )
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    every: Count = key(20, "steps between two looks at the held-out tasks; the last step is always looked at")
    output: str | None = key(
        None, "folder for the Hugging Face model; none: final/ of the run folder", home=True
    )

    def rules(self, at: str) -> Iterator[Rule]:
        yield Rule(
            self.steps is not None or self.epochs is not None,
            "steps",
            f"sets no end, and neither does {at}.epochs",
            f"set {at}.steps=1000, or {at}.epochs=1",
        )


@dataclass(frozen=True)
class SftConfig(OfflineConfig):
    """Only for `asyncrl sft`: supervised training on the 'target' texts of the tasks, or on conversations."""

    steps: Count | None = key(1000, "most optimizer steps; none: as many as epochs take")
    batch_size: Count = key(256, "examples of one step, over all ranks")
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-3, warmup_steps=30))
    until_accuracy: float | None = key(None, "stop once the greedy held-out accuracy reaches this")


@dataclass(frozen=True)
class RewardModelTrainingConfig(OfflineConfig):
    """Only for `asyncrl reward-model`: a sequence classifier with one logit, from pairs of answers."""

    epochs: Count | None = key(1, "most passes over the tasks; none: as many as steps take")


@dataclass(frozen=True)
class DpoConfig(OfflineConfig):
    """Only for `asyncrl dpo`: direct preference optimization of the policy, from pairs of answers."""

    epochs: Count | None = key(1, "most passes over the tasks; none: as many as steps take")
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6))
    loss: Literal["sigmoid", "ipo", "simpo"] = key(
        "sigmoid", "sigmoid: DPO's; simpo: of log-probs a token, without a reference"
    )
    beta: Positive = key(0.1, "β, the weight of the log-probs; of simpo better 2")
    label_smoothing: Smoothing = key(0.0, "ε, the share of pairs whose labels may be wrong; not of ipo")
    target_margin: NotNegative = key(1.0, "γ, by which simpo wants rewards to differ")

    def rules(self, at: str) -> Iterator[Rule]:
        yield from super().rules(at)
        yield Rule(
            self.loss != "ipo" or self.label_smoothing == 0,
            "label_smoothing",
            "is of losses that take a logarithm of a probability, and ipo's is a square",
            f"set {at}.label_smoothing=0, or {at}.loss=sigmoid",
        )
