"""Which NCCL transfer may run on a device now: at most one that leaves it, and one that comes to it.

A kernel of a send or a receive keeps a part of its GPU busy until the other end's kernel runs too. NCCL demands that
operations of several communicators be launched in the same order everywhere ("Using multiple NCCL communicators
concurrently" in its guide). Pairs have no such order: every generator goes on at its own pace. Launched at will, two
learner ranks and two generators come to a standstill:

      rank 0: to A, then to B        A: from rank 1, then from rank 0       each first kernel waits for one
      rank 1: to B, then to A        B: from rank 0, then from rank 1       that is queued behind another first one

Here a transfer is launched only when both ends hold their lane, so that no kernel waits for one that is queued:

      source ── offer ─▸ target: gets its lane of arrivals ── take ─▸ source: gets its lane of departures ── go ─▸
      both launch, both wait on the host until it is done, both leave their lanes

No circle of waits can come about. Who holds a lane of arrivals waits for a lane of departures; who holds a lane of
departures waits for a transfer that both ends launch at once. A relay has one lane of each kind; its departures wait
for its arrivals, and these for its parent, in a tree. At most two such kernels run on one GPU, each with MOST_CTAS
blocks (`nccl_transport.py`), so that they and the collectives of training or decoding all fit beside each other.

A pair whose peer has died leaves its lanes as soon as the connection hangs up. One whose peer stands still leaves
them when the time for a transfer of that size is over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


class Lane:
    """Held by one transfer at a time; those that wait get it in the order in which they came."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()  # the first holds the lane

    @contextmanager
    def held(self, seconds: float) -> Iterator[None]:
        """Raises TimeoutError if the lane does not become free."""
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            if not self._changed.wait_for(lambda: self._queue[0] is ticket, max(0.0, seconds)):
                self._queue.remove(ticket)
                raise TimeoutError
        try:
            yield
        finally:
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Lanes:
    """Those of one device."""

    departures: Lane = field(default_factory=Lane)
    arrivals: Lane = field(default_factory=Lane)


_lanes: dict[torch.device, Lanes] = {}
_lock = threading.Lock()


def lanes_of(device: torch.device) -> Lanes:
    """The same for all channels of this process on that device."""
    with _lock:
        return _lanes.setdefault(device, Lanes())
