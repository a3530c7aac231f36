"""The filter of groups that teach nothing, which are dropped before they are sent (`algorithm.filter`). Pure."""

from __future__ import annotations

from asyncrl.config.schema import Config
from asyncrl.types import Group

FILTERED = "filtered"
"""The reason of groups that `algorithm.filter` drops."""


def passes_filter(group: Group, config: Config) -> bool:
    """Whether `group` is trained on: with 'no_spread', if the rewards of its rollouts differ.

    For gdpo, which compares the parts of a reward one by one, if any part that counts differs: their sum may not.
    """
    if config.algorithm.filter == "none":
        return True
    compared = [group.rewards]
    if config.algorithm.built_in_advantage == "gdpo":
        weights = config.reward.weights
        compared += [part for name, part in group.reward_parts.items() if weights.get(name, 1.0) != 0]
    return any(bool((rewards_n != rewards_n[0]).any()) for rewards_n in compared)
