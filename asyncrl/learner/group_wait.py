"""The learner's wait for the next group: its deadline begins anew while generators make progress. The error after a
wait in vain has the queue's counts of tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.errors import AsyncRLError
from asyncrl.telemetry.status import UNDER_WAY
from asyncrl.types import TRAIN

LOOKS = 4
"""How often the learner looks at the queue's status within its deadline."""

TOO_FLAT = (
    "nearly all groups have equal rewards: give tasks that are solved now and then, raise batch.group_size, "
    "or set algorithm.filter=none"
)


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

    def task_counts(self) -> str:
        """The queue's counts of the stream's tasks, for the error after a wait in vain."""
        try:
            status = self._status()
            return counts_text(status["streams"][TRAIN]) + _calls_under_way(status["workers"])
        except AsyncRLError as error:
            return f"the queue does not say why ({error})"


def counts_text(counts: Mapping[str, Any]) -> str:
    """The queue's counts of a stream, with a hint where most tasks were dropped for one common reason."""
    places = ", ".join(f"{counts[place]} {place}" for place in ("pending", "leased", "ready", "trained"))
    reasons = sorted(counts["dropped_by_reason"].items(), key=lambda entry: -entry[1])
    dropped = ", ".join(f"{count} {reason}" for reason, count in reasons)
    text = f"tasks: {places}; dropped: {dropped or 'none'}"
    stages = counts.get("stages", {}).items()
    waiting = [f"{stage['waiting'] + stage['leased']} {name}" for name, stage in stages]
    text += f"; groups that wait for a pool: {', '.join(waiting)}" if waiting else ""
    return f"{text}; {TOO_FLAT}" if reasons and reasons[0][0] == "filtered" else text


def _calls_under_way(workers: Mapping[str, Mapping[str, Any]]) -> str:
    """The reward functions that generators and pools wait for, by their last reports."""
    calls = Counter[str]()
    for stats in workers.values():
        calls.update(
            {name.removeprefix(UNDER_WAY): n for name, n in stats.items() if name.startswith(UNDER_WAY) and n}
        )
    named = ", ".join(f"{count} of {function}" for function, count in calls.most_common())
    return f"; reward calls under way: {named}" if named else ""
