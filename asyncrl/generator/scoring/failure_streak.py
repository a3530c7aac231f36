"""When failures are no longer bad luck: of the tasks that one reward function was given, too many failed. Pure."""

from __future__ import annotations

from collections import deque

FIRST = 32
"""Tasks that a function may fail at before it has ever worked."""

LATER = 512
"""Tasks in a row that it may fail at once it has: a service that is away for a while comes back before that many are
lost. Also the tasks that a share of failures is of, at most."""

LEAST = 64
"""Tasks without which there is no such share."""


class FailureStreak:
    """The tasks that one function has worked or failed at.

    >>> streak = FailureStreak()
    >>> for ordinal in range(FIRST):
    ...     streak.failed(ordinal)
    >>> streak.hopeless, str(streak)
    (True, 'each of the first 32 tasks')
    >>> for ordinal in range(FIRST):
    ...     streak.worked()
    >>> streak.hopeless
    False
    """

    def __init__(self, most_share: float = 1.0) -> None:
        """most_share: of the last tasks that may fail."""
        self._most_share = most_share
        self._row: set[int] = set()
        self._recent: deque[bool] = deque(maxlen=LATER)  # whether each task failed
        self._worked = False

    def worked(self) -> None:
        """At all answers of a task."""
        self._worked = True
        self._row.clear()
        self._recent.append(False)

    def failed(self, ordinal: int) -> None:
        """ordinal: of the task. One that fails again before another works counts once."""
        if ordinal not in self._row:
            self._row.add(ordinal)
            self._recent.append(True)

    @property
    def hopeless(self) -> bool:
        return len(self._row) >= (LATER if self._worked else FIRST) or self.too_many

    @property
    def too_many(self) -> bool:
        """Whether it is the share of failures that is too large."""
        tasks = len(self._recent)
        return tasks >= LEAST and sum(self._recent) > self._most_share * tasks

    def __str__(self) -> str:
        """'each of the first 32 tasks', '40 of the last 64 tasks (62 %, more than max_failed_share=0.5)'"""
        if not self._worked:
            return f"each of the first {len(self._row)} tasks"
        failed, tasks = sum(self._recent), len(self._recent)
        if not self.too_many:
            return f"each of the last {len(self._row)} tasks"
        allowed = f"more than max_failed_share={self._most_share:g}"
        return f"{failed} of the last {tasks} tasks ({failed / tasks:.0%}, {allowed})"
