"""Scores of a policy from its answers to held-out tasks. Pure.

Axes:  T tasks · K answers of each
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np

from asyncrl.types import ANSWER, UNSCORED, Array, Group, Version

PREFIX = "eval/"
"""Prefix of the metrics of an evaluation."""

ACCURACY = f"{PREFIX}accuracy"
"""The mean reward of the tasks of `evaluation.source`."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """scores: eval/accuracy, eval/pass@8, … (`scores` below), of a set with a name eval/<name>/accuracy, …;
    under the policy of `version` (or a newer one, if the generators had moved on before they began)."""

    version: Version
    scores: Mapping[str, float]


def scores(rewards_TK: Array, answers_TK: Array, unscored_TK: Array, pass_reward: float) -> dict[str, float]:
    """accuracy  mean@K: the mean reward
    pass@k    for K and the powers of two below, where K > 1
    maj@K     where K > 1 and some rollout has an answer
    unscored  of T·K answers those that count as 0 because they could not be had or scored

    answers_TK: numbers of a task's answers, 0: the rollout has none. unscored_TK: 1 or 0. A rollout is right from
    `pass_reward` on.
    """
    result = {"accuracy": float(rewards_TK.mean()), "unscored": float(unscored_TK.sum())}
    samples = rewards_TK.shape[1]
    if samples == 1:
        return result
    right_TK = rewards_TK >= np.float32(pass_reward)
    powers_of_two = (1 << i for i in range(1, samples.bit_length()) if 1 << i < samples)
    for k in (*powers_of_two, samples):
        result[f"pass@{k}"] = pass_at(right_TK, k)
    if answers_TK.any():
        result[f"maj@{samples}"] = majority_at(right_TK, answers_TK)
    return result


def pass_at(right_TK: Array, k: int) -> float:
    """The chance that one of k answers of a task is right, without bias from K ≥ k of them: the mean of
    1 − C(K−c, k) / C(K, k), c of K right (Chen et al., Evaluating Large Language Models Trained on Code, 2021, eq. 1).

    >>> pass_at(np.array([[True, False, False, False]]), 2)
    0.5
    """
    samples = right_TK.shape[1]
    by_right = [1 - comb(samples - right, k) / comb(samples, k) for right in range(samples + 1)]
    return float(np.mean([by_right[right] for right in right_TK.sum(1)]))


def majority_at(right_TK: Array, answers_TK: Array) -> float:
    """The share of tasks whose most frequent answer is right; answers that tie share the task. Rollouts without an
    answer do not vote; a task without votes counts as 0.

    Wang et al., Self-Consistency Improves Chain of Thought Reasoning in Language Models, 2023.
    """
    return float(np.mean([_majority(*task) for task in zip(right_TK, answers_TK, strict=True)]))


def of_group(group: Group, samples: int) -> tuple[Array, Array, Array]:
    """(rewards [T, K], answers [T, K], unscored [T, K]) of a chunk of an evaluation."""
    none = np.zeros_like(group.rewards)
    parts = [group.reward_parts.get(part, none).reshape(-1, samples) for part in (ANSWER, UNSCORED)]
    return group.rewards.reshape(-1, samples), parts[0], parts[1]


def _majority(right_K: Array, answers_K: Array) -> float:
    votes: Counter[Any] = Counter(answers_K[answers_K > 0].tolist())
    if not votes:
        return 0.0
    most = max(votes.values())
    return float(np.mean([right_K[answers_K == answer].mean() for answer, n in votes.items() if n == most]))
