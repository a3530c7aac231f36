"""The keys of the section `model.lora`: small adapters that are trained in place of the policy's weights."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.sections.limits import Amount, Positive, check_values
from asyncrl.config.sections.parallel import ParallelConfig
from asyncrl.config.sections.rules import require

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoraConfig:
    rank: Amount = 0  # of each adapter; 0: none, all weights are trained
    alpha: Positive = 16.0  # what an adapter says is multiplied by alpha / rank
    targets: tuple[str, ...] = ATTENTION + MLP  # matrices that get one, by the last part of their names

    def __post_init__(self) -> None:
        check_values("model.lora", self)
        require(
            bool(self.targets),
            "model.lora.targets",
            self.targets,
            "names no matrix",
            "leave it out, or set model.lora.targets='[q_proj,v_proj]'",
        )


def check_lora(lora: LoraConfig, parallel: ParallelConfig, update_reference: int | None) -> None:
    """ConfigError for what does not go with adapters."""
    if lora.rank == 0:
        return
    require(
        update_reference is None,
        "reference.update_every",
        update_reference,
        "the reference of a policy with adapters is what they were put into, and that stays as it is",
        "leave it out, or set model.lora.rank=0",
    )
    for key in ("tensor", "expert", "pipeline"):
        size = getattr(parallel, key)
        require(
            size == 1,
            f"learner.parallel.{key}",
            size,
            "does not cut adapters yet",
            f"set learner.parallel.{key}=1, or model.lora.rank=0",
        )
