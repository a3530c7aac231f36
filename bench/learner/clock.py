"""What time is read off: the wall's; or this process's own on a machine that others use too, which leaves out waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
