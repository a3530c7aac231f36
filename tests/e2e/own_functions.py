"""Tasks and rewards of runs under test, in a file of their own: they are imported where nothing of the tests can be."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.types import Task


def half_flat(task: Task, text: str) -> float:
    """Every second task earns all its rollouts the same."""
    return 0.0 if task.ordinal % 2 else sum(int(c) for c in text if c.isdigit()) / 9


def length(task: Task, text: str) -> float:
    """Of a model that can do nothing yet, answers differ in this."""
    return float(len(text))


def four_tasks() -> Iterator[dict[str, str]]:
    """Yields; the run ends with its last task."""
    for digit in range(6):
        yield {"prompt": f"{digit}+0=", "answer": str(digit)}


def half_right(task: Task, text: str) -> dict[str, float]:
    return {"length": len(text) / 100, "answer": float(text == task.data["answer"])}
