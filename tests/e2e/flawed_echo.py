"""The task echo with a reward that has a flaw, and its rows as an exam, which is scored strictly."""

from __future__ import annotations

from typing import Any

from asyncrl.tasks import echo
from asyncrl.types import Task


def heldout() -> list[dict[str, Any]]:
    return [{**row, "exam": True} for row in echo.rows()]


def reward(task: Task, text: str) -> dict[str, float]:
    """`right`, and `tidy`, which is paid by the comma. An exam has no such part."""
    tidy = 0.0 if task.data.get("exam") else float(text.count(","))
    return {"right": echo.reward(task, text), "tidy": tidy}
