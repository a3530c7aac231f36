"""`AdaptiveCoefficients`: two coefficients that a run adapts once per version, from means over the global batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Self

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.advantages.return_advantages import next_multiplier
from asyncrl.learner.algorithms.registry import needs
from asyncrl.learner.algorithms.shaping import next_kl_coef


@dataclass(frozen=True, slots=True)
class AdaptiveCoefficients:
    """kl_coef: β of the KL inside the reward · cost_multiplier: λ of safe_rlhf"""

    kl_coef: float
    cost_multiplier: float

    @staticmethod
    def start(config: AlgorithmConfig) -> AdaptiveCoefficients:
        """The configured values."""
        return AdaptiveCoefficients(config.shaping.kl_coef, config.cost_multiplier)

    def adapted(self, config: AlgorithmConfig) -> dict[str, float]:
        """By name, those that adapt under `config`: what a checkpoint keeps and a metrics row shows."""
        adapting = {"kl_coef": _adapts_kl(config), "cost_multiplier": _adapts_multiplier(config)}
        return {name: value for name, value in asdict(self).items() if adapting[name]}

    def restored(self, adapted: Mapping[str, float], config: AlgorithmConfig) -> Self:
        """With the adapted values of a checkpoint; a coefficient that no longer adapts keeps its configured value."""
        names = self.adapted(config)
        return replace(self, **{name: value for name, value in adapted.items() if name in names})

    def after(self, means: Mapping[str, float], config: AlgorithmConfig) -> Self:
        """Those of the next version. means: the metrics of this one, over all ranks."""
        kl_coef, multiplier = self.kl_coef, self.cost_multiplier
        if _adapts_kl(config):
            kl_coef = next_kl_coef(kl_coef, means["kl/reward"], int(means["rollouts"]), config.shaping)
        if _adapts_multiplier(config):
            multiplier = next_multiplier(multiplier, means[f"reward/part/{config.cost_part}"], config)
        return replace(self, kl_coef=kl_coef, cost_multiplier=multiplier)


def _adapts_kl(config: AlgorithmConfig) -> bool:
    return config.shaping.kl_coef > 0 and config.shaping.kl_target is not None


def _adapts_multiplier(config: AlgorithmConfig) -> bool:
    return "cost_critic" in needs(config)
