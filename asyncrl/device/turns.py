"""Devices that processes of one machine take turns on, with `placement.colocate`: generators, and ranks of the learner.

    take   lock ──▸ fetch: contents back onto the device        whoever uses the device
    offer  somebody waits ──▸ park: contents to the host ──▸ unlock    whoever has nothing to do

    RUN/turns/HOST-0.lock      locked by the process whose turn it is; it has the process's name
    RUN/turns/HOST-0.waiting   locked by the one that waits for its turn

The kernel frees the locks of a process however it ends.
"""

from __future__ import annotations

import fcntl
import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from asyncrl.device import accelerator
from asyncrl.device.visible import VARIABLES
from asyncrl.errors import DeadlineError

FOLDER, TURN = "turns", "its turn on the device"
LOOK_S = 0.02
"""Between two looks at a lock that another process has."""


def run_locks(run_dir: str, name: str) -> Path:
    """The folder of a run's locks."""
    return Path(run_dir) / name / FOLDER


def devices_here() -> list[str]:
    """The accelerators that this process sees, by the names that the shell has for them; none on a CPU."""
    named = next((value for name in VARIABLES if (value := os.environ.get(name))), None)
    return named.split(",") if named is not None else [str(index) for index in range(accelerator.count())]


def dealt(index: int, count: int, others: int) -> list[str]:
    """Stand-ins for devices on a CPU, dealt out to `count` processes that take turns with `others` ones. Each of the
    fewer has several.

    >>> dealt(0, 1, 2), dealt(1, 2, 1)
    (['cpu0', 'cpu1'], ['cpu1'])
    """
    return [f"cpu{device}" for device in range(index, max(count, others), count)]


class DeviceLock:
    """The locks of some devices, which this process has all or none of.

    Args:
        folder: of the run's locks.
        devices: their names; processes that take turns have the same ones.
        who: this process, for the errors of others.
    """

    def __init__(self, folder: Path, devices: Sequence[str], who: str) -> None:
        self._folder, self._who = folder, who
        self._names = [f"{platform.node()}-{device}" for device in sorted(devices)]
        self._held: list[int] = []
        self._taken = ""  # a device that another process had at the last try
        self._passed_on = False

    @property
    def held(self) -> bool:
        return bool(self._held)

    def take(self, deadline_s: float, stopping: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the turn. Returns False if `stopping` is true first. Raises DeadlineError."""
        until = time.monotonic() + deadline_s
        waiting = self._opened("waiting")
        try:
            while not self._try(waiting):
                if stopping():
                    return False
                if time.monotonic() > until:
                    remedy = "or raise placement.turn_deadline_s"
                    raise DeadlineError(self._who, self._holder(), TURN, deadline_s, remedy)
                time.sleep(LOOK_S)
        finally:
            _close(waiting)
        return True

    def wanted(self) -> bool:
        """Whether another process waits for a device that this one has."""
        return self.held and self._is_waited_for()

    def give(self) -> None:
        """Let the next process have its turn. One that waits is first, even if this one wants it back at once."""
        self._passed_on = self.wanted()
        _close(self._held)
        self._held = []

    def _try(self, waiting: Sequence[int]) -> bool:
        if self._passed_on and self._is_waited_for():
            return False
        self._passed_on = False
        for file in waiting:
            _lock(file)
        locks = self._opened("lock")
        self._taken = next(
            (name for name, file in zip(self._names, locks, strict=True) if not _lock(file)), ""
        )
        if self._taken:
            _close(locks)
            return False
        for file in locks:
            os.truncate(file, 0)
            os.pwrite(file, self._who.encode(), 0)
        self._held = locks
        return True

    def _is_waited_for(self) -> bool:
        files = self._opened("waiting")
        try:
            return not all(_lock(file) for file in files)
        finally:
            _close(files)

    def _holder(self) -> str:
        """The process that had a device at the last try."""
        with suppress(OSError):
            return (self._folder / f"{self._taken}.lock").read_text() or "the process that has it"
        return "the process that waits for it"

    def _opened(self, kind: str) -> list[int]:
        self._folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        return [os.open(self._folder / f"{name}.{kind}", flags, 0o600) for name in self._names]


class DeviceTurn:
    """The turns of a process that computes on one thread. Without a lock it is always its turn.

    Args:
        lock: of the devices; None where no other process uses them.
        park, fetch: free the devices' memory, and fill it again.
        waiting: of the process's status, which shows the wait for the turn.
        deadline_s: longest wait for it.
    """

    def __init__(
        self,
        lock: DeviceLock | None,
        park: Callable[[], None],
        fetch: Callable[[], None],
        waiting: Callable[[str, float | None], AbstractContextManager[None]],
        deadline_s: float,
    ) -> None:
        self._lock, self._park, self._fetch = lock, park, fetch
        self._waiting, self._deadline_s = waiting, deadline_s

    @classmethod
    def always(cls) -> DeviceTurn:
        """The turn of a process that shares its devices with nobody."""
        return cls(None, lambda: None, lambda: None, lambda *_: nullcontext(), 0.0)

    def hold(self) -> None:
        """Have the devices, with everything on them. Raises DeadlineError."""
        if self._lock is None or self._lock.held:
            return
        with self._waiting(TURN, self._deadline_s):
            self._lock.take(self._deadline_s)
        self._fetch()

    def offer(self) -> None:
        """Give the devices up if another process waits for them."""
        if self._lock is not None and self._lock.wanted():
            self._park()
            self._lock.give()

    def offer_until(self, done: Future[Any]) -> None:
        """Offer the devices while this process waits for a result, which it does anyway."""
        while self._lock is not None and not done.done():
            self.offer()
            wait([done], LOOK_S)


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _close(files: Sequence[int]) -> None:
    """Unlock and close: a process that this one has forked may have the same open files."""
    for file in files:
        fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)
