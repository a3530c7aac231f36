"""A second critic, with a discount of 0.9: `algorithm.own_advantage=examples/own_critic.py:two_horizons`."""

from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.algorithms.advantages.return_advantages import generalised_advantages, reward_advantages
from asyncrl.learner.algorithms.reductions import column, token_rewards, whiten
from asyncrl.learner.algorithms.registry import AlgorithmContext, advantage
from asyncrl.learner.algorithms.roles import critic
from asyncrl.learner.data.batch import MicroBatch


def near_advantages(batch: MicroBatch, config: AlgorithmConfig) -> Tensor:
    """[N]: gae with γ = 0.9 and the values of the second critic."""
    values_N = column(batch, "near_values")
    return generalised_advantages(token_rewards(batch), values_N, 0.9, config.lam, batch)


@critic("near")
def near_returns(batch: MicroBatch, config: AlgorithmConfig) -> Tensor:
    """[N]: the targets of the second critic."""
    return near_advantages(batch, config) + column(batch, "near_values")


@advantage("two_horizons", source="arXiv 1902.06865", needs={"critic", "near", "batch"})
def two_horizons(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    """The mean of gae at two discounts, whitened over the policy tokens of the batch."""
    far_N, near_N = reward_advantages(batch, config, config.lam), near_advantages(batch, config)
    return whiten((far_N + near_N) / 2, batch, context.gather)
