"""When failures in a row are no longer bad luck: a function that has a mistake in it fails at every task. Pure."""

from __future__ import annotations

FIRST = 32
"""Tasks that a function may fail at before it has ever worked."""

LATER = 512
"""Tasks in a row that it may fail at once it has: a service that is away for a while comes back before that many are
lost."""


class Streak:
    """The tasks that one function failed at since it last worked.

    >>> streak = Streak()
    >>> for ordinal in range(FIRST):
    ...     streak.failed(ordinal)
    >>> streak.hopeless
    True
    """

    def __init__(self) -> None:
        self._failed: set[int] = set()
        self._worked = False

    def __len__(self) -> int:
        return len(self._failed)

    def worked(self) -> None:
        self._worked = True
        self._failed.clear()

    def failed(self, ordinal: int) -> None:
        """ordinal: of the task. Answers of one task count once."""
        self._failed.add(ordinal)

    @property
    def hopeless(self) -> bool:
        return len(self) >= (LATER if self._worked else FIRST)

    def __str__(self) -> str:
        """'each of the first 32 tasks'"""
        return (
            f"each of the last {len(self)} tasks" if self._worked else f"each of the first {len(self)} tasks"
        )
