"""The ranks of a learner or of a process of a pool on one machine, as `asyncrl learner` and `asyncrl pool` start them.

    this process ──starts──▸ rank 0, rank 1, …     they meet in a folder of their owner, or through the queue
                 ◂──a sign of life each second──   none for launch.rank_deadline_s: named and killed
                 ◂──a rank that fails──            the others get SIGTERM, and after END_S SIGKILL
    Ctrl-C, SIGTERM, SIGHUP ──▸ each rank          which end their step and write a checkpoint together

This process ends as the rank that failed first has ended. Rank 0 has its stdout and stderr; lines of the others come
from here, with `[rank1]: ` in front.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from asyncrl.config.rules import require
from asyncrl.errors import INTERRUPTED, RankLostError, StoppedError
from asyncrl.launch.supervise import (
    FORK_SERVER,
    IMPORTED,
    ChildEnded,
    ChildMessage,
    Interrupted,
    Supervisor,
    wait_line,
)
from asyncrl.observability.logs import RANK, describe_exit
from asyncrl.system.fork_server import ForkServer
from asyncrl.system.rank_process import FOLDER, MEETING, PULSE_FD, QUEUE
from asyncrl.system.temporary import temporary_folder

log = logging.getLogger(__name__)

LOOK_S = 0.5
END_S = 10.0
"""Longest time that the others have to end after a rank has failed."""

CLEAN = (0, StoppedError.exit_code, INTERRUPTED)
"""Codes of a rank that has ended in order."""
CONSEQUENCES = (1, -signal.SIGABRT, -signal.SIGTERM)
"""Ends of a rank whose connections to another one break, or that is ended because another one has failed."""

SETTLE_S = 1.0
"""Such a rank may end before the one that has failed: its end explains nothing until no other has come for so long."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """The ranks of one machine. name: of the learner or of the pool's process · nodes: machines that have `world`
    ranks in equal parts · node: this machine among them."""

    name: str
    world: int
    nodes: int = 1
    node: int = 0

    @property
    def count(self) -> int:
        return self.world // self.nodes

    def check(self, key: str) -> None:
        """Raise ConfigError for a share that is none. key: that sets `world`."""
        equal = f"divides {key}={self.world}"
        rule = f"must be a number of machines that {equal}"
        remedy = f"set {key} to the ranks of all machines together"
        require(self.nodes > 0 and self.world % self.nodes == 0, "--nodes", self.nodes, rule, remedy)
        numbers = f"the machines are numbered from 0 to {self.nodes - 1}"
        require(0 <= self.node < self.nodes, "--node", self.node, numbers, "give each machine another number")


def run_ranks(
    command: Sequence[str],
    share: RankShare,
    deadline_s: float,
    forks: ForkServer | None = None,
    load_s: float = 0.0,
) -> int:
    """Start the ranks and wait for their end. Returns the exit code of the rank that failed first, negative for a
    signal; where none has failed the largest, which is 0, 10 or 130.

    deadline_s: longest time without a sign of life
    forks: what forks the ranks, once it has imported their modules, or has failed after at most load_s. A signal that
        comes before that ends this process.

    Raises RankLostError if a rank gives no sign of life; it was killed, and the others have ended.
    """
    with _meeting(share) as meeting:
        supervisor = Supervisor(forks=forks)
        with supervisor.interrupts():
            if supervisor.expect_forks(load_s):
                event = wait_line(supervisor, FORK_SERVER, "its imports", load_s + END_S)
                if isinstance(event, Interrupted):
                    return -event.number
                if isinstance(event, ChildMessage) and event.line != IMPORTED:
                    log.warning("each rank imports torch by itself; the fork server: %s", event.line)
            return Ranks(supervisor, share, deadline_s).run(command, meeting)


@contextmanager
def _meeting(share: RankShare) -> Iterator[str]:
    """The value of MEETING: for the ranks of one machine a folder that nobody else may read, removed at the end."""
    if share.nodes > 1:
        yield f"{QUEUE}:{share.name}"
        return
    with temporary_folder("asyncrl-ranks-") as folder:
        yield f"{FOLDER}:{folder}"


class Ranks:
    """The ranks of one machine; made for one call of `run`."""

    def __init__(self, supervisor: Supervisor, share: RankShare, deadline_s: float) -> None:
        self._supervisor, self._share, self._deadline_s = supervisor, share, deadline_s
        self._signs = SignsOfLife()
        self._living: set[str] = set()
        self._ends: dict[str, int] = {}  # of ranks that were not killed from here, in their order
        self._lost: RankLostError | None = None
        self._settled_at: float | None = None  # once a rank has ended that has failed, or is a consequence
        self._kill_at: float | None = None  # once a rank has failed
        self._killed: set[str] = set()
        self._printers: list[threading.Thread] = []

    def run(self, command: Sequence[str], meeting: str) -> int:
        for index in range(self._share.count):
            self._start(index, command, meeting)
        while self._living:
            event = self._supervisor.next_event(LOOK_S)
            if isinstance(event, Interrupted):
                self._pass_on(signal.Signals(event.number))
            elif isinstance(event, ChildEnded):
                self._ended(event)
            self._check_signs()
            self._check_ends()
        for printer in self._printers:
            printer.join(END_S)  # what a rank has left behind may keep its output open
        if self._lost is not None:
            raise self._lost
        return exit_code(self._ends)

    def _start(self, index: int, command: Sequence[str], meeting: str) -> None:
        rank = self._share.node * self._share.count + index
        name = f"rank {rank}"
        reading, writing = os.pipe()
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._share.world),
            "LOCAL_RANK": str(index),
            "LOCAL_WORLD_SIZE": str(self._share.count),
            MEETING: meeting,
            PULSE_FD: str(writing),
            "PYTHONSAFEPATH": "1",
            "PYTHONUNBUFFERED": "1",
        }
        output, ours = (None, None) if rank == 0 else os.pipe()
        streams = (1, 2) if ours is None else (ours, ours)
        self._supervisor.start(name, command, env, streams=streams, passed=[writing])
        self._living.add(name)
        os.close(writing)
        self._signs.watch(name, reading)
        if output is not None and ours is not None:
            os.close(ours)
            self._printers.append(_thread(_print_marked, output, rank))

    def _pass_on(self, number: signal.Signals) -> None:
        for name in self._supervisor.running():
            self._supervisor.send(name, number)

    def _ended(self, event: ChildEnded) -> None:
        self._living.discard(event.name)
        self._signs.forget(event.name)
        if event.name in self._killed:
            return
        self._ends[event.name] = event.code
        if event.code not in CLEAN and self._settled_at is None:
            self._settled_at = time.monotonic() + SETTLE_S
        if event.code not in (*CLEAN, *CONSEQUENCES):
            self._settled_at = 0.0

    def _check_signs(self) -> None:
        for name in self._signs.silent(self._deadline_s):
            self._signs.forget(name)
            if self._lost is None:
                process = self._supervisor.pid(name)
                self._lost = RankLostError(
                    f"{self._share.name}: {name} (process {process}) gave no sign of life for {self._deadline_s:g} s "
                    "(launch.rank_deadline_s) and was killed, and the other ranks with it"
                )
                self._kill(name)
                self._end_others(name, "no sign of life")

    def _check_ends(self) -> None:
        """End the others once a rank has failed, and kill those that do not end."""
        now = time.monotonic()
        if self._kill_at is None and self._settled_at is not None and now > self._settled_at:
            name = failed_first(self._ends)
            self._end_others(name, describe_exit(self._ends[name]))
        elif self._kill_at is not None and now > self._kill_at:
            for name in self._supervisor.running():
                self._kill(name)

    def _kill(self, name: str) -> None:
        self._killed.add(name)
        self._supervisor.send(name, signal.SIGKILL)

    def _end_others(self, name: str, why: str) -> None:
        log.error("%s ended first (%s); the other ranks end with it", name, why)
        self._kill_at = time.monotonic() + END_S
        self._pass_on(signal.SIGTERM)


class SignsOfLife:
    """When each rank last wrote to its pipe. clock: in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at: dict[str, float] = {}
        self._looked = clock()

    def watch(self, name: str, descriptor: int) -> None:
        """Read the signs of a rank on a thread of its own, until its pipe is closed."""
        self.begin(name)
        _thread(self._read, name, descriptor)

    def begin(self, name: str) -> None:
        self._at[name] = self._clock()

    def seen(self, name: str) -> None:
        if name in self._at:
            self._at[name] = self._clock()

    def forget(self, name: str) -> None:
        self._at.pop(name, None)

    def silent(self, seconds: float) -> list[str]:
        """Those without a sign for so long. All count anew if this process was stopped itself, e.g. by Ctrl-Z."""
        now, before = self._clock(), self._looked
        self._looked = now
        if now - before > seconds / 2:
            self._at = dict.fromkeys(self._at, now)
        return [name for name, at in self._at.items() if now - at > seconds]

    def _read(self, name: str, descriptor: int) -> None:
        with open(descriptor, "rb", buffering=0) as pipe:
            while pipe.read(4096):
                self.seen(name)


def failed_first(ends: Mapping[str, int]) -> str:
    """The rank whose end explains the others, which are in their order. At least one has failed.

    >>> failed_first({"rank 0": 10, "rank 1": 1, "rank 2": -9}), failed_first({"rank 1": 1, "rank 0": -6})
    ('rank 2', 'rank 1')
    """
    failed = [name for name, code in ends.items() if code not in CLEAN]
    return next((name for name in failed if ends[name] not in CONSEQUENCES), failed[0])


def exit_code(ends: Mapping[str, int]) -> int:
    """The code of all ranks together.

    >>> exit_code({"rank 0": 0, "rank 1": 0}), exit_code({"rank 0": 10, "rank 1": 0}), exit_code({"rank 1": -9})
    (0, 10, -9)
    """
    if all(code in CLEAN for code in ends.values()):
        return max(ends.values())
    return ends[failed_first(ends)]


def _print_marked(descriptor: int, rank: int) -> None:
    with open(descriptor, encoding="utf-8", errors="replace") as output:
        for line in output:
            marked = line if RANK.match(line) else f"[rank{rank}]: {line}"
            sys.stdout.write(marked if marked.endswith("\n") else marked + "\n")
            sys.stdout.flush()


def _thread(work: Callable[..., None], *words: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=words, daemon=True)
    thread.start()
    return thread
