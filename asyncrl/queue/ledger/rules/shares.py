"""The distribution of one claim's groups over the learner's ranks: by their cost, within the limit of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class GroupCost(NamedTuple):
    """The load of one group on the rank that trains on it. cost: in any unit, alike for all groups."""

    tokens: int
    cost: float


def share_out(loads: Iterable[GroupCost], ranks: int, max_tokens: int) -> list[int]:
    """The rank of each group of the longest prefix that fits `max_tokens` tokens a rank.

    The prefix: each group in turn goes to the rank with the least cost so far (the lowest on ties); the first that
    does not fit there ends it. A group larger than `max_tokens` fits an empty rank, and fills it. Then the same groups
    are shared out dearest first, which levels them better (Graham 1969, the LPT rule: within 4/3 of the best), and the
    better of the two stays.

    >>> share_out([GroupCost(5, 5), GroupCost(3, 3), GroupCost(1, 1), GroupCost(9, 9)], ranks=2, max_tokens=8)
    [0, 1, 1]
    >>> share_out([GroupCost(n, n) for n in (1, 2, 2, 5)], ranks=2, max_tokens=8)
    [1, 1, 1, 0]
    """
    taken: list[GroupCost] = []
    homes: list[int] = []
    costs, tokens = [0.0] * ranks, [0] * ranks
    for load in loads:
        home = costs.index(min(costs))
        if tokens[home] and tokens[home] + load.tokens > max_tokens:
            break
        costs[home] += load.cost
        tokens[home] += load.tokens
        homes.append(home)
        taken.append(load)
    if ranks == 1:
        return homes
    levelled = _dearest_first(taken, ranks, max_tokens)
    if levelled is not None and dearest(taken, levelled, ranks) < max(costs):
        return levelled
    return homes


def dearest(loads: Sequence[GroupCost], homes: Sequence[int], ranks: int) -> float:
    """The cost of the rank that has most."""
    costs = [0.0] * ranks
    for load, home in zip(loads, homes, strict=True):
        costs[home] += load.cost
    return max(costs)


def _dearest_first(loads: Sequence[GroupCost], ranks: int, max_tokens: int) -> list[int] | None:
    """The ranks by descending cost, or None if the groups do not fit that way."""
    costs, tokens, homes = [0.0] * ranks, [0] * ranks, [0] * len(loads)
    for item in sorted(range(len(loads)), key=lambda item: -loads[item].cost):
        fits = [
            rank
            for rank in range(ranks)
            if not tokens[rank] or tokens[rank] + loads[item].tokens <= max_tokens
        ]
        if not fits:
            return None
        homes[item] = min(fits, key=costs.__getitem__)
        costs[homes[item]] += loads[item].cost
        tokens[homes[item]] += loads[item].tokens
    return homes
