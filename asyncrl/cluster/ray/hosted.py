"""A process of the run on nodes of the cluster, as the launcher sees it.

    actor on node 0 ──events──▸ thread ─┐
    actor on node 1 ──events──▸ thread ─┴─▸ HostedChild ──its line, its end──▸ RaySupervisor

A process that has ranks on several nodes ends as the part that failed first. The other parts end with it. A node that
is lost reads as a process killed by SIGKILL.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from asyncrl.cluster.ray.host import StartOrder
from asyncrl.cluster.ray.reserve import cluster_text, last_line
from asyncrl.errors import ConfigError, DeadlineError
from asyncrl.launch.ranks import CLEAN, END_S, exit_code
from asyncrl.launch.supervise import ChildEnded, ChildEvent, ChildMessage
from asyncrl.observability.logs import describe_exit

POLL_S = 10.0
"""Longest time that an actor takes to answer that nothing has happened."""

LOST_S = 60.0
"""Longest silence of an actor before its node counts as lost."""

KILL_S = 5.0
"""An actor that has not ended its process so long after SIGKILL is killed itself."""

PAUSE_S = 1.0


class HostedPart:
    """One actor's part: a process, or its ranks on one node.

    host: the actor · start_s: longest wait for its start
    on_message: gets the line that the process announces
    on_end: gets the part, its exit code and, if the process itself did not end, why
    """

    def __init__(
        self,
        ray: Any,
        host: Any,
        order: StartOrder,
        start_s: float,
        on_message: Callable[[ChildMessage], None],
        on_end: Callable[[HostedPart, int, str], None],
    ) -> None:
        self.name = order.name
        self._ray, self._host, self._order, self._start_s = ray, host, order, start_s
        self._on_message, self._on_end = on_message, on_end
        self._begun, self._done = threading.Event(), threading.Event()
        self._stopped_by = 0  # the signal that came before it had begun

    def follow(self) -> None:
        """Have it started, and followed to its end, on a thread."""
        threading.Thread(target=self._follow, name=f"follows {self.name}", daemon=True).start()

    def send(self, number: int) -> None:
        """Without a wait. An actor that is gone gets nothing: its end is reported anyway."""
        if not self._begun.is_set():
            self._stopped_by = number
            self._ray.kill(self._host)
            return
        self._host.send.remote(number)
        if number == signal.SIGKILL:
            timer = threading.Timer(KILL_S, self._kill_actor)
            timer.daemon = True
            timer.start()

    def _kill_actor(self) -> None:
        if not self._done.is_set():
            self._ray.kill(self._host)

    def _follow(self) -> None:
        try:
            code, why = self._run()
        except Exception as error:  # whatever Ray raises, and its connections
            lost = f"its node or its actor is lost: {last_line(error)}"
            code, why = (-self._stopped_by, "") if self._stopped_by else (-signal.SIGKILL, lost)
        self._done.set()
        with suppress(Exception):
            self._ray.kill(self._host)  # frees its resources for the next one
        self._on_end(self, code, why)

    def _run(self) -> tuple[int, str]:
        """(its exit code, why it was not started)."""
        try:
            problem = self._ray.get(self._host.start.remote(self._order), timeout=self._start_s)
        except self._ray.exceptions.GetTimeoutError:
            room = f"room for {self.name}"
            late = DeadlineError(
                "the launcher", "a node of Ray", room, self._start_s, cluster_text(self._ray)
            )
            return DeadlineError.exit_code, f"DeadlineError: {late}"
        if problem:
            return ConfigError.exit_code, problem
        self._begun.set()
        index = 0
        while not isinstance(event := self._event(index), ChildEnded):
            if isinstance(event, ChildMessage):
                self._on_message(event)
                index += 1
        return event.code, ""

    def _event(self, index: int) -> ChildEvent | None:
        """The event of this number, if it comes soon. An actor that cannot be reached is asked again for LOST_S."""
        errors = self._ray.exceptions
        until = time.monotonic() + LOST_S
        while True:
            try:
                event: ChildEvent | None = self._ray.get(
                    self._host.event.remote(index, POLL_S), timeout=LOST_S
                )
                return event
            except (errors.GetTimeoutError, errors.ActorUnavailableError):
                if time.monotonic() > until:
                    raise
                time.sleep(PAUSE_S)


class HostedChild:
    """A child, as a Supervisor uses it. It ends once all its parts have.

    starts: an actor and its order for each part, that of the first ranks first
    on_end: gets the exit code, and lines for its log
    """

    pid = 0
    """It is none of this machine."""

    def __init__(
        self,
        ray: Any,
        starts: Sequence[tuple[Any, StartOrder]],
        start_s: float,
        on_message: Callable[[ChildMessage], None],
        on_end: Callable[[int, list[str]], None],
    ) -> None:
        self._on_end = on_end
        self._lock, self._done = threading.Lock(), threading.Event()
        self._code: int | None = None
        self._ends: dict[str, int] = {}  # of parts that were not ended from here, in their order
        self._ended_from_here: set[HostedPart] = set()
        self._lines: list[str] = []
        self._parts = [
            HostedPart(ray, host, order, start_s, on_message, self._part_ended) for host, order in starts
        ]
        self._running = set(self._parts)
        for part in self._parts:
            part.follow()

    def poll(self) -> int | None:
        return self._code

    def wait(self) -> int:
        """For its end, which comes soon after SIGKILL. An actor that cannot be reached is not waited for any longer."""
        if not self._done.wait(LOST_S):
            self._code = -signal.SIGKILL
        assert self._code is not None
        return self._code

    def send_signal(self, sig: int) -> None:
        for part in [*self._running]:
            part.send(sig)

    def _part_ended(self, part: HostedPart, code: int, why: str) -> None:
        with self._lock:
            self._running.discard(part)
            if part not in self._ended_from_here:
                self._ends[part.name] = code
            if why:
                self._lines.append(why)
            elif len(self._parts) > 1 and code not in CLEAN:
                self._lines.append(f"{part.name} ended ({describe_exit(code)})")
            if self._running:
                if code not in CLEAN and not self._ended_from_here:
                    self._end_others()
                return
            self._code = exit_code(self._ends)
        self._on_end(self._code, self._lines)
        self._done.set()

    def _end_others(self) -> None:
        """The ranks of the other nodes cannot go on without those that have failed."""
        self._ended_from_here = {*self._running}
        self.send_signal(signal.SIGTERM)
        timer = threading.Timer(END_S, self.send_signal, [signal.SIGKILL])
        timer.daemon = True
        timer.start()
