"""Machines with ranks of one learner, or of one pool's process, watch each other: each the next one, through the store
in which their ranks have met.

    machine m    machine/m ◂── a count      machine/(m+1) ──▸ has it changed?      lost ──▸ has anybody lost one?
                 not for the deadline: lost ◂── m+1

A collective would wait for a machine that is gone, or cut off, for ten minutes, and name nobody. A rank that waits in
one cannot raise, so its process ends at once; the supervisor of this machine's ranks then ends the others. A machine
that does not reach the queue knows nothing of the others, and waits.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from asyncrl.errors import AsyncRLError, RankLostError
from asyncrl.system.rank_process import end_rank

log = logging.getLogger(__name__)

LOOKS = 15
"""In the time after which a machine counts as lost, at least."""

LONGEST_S = 4.0
"""Between two looks. The connection to the queue is closed when it is idle for longer."""

LEFT = "left"
LEAVES_S = 1.0
"""Longest that a rank waits at its end until the others can know of it: the queue may be gone."""


class WatchStore(Protocol):
    """The part of `QueueStore` that a watch needs."""

    def set(self, key: str, value: str) -> None: ...

    def find(self, key: str) -> bytes | None: ...


class MachineWatch:
    """One machine of several: it gives signs of life, and watches the next one.

    name: of the learner or the pool's process · machine: this one's number of `machines` · deadline_s: of a silence
    """

    def __init__(self, store: WatchStore, name: str, machine: int, machines: int, deadline_s: float) -> None:
        self._store, self._name, self.deadline_s = store, name, deadline_s
        self._machine, self._next = machine, (machine + 1) % machines
        self._count, self._silent_s, self._sign = 0, 0.0, ""

    def look(self, seconds: float) -> None:
        """Give a sign, and look for those of others. seconds: since the last look, as far as the queue answered

        Raises:
            RankLostError: A machine is lost; it may be this one.
            AsyncRLError: The queue does not answer, or refuses.
        """
        self._count += 1
        self._store.set(f"machine/{self._machine}", f"{self._count} {socket.gethostname()}")
        self._check_lost()
        sign = self._find(f"machine/{self._next}")
        self._silent_s = self._silent_s + seconds if sign == self._sign else 0.0
        self._sign = sign
        if sign != LEFT and self._silent_s >= self.deadline_s:
            self._store.set("lost", f"{self._next} {sign.partition(' ')[2]}")
            self._check_lost()

    def leave(self) -> None:
        """This machine's ranks end in order: it is not lost."""
        self._store.set(f"machine/{self._machine}", LEFT)

    def _check_lost(self) -> None:
        number, _, host = self._find("lost").partition(" ")
        if not number.isdigit():
            return
        which = "this machine" if int(number) == self._machine else "a machine"
        named = f"--node {number}, host {host}" if host else f"--node {number}"
        raise RankLostError(
            f"{self._name}: {which} ({named}) gave the others no sign of life for {self.deadline_s:g} s "
            "(launch.rank_deadline_s, and queue.deadline_s at least), and the ranks here end. Remedy: start those of "
            "all machines again, with run.resume=true"
        )

    def _find(self, key: str) -> str:
        return (self._store.find(key) or b"").decode(errors="replace")


def end_with(error: AsyncRLError) -> None:
    """End this rank's process, whatever it waits for."""
    print(f"asyncrl rank: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    end_rank(error.exit_code)


def begin_watch(watch: MachineWatch, end: Callable[[RankLostError], None] = end_with) -> Callable[[], None]:
    """Look again and again, in a thread. Returns a function by which this machine leaves.

    end: called once a machine is lost
    """
    over, every_s = threading.Event(), min(watch.deadline_s / LOOKS, LONGEST_S)

    def look() -> None:
        before, failed = time.monotonic(), False
        while not over.wait(every_s):
            try:
                watch.look(min(time.monotonic() - before, 2 * every_s))
                failed = False
            except RankLostError as error:
                end(error)
                return
            except Exception as error:  # without this thread, the others would take this machine for lost
                if not failed:
                    log.warning("whether the other machines live cannot be seen: %s", error)
                failed = True
            before = time.monotonic()
        with suppress(Exception):  # the run is over; the queue may be, too
            watch.leave()

    def leave() -> None:
        over.set()
        thread.join(LEAVES_S)

    thread = threading.Thread(target=look, name="watch of the other machines", daemon=True)
    thread.start()
    return leave
