"""`asyncrl train`: a whole run on one machine.

    launcher ──starts──▸ fork server, which imports
             ──starts──▸ queue ──its address──▸ launcher ──forks──▸ learner, generators, pools
                                                   │
         waits for whichever comes first: ◂────────┘
           learner ends well       the others leave by themselves, the queue is stopped, the summary returned
           a generator dies        it is started again; also one that ends before the run is closed
           a pool's process dies   so is it
           the queue dies          so is it, at the same address and from its journal
           the learner dies        so is it, from the newest checkpoint
           a pool that learns dies the learner too: both go on from the newest checkpoint
           one dies more often than launch.*_restarts within launch.restart_window_s:
                                   a generator is left out until that time has passed, while others live;
                                   else everything is killed, ProcessDiedError
           the learner hangs   loads for launch.load_deadline_s, or is silent for learner.groups_deadline_s:
                               everything is killed, DeadlineError
           the dashboard dies       the run goes on without it
           `asyncrl scale`          generators are started, or finish what they have and leave
           Ctrl-C, SIGTERM, SIGHUP the learner ends its step and writes a checkpoint, then all are stopped
           Ctrl-C again            everything is killed
           SIGTERM to the learner  the same

Processes share nothing with the launcher but config.yaml, the queue's address and the run folder.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.errors import (
    AsyncRLError,
    ConfigError,
    DeadlineError,
    JournalError,
    PoolLostError,
    ProcessDiedError,
    RankLostError,
    StoppedError,
)
from asyncrl.launch.folder.kept import queue_begins_anew
from asyncrl.launch.folder.run_folder import OF_VERSION_0, claimed_run_folder, read_summary
from asyncrl.launch.folder.scale import ScaleRequest, take_request
from asyncrl.launch.processes import DASH, LEARNER, QUEUE, Processes, begin_imports
from asyncrl.launch.queue_process import LAST_HEARTBEATS
from asyncrl.launch.restarts import Restarts
from asyncrl.launch.supervise import (
    FORK_SERVER,
    IMPORTED,
    ChildEnded,
    ChildMessage,
    Interrupted,
    Supervisor,
    wait_line,
)
from asyncrl.launch.views.dashboard import Dashboard, RunView, open_dashboard
from asyncrl.launch.views.findings import warnings_beside
from asyncrl.launch.views.output import lasting_output
from asyncrl.launch.views.process_reports import ProcessReports, remove_reports
from asyncrl.launch.views.start_table import StartTable, launcher_began
from asyncrl.observability.logs import describe_exit
from asyncrl.telemetry import tracing

REFRESH_S = 1.0
NO_ROOM = "the disk is full, or a folder cannot be written; its log may lack the message for the same reason"
LOADED, SIGN = "its report that it has loaded", "a sign of life"

GOES_ON = (PoolLostError.exit_code, RankLostError.exit_code)
"""Codes of a learner that goes on from its newest checkpoint."""

SLOW_END_S = 20.0
"""Seconds that a queue may take to end, once the workers of a closed run no longer need it."""


def train(config: Config, supervisor_of: Callable[[Path], Supervisor] | None = None) -> dict[str, Any]:
    """Run to the last version and return the summary that the learner wrote.

    supervisor_of: makes what starts the processes, from the folder of their logs; None: they are forked on this machine

    Raises ConfigError (run folder in use, resumed with other tasks), ProcessDiedError, DeadlineError, and once a run
    that was to end early is down KeyboardInterrupt (Ctrl-C) or StoppedError (SIGTERM, SIGHUP, also to the learner).
    """
    of_logs = supervisor_of or partial(Supervisor, forks=begin_imports(config))
    with claimed_run_folder(config) as (folder, changed):
        logs = folder / "logs"
        remove_reports(logs)
        supervisor, reports = of_logs(logs), ProcessReports(logs)
        view = RunView(config, folder, reports)
        trace = tracing.recording(folder, "launcher", "launcher", config.telemetry.trace_mb)
        with (
            trace,
            lasting_output(),
            supervisor.interrupts(),
            open_dashboard(config, view) as dashboard,
            warnings_beside(folder) as found,
        ):
            processes = Processes(config, folder, supervisor, reports)
            return LocalRun(config, folder, processes, supervisor, dashboard, reports, changed, found).run()


@dataclass
class LocalRun:
    """One run; made for one call of `run`.

    changed: whether it goes on with a configuration under which the queue's groups would have been made otherwise
    found: lines about what is wrong with the run, each once
    """

    config: Config
    folder: Path
    processes: Processes
    supervisor: Supervisor
    dashboard: Dashboard
    reports: ProcessReports
    changed: bool
    found: Callable[[], list[str]]
    # Generators that have died too often, and are not started again yet.
    _left_out: set[str] = field(default_factory=set)
    # Processes that ended as they may once the run is closed, and when.
    _left: dict[str, tuple[ChildEnded, float]] = field(default_factory=dict)
    _closed: bool = False  # the queue has left, as it does once the learner has closed the run
    _importing: bool = False  # the fork server is, and the other processes wait for it

    def __post_init__(self) -> None:
        launch = self.config.launch
        # None: not wanted, or printed already.
        self._start_table = StartTable(self.folder, launcher_began()) if launch.timings else None
        self._restarts = Restarts(launch.restart_window_s, launch.restart_pause_s)

    def run(self) -> dict[str, Any]:
        for pool in self.config.generator_pools:
            take_request(self.folder, pool)  # one that no launcher has taken
        self.processes.address = address = self._start_queue()
        self._importing = self.supervisor.expect_forks(self.config.launch.start_deadline_s)
        if self._importing:
            self.reports.started(FORK_SERVER)
        else:
            self._start_workers()
        if self.config.launch.dash:
            self.processes.start_dash()
        self.dashboard.print_line(f"{self.folder}: queue at {address}, logs in {self.folder / 'logs'}")
        self._watch()
        self._wind_down()
        if self._stopped():
            raise stopped_error(self.folder)
        return read_summary(self.folder)

    def _start_queue(self) -> str:
        """Returns its address."""
        # Without a checkpoint the learner begins at the beginning, and so must the queue.
        goes_on = self.config.run.resume and any(self.folder.glob("checkpoints/v*")) and not self.changed
        self.processes.start_queue(*([] if goes_on else ["--anew"]))
        seconds = self.config.launch.start_deadline_s
        event = wait_line(self.supervisor, QUEUE, "the address it listens at", seconds)
        if isinstance(event, ChildMessage):
            queue_begins_anew(self.folder)
            return event.line
        if isinstance(event, ChildEnded):
            raise self._died(event)
        raise self._interrupted(event)

    def _fork_server_reports(self, line: str) -> None:
        if line != IMPORTED:
            self.dashboard.print_line(
                f"processes are not forked, and each imports torch by itself; the fork server: {line}"
            )
        if self._importing:
            self._importing = False
            self.reports.ended(FORK_SERVER)
            self._start_workers()

    def _start_workers(self) -> None:
        """All but the queue. They are forked, unless the fork server has failed."""
        self.processes.start_learner()
        for name in self.processes.workers:
            self.processes.start_worker(name)

    def _watch(self) -> None:
        """Until the learner has ended well."""
        while True:
            event = self.supervisor.next_event(self._restarts.until_next(time.monotonic(), REFRESH_S))
            self._refresh()
            again = self._restarts.start_due(time.monotonic())
            for name in again:
                tracing.event("restarted", process=name)
            self._left_out.difference_update(again)
            self._scale()
            self._restart_who_left_early()
            self._check_learner()
            if isinstance(event, Interrupted):
                raise self._interrupted(event)
            if isinstance(event, ChildMessage) and event.name == FORK_SERVER:
                self._fork_server_reports(event.line)
            if isinstance(event, ChildMessage) and event.name == DASH and event.line:
                self.dashboard.print_line(f"dashboard: {event.line}")
            if not isinstance(event, ChildEnded):
                continue
            if event.name == DASH:
                log = self.supervisor.log(DASH)
                self.dashboard.print_line(
                    f"the dashboard ended ({describe_exit(event.code)}); its log: {log}"
                )
                continue
            self.reports.ended(event.name)
            if self.processes.let_go(event.name):
                self.dashboard.print_line(f"{event.name} has left ({describe_exit(event.code)})")
                continue
            if event == ChildEnded(LEARNER, 0):
                return
            if event == ChildEnded(QUEUE, 0):
                self._closed = True
                self._restarts.clear()
            elif event.name == LEARNER and self._stopped():
                return
            elif self._may_be_over(event):
                self._left[event.name] = event, time.monotonic()
            else:
                self._restart(event)
            if self._closed and LEARNER in self._left:
                return  # it was killed on its way out

    def _scale(self) -> None:
        """As `asyncrl scale` has requested."""
        for name in self.processes.kill_late():
            self.dashboard.print_line(f"{name} did not leave in time and is killed")
        for pool in () if self._closed or self._importing else self.config.generator_pools:
            if (request := take_request(self.folder, pool)) is not None:
                self._scale_pool(request)

    def _scale_pool(self, request: ScaleRequest) -> None:
        started, leaving = self.processes.scale(request.count, request.pool)
        for name in leaving:
            self._restarts.drop(name)
            self._left_out.discard(name)
            self._left.pop(name, None)
        tracing.event("scaled", generators=request.count, pool=request.pool, started=started, leaving=leaving)
        changes = [f"{name} starts" for name in started] + [f"{name} leaves" for name in leaving]
        self.dashboard.print_line(f"{request}; {', '.join(changes) or 'as before'}")

    def _may_be_over(self, event: ChildEnded) -> bool:
        """Whether a process ended as it may once the run is closed: a worker with 0, the learner killed after it has
        written the summary."""
        if event.name == LEARNER:
            return not _gave_reason(event) and bool(read_summary(self.folder))
        return event.name != QUEUE and event.code == 0

    def _restart_who_left_early(self) -> None:
        """Once the run is closed the queue leaves soon after. While it stays, a worker that ended with 0 was ended by
        something else, e.g. by a function of the user that called os._exit, and a learner was killed before it closed
        the run."""
        if self._closed:
            return
        stays_s = LAST_HEARTBEATS * self.config.generator.heartbeat_s + SLOW_END_S
        for name, (event, at) in [*self._left.items()]:
            if time.monotonic() - at > stays_s:
                del self._left[name]
                self._restart(event)

    def _check_learner(self) -> None:
        """Raise DeadlineError for a learner that hangs. One that has loaded has deadlines of its own for all it waits
        for, but not if it is stopped, e.g. by SIGSTOP."""
        hung = (
            ("launch.load_deadline_s", self.config.launch.load_deadline_s, self.reports.loading(), LOADED),
            (
                "learner.groups_deadline_s",
                self.config.learner.groups_deadline_s,
                self.reports.silent(),
                SIGN,
            ),
        )
        for key, limit_s, since_s, missing in hung:
            if since_s.get(LEARNER, 0.0) > limit_s:
                remedy = f"its log: {self.supervisor.log(LEARNER)}; {key}={limit_s:g} is the limit"
                raise DeadlineError("the launcher", "the learner", missing, since_s[LEARNER], remedy)

    def _refresh(self) -> None:
        self.reports.read()
        for warning in [*self.reports.new_warnings(), *self.found()]:
            self.dashboard.print_line(warning)
        self.dashboard.refresh()
        if self._start_table is not None and (lines := self._start_table.lines()):
            self._start_table = None
            self.dashboard.print_line("\n".join(lines))

    def _restart(self, event: ChildEnded) -> None:
        if event.name == QUEUE:
            self._restart_queue(event)
        elif event.name == LEARNER:
            self._restart_learner(event)
        else:
            self._restart_worker(event)

    def _restart_queue(self, event: ChildEnded) -> None:
        """Its clients repeat their requests until it answers. One that gave a reason would end again."""
        if _gave_reason(event) or self.config.queue.store == "memory":
            raise self._died(event)
        start = partial(self.processes.start_queue, f"queue.address={self.processes.address}")
        self._start_again(event, QUEUE, self.config.launch.queue_restarts, start, " from its journal")

    def _restart_learner(self, event: ChildEnded) -> None:
        """The steps since the newest checkpoint are made again. One that gave a reason would end again, unless it was
        for a pool that it trains with, which is started again too, or for a rank that hung."""
        if _gave_reason(event) and event.code not in GOES_ON:
            raise self._died(event)
        most = self.config.launch.learner_restarts
        start = partial(self.processes.start_learner, "run.resume=true")
        self._start_again(event, LEARNER, most, start, " from the newest checkpoint")

    def _restart_worker(self, event: ChildEnded) -> None:
        """Generators and pools hold nothing that cannot be made again: what they leased goes back to the queue."""
        if event.code == ConfigError.exit_code:
            raise self._died(event)
        start = partial(self.processes.start_worker, event.name)
        if event.name in self.processes.pools:
            self._start_again(event, "pools", self.config.launch.pool_restarts, start)
        else:
            self._start_again(event, event.name, self.config.launch.generator_restarts, start)

    def _start_again(
        self, event: ChildEnded, kind: str, most: int, start: Callable[[], None], whence: str = ""
    ) -> None:
        """At once or after a pause. A generator that dies too often is left out while others live; for all others there
        is ProcessDiedError then."""
        window, now = f"{self.config.launch.restart_window_s:g} s", time.monotonic()
        restart = self._restarts.plan(event.name, kind, most, now)
        cause = self.supervisor.why_it_ended(event.name)[0] if _gave_reason(event) else ""
        log = f"its log: {self.supervisor.log(event.name)}" + (f": {cause}" if cause else "")
        ended = f"{event.name} ended ({describe_exit(event.code)})"
        if restart.over:
            self._left_out.add(event.name)
            generators = {*self.processes.generators}
            if event.name not in generators or generators <= self._left_out:
                raise self._died(event)
            again = "" if math.isinf(restart.at) else f" for {restart.at - now:.0f} s"
            why = f"it died after {most} restarts within {window}"
            tracing.event("left_out", process=event.name, restarts=most)
            self.dashboard.print_line(f"{ended} and is left out{again}: {why}; the others go on; {log}")
        else:
            pause = f" after a pause of {restart.at - now:g} s" if restart.at > now else ""
            count = f"{restart.number} of {most} restarts within {window}{pause}"
            self.dashboard.print_line(f"{ended} and is started again{whence}, {count}; {log}")
        self._restarts.put(event.name, restart.at, start)

    def _wind_down(self) -> None:
        """The run is closed: generators and pools notice it at their next heartbeat. Those that are left when the queue
        leaves were still starting, and cannot notice it any more."""
        deadline_s = self.config.launch.stop_deadline_s
        workers = [*self.processes.workers, *self.processes.leaving]
        left = self.supervisor.wait_ended(workers, deadline_s, beside=QUEUE)
        late = left if QUEUE in self.supervisor.running() else []
        late += [name for name in self.supervisor.stop_all(deadline_s) if name not in late]
        if late:
            self.dashboard.print_line(
                f"did not end within {deadline_s:.0f} s and were stopped: {', '.join(late)}"
            )
        self._refresh()

    def _stopped(self) -> bool:
        """Whether the learner has ended because of a signal."""
        return read_summary(self.folder).get("ended") == StoppedError.ended

    def _interrupted(self, event: Interrupted) -> BaseException:
        """Take the run down in order; the caller raises what this returns."""
        by_hand = event.number == signal.SIGINT
        deadline_s = self.config.launch.stop_deadline_s
        if LEARNER in self.supervisor.running():
            self.dashboard.print_line(
                f"stopping: the learner writes a checkpoint (at most {deadline_s:.0f} s); "
                "Ctrl-C again kills the run"
            )
            self.supervisor.send(LEARNER, signal.SIGTERM)
            if self.supervisor.wait_ended([LEARNER], deadline_s):
                self.supervisor.kill_all()
                lost = "killed; what came after the last checkpoint is lost"
                late = DeadlineError("the launcher", "the learner", "its last checkpoint", deadline_s, lost)
                return self._end_of_stop(late, lost, by_hand)
        self.supervisor.stop_all(deadline_s)
        code = self.supervisor.code(LEARNER) or 0
        gave_reason = code > 1 and code != StoppedError.exit_code and not self._restarts.waits(LEARNER)
        if not by_hand and gave_reason:  # why it could not save
            return self._died(ChildEnded(LEARNER, code))
        stopped = stopped_error(self.folder)
        return self._end_of_stop(stopped, str(stopped), by_hand)

    def _end_of_stop(self, error: AsyncRLError, text: str, by_hand: bool) -> BaseException:
        """After Ctrl-C the text has a line here; else the error has it."""
        if not by_hand:
            return error
        self.dashboard.print_line(text)
        return KeyboardInterrupt()

    def _died(self, event: ChildEnded) -> ProcessDiedError:
        cause, lines = self.supervisor.why_it_ended(event.name)
        if not cause and event.code == JournalError.exit_code:
            cause = NO_ROOM
        because = f": {cause}" if cause else ""
        if loading := [name for name in self.reports.loading() if name != event.name]:
            lines = [*lines, f"not loaded yet at that time: {', '.join(loading)}"]
        rest = "\n".join(f"    {line}" for line in lines or ["(nothing)"])
        return ProcessDiedError(
            f"{event.name} ended ({describe_exit(event.code)}) before the run was over{because}\n"
            f"from {self.supervisor.log(event.name)}:\n{rest}",
            event.code,
        )


def _gave_reason(event: ChildEnded) -> bool:
    """Whether the process ended on an error that is raised on purpose: 1 is a bug, a negative code a signal."""
    return event.code > 1


def stopped_error(folder: Path) -> StoppedError:
    """The error of a run that was stopped, which names the remedy."""
    saved = {path.name for path in folder.glob("checkpoints/v*")} - {OF_VERSION_0}
    if not saved:
        return StoppedError("stopped before the first step, so there is nothing to resume; start it again")
    return StoppedError(f"stopped; run.resume=true goes on from the newest checkpoint of {folder}")
