"""Machines with ranks of one learner, or of one pool's process, watch each other: each the next one, through the store
in which their ranks have met.

    machine m    machine/m ◂── a count      machine/(m+1) ──▸ has it changed?      lost ──▸ has anybody lost one?
                 not for launch.rank_deadline_s: lost ◂── m+1

A collective would wait for a machine that is gone, or cut off, for ten minutes, and name nobody. A rank that waits in
one cannot raise, so its process ends at once; the supervisor of this machine's ranks then ends the others. A machine
that does not reach the queue for queue.deadline_s ends in the same way, and meanwhile knows nothing of the others.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from asyncrl.errors import AsyncRLError, DeadlineError, RankLostError
from asyncrl.system.rank_process import end_rank

log = logging.getLogger(__name__)

LOOKS = 15
"""In the time after which a machine counts as lost."""

LEFT = b"left"
LEAVES_S = 1.0
"""Longest that a rank waits at its end until the others can know of it: the queue may be gone."""


class WatchStore(Protocol):
    """The part of `QueueStore` that a watch needs."""

    def set(self, key: str, value: str) -> None: ...

    def find(self, key: str) -> bytes | None: ...


class MachineWatch:
    """What one machine of several knows of the next one.

    name: of the learner or the pool's process · machine: this one's number of `machines` · deadline_s: of a silence
    """

    def __init__(self, store: WatchStore, name: str, machine: int, machines: int, deadline_s: float) -> None:
        self._store, self._name, self.deadline_s = store, name, deadline_s
        self._machine, self._next = machine, (machine + 1) % machines
        self._count, self._silent_s = 0, 0.0
        self._sign: bytes | None = None

    def look(self, seconds: float) -> None:
        """Give a sign, and look for those of others. seconds: since the last look, as far as the queue answered

        Raises:
            RankLostError: A machine is lost; it may be this one.
            DeadlineError: The queue does not answer.
        """
        self._count += 1
        self._store.set(f"machine/{self._machine}", str(self._count))
        lost = self._store.find("lost")
        if lost is not None and lost.isdigit():
            raise self._lost(int(lost))
        sign = self._store.find(f"machine/{self._next}")
        self._silent_s = self._silent_s + seconds if sign == self._sign else 0.0
        self._sign = sign
        if sign != LEFT and self._silent_s >= self.deadline_s:
            self._store.set("lost", str(self._next))
            raise self._lost(self._next)

    def leave(self) -> None:
        """This machine's ranks end in order: it is not lost."""
        self._store.set(f"machine/{self._machine}", LEFT.decode())

    def _lost(self, machine: int) -> RankLostError:
        which = "this machine" if machine == self._machine else "a machine"
        return RankLostError(
            f"{self._name}: {which} (--node {machine}) gave the others no sign of life for {self.deadline_s:g} s "
            "(launch.rank_deadline_s), and the ranks here end. Remedy: start those of all machines again, with "
            "run.resume=true"
        )


def end_with(error: AsyncRLError) -> None:
    """End this rank's process, whatever it waits for."""
    print(f"asyncrl rank: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    end_rank(error.exit_code)


def begin_watch(watch: MachineWatch, end: Callable[[AsyncRLError], None] = end_with) -> Callable[[], None]:
    """Look LOOKS times in the watch's deadline, in a thread. Returns a function by which this machine leaves.

    end: called with a RankLostError or a DeadlineError
    """
    over, every_s = threading.Event(), watch.deadline_s / LOOKS

    def look() -> None:
        before = time.monotonic()
        while not over.wait(every_s):
            try:
                watch.look(min(time.monotonic() - before, 2 * every_s))
            except (RankLostError, DeadlineError) as error:
                end(error)
                return
            except AsyncRLError as error:  # e.g. the run is closed
                log.info("no look at the other machines: %s", error)
            before = time.monotonic()
        with suppress(AsyncRLError):
            watch.leave()

    def leave() -> None:
        over.set()
        thread.join(LEAVES_S)

    thread = threading.Thread(target=look, name="watch of the other machines", daemon=True)
    thread.start()
    return leave
