"""Arithmetic that takes a program: questions, and code that computes the answers.

the sum of the multiples of 7 below 2143     print(sum(range(0, 2143, 7)))
"""

from __future__ import annotations

from random import Random

from asyncrl.tasks.generated import GeneratedRow, GeneratedRows

KINDS = (
    ("the product of {} and {}", "print({} * {})", lambda a, b: a * b),
    ("the remainder of {} by {}", "print({} % {})", lambda a, b: a % b),
    (
        "the sum of the multiples of {1} below {0}",
        "print(sum(range(0, {}, {})))",
        lambda a, b: sum(range(0, a, b)),
    ),
    (
        "the sum of the numbers from {1} to {0}",
        "print(sum(range({1}, {0} + 1)))",
        lambda a, b: sum(range(b, a + 1)),
    ),
)


def tasks(
    digits: int = 4, guesses: float = 0.0, count: int = 100_000, seed: int = 0, held_out: bool = False
) -> GeneratedRows:
    """Rows {prompt, answer, target}.

    Args:
        digits: of one number, at least 2; the other one has 2.
        guesses: the share of demonstrations that answer without a program, with a number of the question.
        count: rows of an epoch.
        seed: other numbers give other rows.
        held_out: questions that no training task has.
    """

    def row(draw: Random) -> GeneratedRow:
        question, code, computed = draw.choice(KINDS)
        numbers = sorted(
            (draw.randrange(10 ** (digits - 1), 10**digits), draw.randrange(10, 100)), reverse=True
        )
        answer = str(computed(*numbers))
        program = f"```python\n{code.format(*numbers)}\n```"
        target = [str(numbers[0])] if draw.random() < guesses else [program, answer]
        return {"prompt": question.format(*numbers), "answer": answer, "target": target}

    return GeneratedRows(row, count, seed, held_out)
