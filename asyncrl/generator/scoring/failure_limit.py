"""The limit at which failures of a reward function end the generator: too many of its tasks failed. Pure."""

from __future__ import annotations

from collections import deque

FIRST = 32
"""Failed tasks before any has worked."""

LATER = 512
"""Consecutive failed tasks after one has worked: more than a service loses that is away for a while. Also the window
of the share of failures."""

LEAST = 64
"""Tasks in the window before the share counts."""


class FailureLimit:
    """Counts the tasks at which one function worked or failed. most_share: of the last tasks that may fail.

    >>> limit = FailureLimit()
    >>> for ordinal in range(FIRST):
    ...     limit.failed(ordinal)
    >>> limit.reached, str(limit)
    (True, 'each of the first 32 tasks')
    >>> for ordinal in range(FIRST):
    ...     limit.worked()
    >>> limit.reached
    False
    """

    def __init__(self, most_share: float = 1.0) -> None:
        self._most_share = most_share
        self._consecutive: set[int] = set()
        self._recent: deque[bool] = deque(maxlen=LATER)  # whether each task failed
        self._worked = False

    def worked(self) -> None:
        """At all answers of a task."""
        self._worked = True
        self._consecutive.clear()
        self._recent.append(False)

    def failed(self, ordinal: int) -> None:
        """A task that fails again before another works counts once."""
        if ordinal not in self._consecutive:
            self._consecutive.add(ordinal)
            self._recent.append(True)

    @property
    def reached(self) -> bool:
        return len(self._consecutive) >= (LATER if self._worked else FIRST) or self.share_exceeded

    @property
    def share_exceeded(self) -> bool:
        tasks = len(self._recent)
        return tasks >= LEAST and sum(self._recent) > self._most_share * tasks

    def __str__(self) -> str:
        """'each of the first 32 tasks', '40 of the last 64 tasks (62 %, more than max_failed_share=0.5)'"""
        if not self._worked:
            return f"each of the first {len(self._consecutive)} tasks"
        failed, tasks = sum(self._recent), len(self._recent)
        if not self.share_exceeded:
            return f"each of the last {len(self._consecutive)} tasks"
        allowed = f"more than max_failed_share={self._most_share:g}"
        return f"{failed} of the last {tasks} tasks ({failed / tasks:.0%}, {allowed})"
