"""From what a reward function returns to one number and what it is made of. Pure.

    0.5                                      reward 0.5     parts {reward: 0.5}
    {"right": 1, "cost": 3}                  reward 4       parts as they are; with reward.weights {cost: 0}: reward 1
    Scored({"right": 1}, [Step(0, 3, .2)])   reward 1.2     parts {right: 1, steps: 0.2}

The parts are logged as they came; the reward is their weighted sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.generator.steps import LARGEST, check_steps
from asyncrl.types import Scored, Step

ALONE = "reward"
"""The name of the only part when the function returns a number."""

STEPS = "steps"
"""The name of the part that the rewards of the steps add up to."""


@dataclass(frozen=True, slots=True)
class Score:
    """What one answer earned.

    reward  the sum of its parts times their weights
    parts   as the function gave them, and the sum of the steps' rewards as part "steps"
    steps   their rewards times the weight of that part; none: the function speaks of no steps
    """

    reward: float
    parts: Mapping[str, float]
    steps: tuple[Step, ...] | None = None


def score_of(value: Any, text: str, weights: Mapping[str, float]) -> Score:
    """value: what the function returned for `text`. weights: of the parts, 1 where there is none.

    Raises ValueError or TypeError, with what is wrong, for anything that is no reward.
    """
    scored = value if isinstance(value, Scored) else Scored(value)
    parts, steps = _numbers(scored.parts), None
    if scored.steps is not None:
        told, weight = tuple(scored.steps), weights.get(STEPS, 1.0)
        check_steps(told, text)
        if STEPS in parts:
            raise ValueError(f"a part may not be called {STEPS!r} beside steps: their rewards add up to it")
        parts[STEPS] = float(sum(step.reward for step in told))
        steps = tuple(replace(step, reward=weight * step.reward) for step in told)
    reward = sum(weights.get(name, 1.0) * part for name, part in parts.items())
    for name, number in {**parts, "the weighted sum": reward}.items():
        if not abs(number) <= LARGEST:
            raise ValueError(f"{name} is not a finite number")
    return Score(reward, parts, steps)


def _numbers(parts: Any) -> dict[str, float]:
    named = parts if isinstance(parts, Mapping) else {ALONE: parts}
    return {str(name): float(part) for name, part in named.items()}
