"""How the groups of one claim are shared out over the learner's ranks."""

from __future__ import annotations

from collections.abc import Iterable


def share_out(tokens: Iterable[int], ranks: int, max_tokens: int) -> list[int]:
    """The rank of each group of the longest prefix that fits `max_tokens` tokens a rank.

    Each group goes to the rank with the fewest tokens so far (the lowest on ties); the first that does not
    fit there ends the prefix. A group larger than `max_tokens` fits an empty rank, and fills it.

    >>> share_out([5, 3, 1, 9], ranks=2, max_tokens=8)
    [0, 1, 1]
    """
    loads = [0] * ranks
    homes: list[int] = []
    for size in tokens:
        home = loads.index(min(loads))
        if loads[home] and loads[home] + size > max_tokens:
            break
        loads[home] += size
        homes.append(home)
    return homes
