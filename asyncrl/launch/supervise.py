"""Child processes as one stream of events: their announcements and ends, and interrupts by the user.

    child ──exit code──▸ waiter thread ──▸ ┐
    child ──one line───▸ reader thread ──▸ ├─ events ──▸ next_event(seconds): the launcher's only wait
    Ctrl-C, SIGTERM ───▸ signal handler ─▸ ┘

Every child has a session of its own, so Ctrl-C reaches only the launcher, and dies with it, so none is left
behind if the launcher is killed. Its output goes to one file. A child that is a module of Python is forked, if there is
a fork server (system/fork_server.py) and it has imported its modules; else it is executed.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from asyncrl.errors import DeadlineError
from asyncrl.observability.logs import why_it_ended
from asyncrl.system.fork_server import ForkServer
from asyncrl.system.signals import die_with, stop_signals
from asyncrl.telemetry import tracing

TAIL_LINES = 25
SIGNALS = frozenset(signal.Signals)
"""Those with a name."""


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """A child ended. `code` is its exit code, or minus the signal that killed it."""

    name: str
    code: int


@dataclass(frozen=True, slots=True)
class ChildMessage:
    """A child wrote its one line to the pipe it was given; empty if it closed the pipe without."""

    name: str
    line: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The user ends the run: signal `number` came."""

    number: int


class Child(Protocol):
    """A process that a supervisor has started: subprocess.Popen, or one elsewhere."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def send_signal(self, sig: int) -> None: ...


ChildEvent = ChildEnded | ChildMessage | Interrupted

FORK_SERVER, IMPORTED = "fork server", "imported"

LAST_LINE_S = 5.0
"""Longest wait of a child's end for its line. A process that it has left behind may keep the pipe open."""


class Supervisor:
    """Starts children and reports their events. Used from the main thread only."""

    def __init__(self, logs: Path | None = None, forks: ForkServer | None = None) -> None:
        """logs: the folder of the logs, for children that are started without `streams`."""
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        self._logs, self._forks = logs, forks
        self._children: dict[str, Child] = {}
        self._events: queue.SimpleQueue[ChildEvent] = queue.SimpleQueue()

    def start(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        announces: bool = False,
        streams: tuple[int, int] | None = None,
        passed: Sequence[int] = (),
        starts_others: bool = False,
    ) -> None:
        """Start a child; its output is appended to logs/<name>.log, unless `streams` are its stdout and stderr.

        With `announces` `--announce FD` is appended to its command, and the line that it writes there arrives as a
        `ChildMessage`. passed: descriptors that it gets besides. starts_others: whether it starts processes of asyncrl
        """
        reading, writing = os.pipe() if announces else (-1, -1)
        words = [*command, "--announce", str(writing)] if announces else list(command)
        with ExitStack() as closing:
            if streams is None:
                log = closing.enter_context(self.log(name).open("ab"))
                streams = log.fileno(), log.fileno()
            fds = [*passed, *([writing] if announces else [])]
            variables = {**os.environ, **(env or {})}
            forked = self._fork(words, variables, streams, fds, starts_others)
            self._children[name] = forked or self._child(name, _execute(words, variables, streams, fds))
        child = self._children[name]
        tracing.event("started", process=name, pid=child.pid)
        reader: threading.Thread | None = None
        if announces:
            os.close(writing)
            reader = self._thread(lambda: self._events.put(ChildMessage(name, _first_line(reading))))
        self._thread(lambda: self._report_end(name, child.wait(), reader))

    def _fork(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        streams: tuple[int, int],
        passed: Sequence[int],
        starts_others: bool,
    ) -> Child | None:
        """None: it is to be executed."""
        if self._forks is None or not self._forks.ready or list(words[:2]) != [sys.executable, "-m"]:
            return None
        with open(os.devnull, "rb") as nothing:
            places = {0: nothing.fileno(), 1: streams[0], 2: streams[1], **{fd: fd for fd in passed}}
            process = self._forks.fork(words, env, places, serves=starts_others)
        if self._forks.failure:
            self._events.put(ChildMessage(FORK_SERVER, self._forks.failure))
        return process

    def expect_forks(self, seconds: float) -> bool:
        """Whether there is a fork server that still imports. A message of FORK_SERVER then comes within `seconds`:
        IMPORTED, or why it forks nothing. Another one comes if it fails later."""
        forks = self._forks
        if forks is None or forks.ready or forks.failure:
            return False

        def wait() -> None:
            if forks.wait_ready(seconds):
                tracing.event("imported", process=FORK_SERVER, seconds=time.monotonic() - forks.began)
            self._events.put(ChildMessage(FORK_SERVER, forks.failure or IMPORTED))

        self._thread(wait)
        return True

    def _child(self, name: str, process: subprocess.Popen[bytes]) -> Child:
        """The child that a process stands for."""
        return process

    def next_event(self, seconds: float) -> ChildEvent | None:
        """The next event, or None if there was none in `seconds`."""
        try:
            return self._events.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return None

    def running(self) -> list[str]:
        return [name for name, child in self._children.items() if child.poll() is None]

    def code(self, name: str) -> int | None:
        """The exit code of a child, as in `ChildEnded`; None while it runs, or if it was never started."""
        return self._children[name].poll() if name in self._children else None

    def pid(self, name: str) -> int:
        return self._children[name].pid

    def log(self, name: str) -> Path:
        assert self._logs is not None
        return self._logs / f"{name}.log"

    def why_it_ended(self, name: str) -> tuple[str, list[str]]:
        """The cause of a child's end and the lines that a reader needs: `why_it_ended` of its log."""
        return why_it_ended(self.log(name).read_text(encoding="utf-8", errors="replace"), TAIL_LINES)

    def send(self, name: str, number: signal.Signals) -> None:
        """To the child itself; it looks after its own children."""
        child = self._children[name]
        if child.poll() is None:
            child.send_signal(number)

    def wait_ended(self, names: Sequence[str], seconds: float, beside: str | None = None) -> list[str]:
        """Wait until these children have ended, and return those that have not after `seconds`.

        beside: a child without which they are not waited for. A further Ctrl-C or SIGTERM cuts the wait short, too;
        SIGHUP does not, because a terminal that closes can send several.
        """
        deadline = time.monotonic() + seconds
        while left := [name for name in names if name in self.running()]:
            remaining = deadline - time.monotonic()
            if beside is not None and beside not in self.running():
                return left
            if remaining <= 0:
                return left
            event = self.next_event(remaining)
            if isinstance(event, Interrupted) and event.number != signal.SIGHUP:
                return left
        return []

    def stop_all(self, seconds: float) -> list[str]:
        """SIGTERM, then SIGKILL to whole sessions after `seconds`. Returns the names of those that had to be killed."""
        for name in self.running():
            self.send(name, signal.SIGTERM)
        late = self.wait_ended(self.running(), seconds)
        self.kill_all()
        return late

    def kill_all(self) -> None:
        """SIGKILL to every child that is left and to what it started in its session."""
        for name in self.running():
            self._kill(self._children[name])
        for child in self._children.values():
            child.wait()

    def _kill(self, child: Child) -> None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    @contextmanager
    def interrupts(self) -> Iterator[None]:
        """Inside, SIGINT and `stop_signals` become `Interrupted` events. At the end no child is left.

        Python gives signals to its main thread alone: in another one they keep their meaning.
        """

        def on_signal(number: int, frame: FrameType | None) -> None:
            self._events.put(Interrupted(number))

        main = threading.current_thread() is threading.main_thread()
        handled = (signal.SIGINT, *stop_signals()) if main else ()
        before = {number: signal.signal(number, on_signal) for number in handled}
        try:
            yield
        finally:
            self.kill_all()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _report_end(self, name: str, code: int, reader: threading.Thread | None = None) -> None:
        by = {"signal": signal.Signals(-code).name} if -code in SIGNALS else {}
        tracing.event("ended", process=name, code=code, **by)
        if reader is not None:
            reader.join(LAST_LINE_S)  # its line comes before its end
        self._events.put(ChildEnded(name, code))

    def _thread(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread


def _execute(
    words: Sequence[str], env: Mapping[str, str], streams: tuple[int, int], passed: Sequence[int]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        words,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=streams[0],
        stderr=streams[1],
        start_new_session=True,
        pass_fds=passed,
        preexec_fn=die_with(os.getpid()),
    )


def wait_line(supervisor: Supervisor, name: str, what: str, seconds: float) -> ChildEvent:
    """The child's `ChildMessage`, or the `ChildEnded` or `Interrupted` that ends the wait. Raises DeadlineError."""
    deadline = time.monotonic() + seconds
    while True:
        event = supervisor.next_event(deadline - time.monotonic())
        if event is None:
            raise DeadlineError("the launcher", f"process {name}", what, seconds)
        # A child that dies without a line closes its pipe; its exit code, which comes next, is the better cause.
        if event == ChildMessage(name, "") or (isinstance(event, ChildMessage) and event.name != name):
            continue
        return event


def _first_line(descriptor: int) -> str:
    with open(descriptor, encoding="utf-8") as pipe:
        return pipe.readline().strip()
