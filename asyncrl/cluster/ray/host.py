"""An actor of Ray that runs one process of the run on its node.

    launcher ──start, send──▸ HostActor ──starts, signals──▸ asyncrl queue | learner | generator | pool
             ◂──event────────           ◂──its line, its end──

The process dies with the actor, and the actor with the launcher. Its log and its report lie in the run folder, which
all nodes share.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.launch.supervise import ChildEnded, ChildEvent, Supervisor

SEEN_S = 30.0
"""Longest time until a node sees a file that the launcher has written: a network file system remembers that there was
none."""

LOOK_S = 0.5
STARTED_S = 60.0
"""Longest start of a process, without what it loads."""


@dataclass(frozen=True, slots=True)
class StartOrder:
    """The process that a node starts.

    name: of the process, and of its log
    words: of its command, after `python`
    folder: in which the launcher runs
    run: the run folder, absolute
    config: the text of its config.yaml
    """

    name: str
    words: tuple[str, ...]
    env: Mapping[str, str]
    announces: bool
    folder: str
    run: str
    config: str

    def problem(self, seconds: float = SEEN_S) -> str:
        """Why this node cannot run it; empty if it can."""
        shared = "let all nodes of the cluster share it, at this path"
        if not os.access(self.folder, os.X_OK):
            return _problem("--on", "ray", f"has no folder {self.folder}, in which it was started", shared)
        until = time.monotonic() + seconds
        while not self._sees_the_run():
            if time.monotonic() > until:
                return _problem("run.dir", self.run, "does not see the run folder of the launcher", shared)
            time.sleep(LOOK_S)
        return ""

    def _sees_the_run(self) -> bool:
        try:
            return Path(self.run, "config.yaml").read_text(encoding="utf-8") == self.config
        except (OSError, UnicodeDecodeError):
            return False


def _problem(key: str, value: str, rule: str, remedy: str) -> str:
    """An error as text: those with a constructor of their own do not travel."""
    return f"ConfigError: {ConfigError(key, value, f'node {os.uname().nodename} {rule}', remedy)}"


class HostActor:
    """Made for one call of `start`. Its methods run on several threads."""

    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None
        self._name = ""
        self._events: list[ChildEvent] = []
        self._news = threading.Condition()

    def start(self, order: StartOrder) -> str:
        """Start the process. Returns why it cannot be started; empty once it was."""
        if problem := order.problem():
            return problem
        begun: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(order, begun), daemon=True).start()
        return begun.get(timeout=STARTED_S)

    def event(self, index: int, seconds: float) -> ChildEvent | None:
        """The event of this number, from 0; None if it does not come in time. It can be asked for again."""
        with self._news:
            self._news.wait_for(lambda: len(self._events) > index, seconds)
            return self._events[index] if len(self._events) > index else None

    def send(self, number: int) -> None:
        """A signal to the process; SIGKILL also to all that it has started in its session."""
        if self._supervisor is None:
            return
        if number == signal.SIGKILL:
            with suppress(ProcessLookupError):
                os.killpg(self._supervisor.pid(self._name), number)
        else:
            self._supervisor.send(self._name, signal.Signals(number))

    def _run(self, order: StartOrder, begun: queue.SimpleQueue[str]) -> None:
        """Linux kills the process when the thread ends that has started it: this one stays to the end."""
        try:
            os.chdir(order.folder)
            supervisor = Supervisor(Path(order.run, "logs"))
            words = [sys.executable, *order.words]
            supervisor.start(order.name, words, order.env, announces=order.announces)
        except OSError as error:
            begun.put(_problem("run.dir", order.run, f"cannot start it ({error})", "look at this node"))
            return
        self._name, self._supervisor = order.name, supervisor
        begun.put("")
        while True:
            event = supervisor.next_event(STARTED_S)
            if event is None:
                continue
            with self._news:
                self._events.append(event)
                self._news.notify_all()
            if isinstance(event, ChildEnded):
                return
