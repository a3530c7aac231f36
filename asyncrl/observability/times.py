"""Times as people read them."""

from __future__ import annotations

import time


def duration(seconds: float) -> str:
    """
    >>> duration(75), duration(3700)
    ('1 min 15 s', '1 h 1 min')
    """
    whole = max(0, round(seconds))
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def clock(moment: float) -> str:
    """A moment, in seconds since 1970, as the hour, minute and second of this machine's zone."""
    return time.strftime("%H:%M:%S", time.localtime(moment))
