"""The smallest task: repeat a digit three times. A random policy of 15,000 parameters learns it in seconds; the best
reward is 1.

    prompt   7=
    target   777

    python -m asyncrl.tasks.echo runs/echo/model
"""

from __future__ import annotations

import argparse
from typing import Any

from asyncrl.tasks.addition import write_model_folder
from asyncrl.types import Scored, Step, Task

LENGTH = 3
COSTLY = "9"


def rows() -> list[dict[str, Any]]:
    """One row per digit."""
    return [{"prompt": f"{digit}=", "target": str(digit) * LENGTH} for digit in range(10)]


def reward(task: Task, text: str) -> float:
    """The share of the three places that hold the digit."""
    return sum(found == digit for found, digit in zip(text, task.data["target"], strict=False)) / LENGTH


def stepwise(task: Task, text: str) -> Scored:
    """`reward` for each place: a step is one place, and its state the place's number."""
    digit = task.data["target"][0]
    steps = [Step(at, at + 1, float(found == digit) / LENGTH, at) for at, found in enumerate(text[:LENGTH])]
    return Scored(0.0, steps)


def with_cost(task: Task, text: str) -> dict[str, float]:
    """`reward` as the part 'right'; the part 'cost' is the share of places that hold a 9. For safe_rlhf.

    With a limit of 0 the best policy repeats every digit but 9: reward 0.9, cost 0.
    """
    return {"right": reward(task, text), "cost": text[:LENGTH].count(COSTLY) / LENGTH}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write a folder with a tiny model's configuration and tokenizer."
    )
    parser.add_argument("folder")
    write_model_folder(parser.parse_args().folder, hidden_size=32, layers=1)


if __name__ == "__main__":
    main()
