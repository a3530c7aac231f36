"""The time of leases. Pure: the times of a clock in, the time of leases out."""

from __future__ import annotations

from dataclasses import dataclass

STEP_S = 1.0
"""A pause of the broker counts for no more."""


@dataclass(slots=True)
class LeaseClock:
    """Goes on only while the broker serves: a pause between two looks at its sockets counts for `STEP_S` at most.

    A broker that was stopped, or waited for its disk, has not read the renewals of that time. Leases outlast the pause.

    >>> clock = LeaseClock()
    >>> clock.advance(100.0), clock.advance(100.5), clock.advance(160.0), clock.advance(160.25)
    (100.0, 100.5, 101.5, 101.75)
    """

    time: float = 0.0
    seen: float | None = None

    @classmethod
    def at(cls, now: float) -> LeaseClock:
        return cls(now, now)

    def advance(self, now: float) -> float:
        """The time of leases at `now`. A clock that was set back does not move it."""
        if self.seen is None:
            self.time = now
        else:
            self.time += min(max(now - self.seen, 0.0), STEP_S)
        self.seen = now
        return self.time
