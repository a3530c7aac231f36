"""Rewards that runs under test name by file: nothing of the tests themselves can be imported where they are called."""

from __future__ import annotations

from asyncrl.types import Task


def half_flat(task: Task, text: str) -> float:
    """Every second task earns all its rollouts the same."""
    return 0.0 if task.ordinal % 2 else sum(int(c) for c in text if c.isdigit()) / 9


def length(task: Task, text: str) -> float:
    """Of a model that can do nothing yet, answers differ in this."""
    return float(len(text))
