"""The learner's wait for the next group: its deadline begins anew while generators make progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.errors import AsyncRLError
from asyncrl.types import TRAIN

LOOKS = 4
"""How often the learner looks at the queue's status within its deadline."""


class GroupWait:
    """A wait that began at `began`. It is over `deadline_s` after the last look at which there was progress.

    Progress: since the look before, generators have made tokens, as their heartbeats report, and no task was dropped.
    Tokens of tasks that are dropped do not bring a group nearer.
    """

    def __init__(self, deadline_s: float, status: Callable[[], Mapping[str, Any]], began: float) -> None:
        self.began = began
        self._deadline_s, self._status = deadline_s, status
        self._since = self._looked_at = began
        self._tokens: Counter[str] | None = None  # of each generator, in its life so far
        self._dropped = 0

    def is_over(self, now: float) -> bool:
        if now - self._looked_at > self._deadline_s / LOOKS:
            self._looked_at = now
            if self._progressed():
                self._since = now
        return now - self._since > self._deadline_s

    def _progressed(self) -> bool:
        try:
            status = self._status()
        except AsyncRLError:
            return False
        before, dropped_before = self._tokens, self._dropped
        self._tokens = Counter({who: int(stats.get("tokens", 0)) for who, stats in status["workers"].items()})
        self._dropped = sum(status["streams"][TRAIN]["dropped_by_reason"].values())
        made = self._tokens - before if before is not None else None
        return bool(made) and self._dropped == dropped_before
