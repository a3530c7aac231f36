"""The offset of another process's clock from this one's, by requests that it has answered with its time. Pure.

      here   sent ────────────▸ received        offset is between  there − received  and  there − sent:
      there           there                     their middle, give or take half of the round trip

The shortest round trip wins, as in NTP (RFC 5905). Its error grows with its age, as clocks drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass

DRIFT = 50e-6
"""Seconds by which the clocks of two machines may drift apart in a second."""

ROUNDING_S = 1e-6
"""Of the times in a trace."""


@dataclass(slots=True)
class ClockOffset:
    """offset_s: the other clock is this one's plus that · error_s: at most, at the time `at`

    >>> clock = ClockOffset()
    >>> clock.observe(sent=10.0, there=17.01, received=10.04), round(clock.offset_s, 3), round(clock.error_s, 3)
    (True, 6.99, 0.02)
    >>> clock.observe(sent=11.0, there=18.3, received=11.6)  # a longer round trip says less
    False
    """

    offset_s: float = 0.0
    error_s: float = float("inf")
    at: float = 0.0

    def observe(self, sent: float, there: float, received: float) -> bool:
        """An answer that the other process gave at `there`, between `sent` and `received` here. Returns whether the
        offset is a new one."""
        error_s = max(received - sent, 0.0) / 2
        if error_s > self.error_s + DRIFT * (received - self.at):
            return False
        self.offset_s, self.error_s, self.at = there - (sent + received) / 2, error_s, received
        return True

    def settled(self) -> tuple[float, float]:
        """(offset, its error). An offset that is less than its error may be none at all: then it is 0, which keeps the
        processes of one machine exactly together."""
        if abs(self.offset_s) <= self.error_s + ROUNDING_S:
            return 0.0, self.error_s + abs(self.offset_s)
        return self.offset_s, self.error_s
