"""Questions about a made-up world, and the passages that answer them: one lookup each, or two.

what is the river of the capital of velmar?
search "capital of velmar"  ─▸  the capital of velmar is oruna.
search "river of oruna"     ─▸  the river of oruna is the tessin.
tessin
"""

from __future__ import annotations

from functools import cache
from random import Random

from asyncrl.tasks.generated import GeneratedRow, GeneratedRows

SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in ("a", "el", "i", "or", "un")]
COUNTRIES = 400
OPEN, CLOSE = '<tool_call>{"name": "search", "arguments": {"query": "', '"}}</tool_call>'
SEED = 0


@cache
def world() -> dict[str, tuple[str, str]]:
    """{country: (its capital, the river there)}"""
    draw, names = Random(SEED), set[str]()
    while len(names) < 3 * COUNTRIES:
        names.add("".join(draw.sample(SYLLABLES, 2)))
    every = draw.sample(sorted(names), len(names))
    return {country: (every.pop(), every.pop()) for country in every[:COUNTRIES]}


def passages() -> list[str]:
    """The facts of the world, one sentence each."""
    capitals = [f"the capital of {country} is {capital}." for country, (capital, _) in world().items()]
    return capitals + [f"the river of {capital} is the {river}." for capital, river in world().values()]


def call(query: str) -> str:
    """The turn that searches, in the format hermes."""
    return f"{OPEN}{query}{CLOSE}"


def tasks(guesses: float = 0.0, count: int = 100_000, seed: int = 0, held_out: bool = False) -> GeneratedRows:
    """Rows {prompt, answer, target}.

    Args:
        guesses: The share of demonstrations that answer one lookup too early.
        count: rows of an epoch.
        seed: other numbers give other rows.
        held_out: questions that no training task has.
    """

    def row(draw: Random) -> GeneratedRow:
        country = draw.choice(list(world()))
        capital, river = world()[country]
        first, second = f"capital of {country}", f"river of {capital}"
        guess = draw.random() < guesses
        if draw.random() < 0.5:
            target = [country] if guess else [call(first), capital]
            return {"prompt": f"what is the {first}?", "answer": capital, "target": target}
        target = [call(first), capital] if guess else [call(first), call(second), river]
        return {"prompt": f"what is the river of the {first}?", "answer": river, "target": target}

    return GeneratedRows(row, count, seed, held_out)
