"""Locks of a device for NCCL transfers: at most one sends from it, and one receives on it, at any time.

A kernel of a send or a receive keeps a part of its GPU busy until the other end's kernel runs too. NCCL demands that
operations of several communicators be launched in the same order everywhere ("Using multiple NCCL communicators
concurrently" in its guide). Pairs have no such order: every generator goes on at its own pace. Launched at will, two
learner ranks and two generators come to a standstill:

      rank 0: to A, then to B        A: from rank 1, then from rank 0       each first kernel waits for one
      rank 1: to B, then to A        B: from rank 0, then from rank 1       that is queued behind another first one

Here a transfer is launched only when both ends hold a lock of their device, so that no kernel waits for one that is
queued:

      source ── offer ─▸ target: takes its `receives` ── take ─▸ source: takes its `sends` ── go ─▸
      both launch, both wait on the host until it is done, both release their locks

No circle of waits can come about. A target that holds `receives` waits for the source's `sends`; a source that holds
`sends` waits for a transfer that both ends launch at once. A relay has one lock of each kind; its sends wait
for its receives, and these for its parent, in a tree. At most two such kernels run on one GPU, each with MOST_CTAS
blocks (`nccl_transport.py`), so that they and the collectives of training or decoding all fit beside each other.

An end whose peer has died releases its lock as soon as the connection hangs up. One whose peer stands still releases
it when the time for a transfer of that size is over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


class FairLock:
    """Held by one transfer at a time; those that wait get it in the order in which they came."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()  # the first holds the lock

    @contextmanager
    def held(self, seconds: float) -> Iterator[None]:
        """Raises TimeoutError if the lock does not become free."""
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
class TransferLocks:
    """Those of one device."""

    sends: FairLock = field(default_factory=FairLock)
    receives: FairLock = field(default_factory=FairLock)


_locks: dict[torch.device, TransferLocks] = {}
_lock = threading.Lock()


def transfer_locks(device: torch.device) -> TransferLocks:
    """The same for all channels of this process on that device."""
    with _lock:
        return _locks.setdefault(device, TransferLocks())
