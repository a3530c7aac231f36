"""A sequence that is continued for as many steps as the task says: answers differ much in length.

    prompt   53*03=
    answer   0220,0127,0074      the steps that are left and the next number, 21 · x + 7 modulo 100

A task has k or more steps with a probability of about 1/k, and 30 at most: half of the answers have one step, one in
fifty has 20 or more. A step takes five tokens of the model of `addition`, the comma or the end token among them. The
sequence visits all hundred numbers before one comes again, and so a long answer needs many of them right.
"""

from __future__ import annotations

from random import Random
from typing import Any

MOST_STEPS = 30


def tasks(least_steps: int = 1, count: int = 20_000, seed: int = 0) -> list[dict[str, Any]]:
    """Rows {prompt, answer, target}. There are 3,000 different ones: none is held out.

    Args:
        least_steps: of an answer.
        count: rows of an epoch.
        seed: other numbers give other rows.
    """
    draw = Random(seed)
    return [problem(draw.randrange(100), _steps(draw, least_steps)) for _ in range(count)]


def problem(number: int, steps: int) -> dict[str, Any]:
    """
    >>> problem(53, 3)
    {'prompt': '53*03=', 'answer': '0220,0127,0074', 'target': '0220,0127,0074'}
    """
    prompt, found = f"{number:02d}*{steps:02d}=", []
    for left in reversed(range(steps)):
        number = (21 * number + 7) % 100
        found.append(f"{left:02d}{number:02d}")
    return {"prompt": prompt, "answer": ",".join(found), "target": ",".join(found)}


def _steps(draw: Random, least: int) -> int:
    """k or more with a probability of 1/k, but between `least` and MOST_STEPS."""
    while not least <= (steps := int(1 / (1 - draw.random()))) <= MOST_STEPS:
        pass
    return steps
