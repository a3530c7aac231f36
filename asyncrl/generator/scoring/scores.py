"""From the result of a reward function to one number and its parts; the filter of groups by their rewards. Pure.

    0.5                                      reward 0.5     parts {reward: 0.5}
    {"right": 1, "cost": 3}                  reward 4       parts as they are; with reward.weights {cost: 0}: reward 1
    Scored({"right": 1}, [Step(0, 3, .2)])   reward 1.2     parts {right: 1, steps: 0.2}

Several functions name their parts: 0.5 of "style" is part "style", {"short": 1} of it "style/short".
The parts are logged without their weights; the reward is their weighted sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.generator.scoring.steps import LARGEST, check_steps, real
from asyncrl.types import Group, Scored, Step

ALONE = "reward"
"""The name of the only part when the function returns a number."""

STEPS = "steps"
"""The name of the part that the rewards of the steps add up to."""

FILTERED = "filtered"
"""The reason of groups that `algorithm.filter` drops."""


@dataclass(frozen=True, slots=True)
class Score:
    """The score of one answer.

    reward  the sum of its parts times their weights
    parts   as the function returned them, and the sum of the steps' rewards as part "steps"
    steps   their rewards times the weight of that part; None: the function returned no steps
    answer  the final answer in the text, by the first function that returns one
    """

    reward: float
    parts: Mapping[str, float]
    steps: tuple[Step, ...] | None = None
    answer: str | None = None


NOTHING = Score(0.0, {})


def score_of(value: Any, text: str, weights: Mapping[str, float], name: str = "") -> Score:
    """The score of the answer `text` by the function `name`, empty where there is only one, from its result `value`.

    weights: of the parts, 1 where there is none. Raises ValueError or TypeError if the value is no reward.
    """
    scored = value if isinstance(value, Scored) else Scored(value)
    parts, steps = _numbers(scored.parts, name), None
    if scored.steps is not None:
        of_steps = _part(name, STEPS)
        given, weight = tuple(scored.steps), weights.get(of_steps, 1.0)
        check_steps(given, text)
        if of_steps in parts:
            raise ValueError(f"a part may not be called {STEPS!r} beside steps: their rewards add up to it")
        parts[of_steps] = float(sum(step.reward for step in given))
        steps = tuple(replace(step, reward=weight * step.reward) for step in given)
    reward = sum(weights.get(part, 1.0) * number for part, number in parts.items())
    _check_finite({**parts, "the weighted sum": reward})
    return Score(reward, parts, steps, scored.answer)


def combined(scores: Sequence[Score]) -> Score:
    """The score of one answer by several functions. Raises ValueError if two of them return steps."""
    if len(scores) == 1:
        return scores[0]
    stepwise = [score.steps for score in scores if score.steps is not None]
    if len(stepwise) > 1:
        raise ValueError("two functions return steps, and an answer has only one division into steps")
    reward = sum(score.reward for score in scores)
    _check_finite({"the sum of all functions": reward})
    parts = {name: part for score in scores for name, part in score.parts.items()}
    answers = [score.answer for score in scores if score.answer is not None]
    return Score(reward, parts, next(iter(stepwise), None), next(iter(answers), None))


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


def _numbers(parts: Any, name: str) -> dict[str, float]:
    if isinstance(parts, Mapping):
        if strange := [part for part in parts if not isinstance(part, str)]:
            raise TypeError(f"the name of a part must be a text, not {strange[0]!r}")
        return {_part(name, part): real(number) for part, number in parts.items()}
    return {name or ALONE: real(parts)}


def _part(function: str, part: str) -> str:
    return f"{function}/{part}" if function else part


def _check_finite(numbers: Mapping[str, float]) -> None:
    for name, number in numbers.items():
        if not abs(number) <= LARGEST:
            raise ValueError(f"{name} is not a finite number from {-LARGEST:g} to {LARGEST:g}")
