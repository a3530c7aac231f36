"""A reward that spreads: learners would leave out groups without any."""

from __future__ import annotations

from asyncrl.types import Task


def reward(task: Task, text: str) -> float:
    """1 for every other length of answer."""
    return float(len(text) % 2)
