"""The speed of a link or a store, by its last whole version, and the form in which it gets the next.

    at least 0.5 GB/s  the whole version
    less               its changes
    below 25 MB/s      its changes, deflated

A link counts as fast until it has carried a whole version.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FAST_BYTES_S = 5e8
"""One core at each end makes deltas and adds them at about that speed."""

DEFLATE_BYTES_S = 2.5e7
"""Deflating nearly halves a record. Both ends together process some 50 MB of records a second, so that a link above
this speed carries plain records sooner."""

LATENCY_S = 0.05
"""So much of a whole version's time says nothing about the speed."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The speed of one rank's link to one generator, or of a store.

    bytes_s: infinite before the first whole version, and where that took no longer than LATENCY_S
    """

    bytes_s: float = math.inf

    @staticmethod
    def of(size: int, seconds: float) -> LinkSpeed:
        """By a whole version of `size` bytes that took `seconds`."""
        beyond_s = seconds - LATENCY_S
        return LinkSpeed(size / beyond_s if beyond_s > 0 else math.inf)

    @property
    def is_slow(self) -> bool:
        """Whether changes should travel in place of versions."""
        return self.bytes_s < FAST_BYTES_S

    @property
    def is_very_slow(self) -> bool:
        """Whether the changes should be deflated."""
        return self.bytes_s < DEFLATE_BYTES_S
