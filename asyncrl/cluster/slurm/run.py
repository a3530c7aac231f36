"""`asyncrl train --on slurm`: the launcher of a run, inside of a job.

    LocalRun ──▸ SlurmSupervisor ──▸ srun, a step for each process ──▸ step.py on its nodes ──▸ asyncrl learner, …
                                 ──▸ asyncrl queue, beside the launcher

LocalRun (launch/local_run.py) decides when to restart, leave out and stop, as on one machine. Slurm decides when the
job is queued again: it then goes on from the newest checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from asyncrl.cluster.roles import reachable, refuse_devices
from asyncrl.cluster.slurm.allocation import Allocation, ask
from asyncrl.cluster.slurm.step import KILLED
from asyncrl.config.schema import Config
from asyncrl.errors import INTERRUPTED, DeadlineError, StoppedError
from asyncrl.launch.folder.run_folder import locked_run_folder, remove_empty
from asyncrl.launch.local_run import train
from asyncrl.launch.processes import DASH, QUEUE
from asyncrl.launch.supervise import Child, Supervisor

HERE = (QUEUE, DASH)
"""Processes that run beside the launcher."""

SHIELD = ("sh", "-c", 'trap "" TERM; exec "$@"', "sh")
"""A job that is cancelled gets SIGTERM in all of its processes at once, and the learner needs the queue to save
itself."""

KILL_S = 40.0
"""srun waits so long for the end of a step that it has killed."""


def train_on_slurm(config: Config) -> dict[str, Any]:
    """Run to the last version on the nodes of this job and return the summary that the learner wrote. A job that was
    queued again goes on. Raises the errors of `train`, and ConfigError outside of a job."""
    refuse_devices(config, "Slurm")
    allocation = Allocation(config, os.environ)
    if allocation.restarts:
        run = dataclasses.replace(config.run, resume=True)
        config = dataclasses.replace(config, run=run)
        print(f"asyncrl: the job was queued again ({allocation.restarts}): the run goes on", file=sys.stderr)
    with locked_run_folder(config) as folder, _queued_again():
        try:
            config = reachable(config, allocation.address())
            return train(config, partial(SlurmSupervisor, allocation=allocation))
        finally:
            remove_empty(folder)


@contextmanager
def _queued_again() -> Iterator[None]:
    """Inside, SIGUSR1 stops the run, which is saved, and has the job queued again: its time is over soon. A learner
    that does not save itself in time goes on from an older checkpoint."""
    asked: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR1, on_signal)
    try:
        yield
    except (StoppedError, DeadlineError):
        if asked:
            print("asyncrl: the job is queued again", file=sys.stderr, flush=True)
            ask("requeue", os.environ["SLURM_JOB_ID"])
        raise


class SlurmSupervisor(Supervisor):
    """Starts each process of a run as a step of the job, and the queue beside itself."""

    def __init__(self, logs: Path, *, allocation: Allocation) -> None:
        super().__init__(logs)
        self._allocation = allocation

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
        if name not in HERE:
            seat, ends = self._allocation.seat(name), self._ends(name)
            ends.unlink(missing_ok=True)
            step = [
                sys.executable,
                "-m",
                "asyncrl.cluster.slurm.step",
                str(seat.first),
                str(seat.gpus),
                str(ends),
            ]
            command = ["srun", *seat.words(), f"--job-name={name}", *step, *command]
            env = {**(env or {}), "OMP_NUM_THREADS": str(seat.threads)}
        elif name == QUEUE:
            command = [*SHIELD, *command]
        super().start(name, command, env, announces=announces, streams=streams, passed=passed)

    def send(self, name: str, number: signal.Signals) -> None:
        super().send(name, signal.SIGINT if name == QUEUE and number == signal.SIGTERM else number)

    def _ends(self, name: str) -> Path:
        return self.log(name).with_suffix(".ends").absolute()

    def _child(self, name: str, process: subprocess.Popen[bytes]) -> Child:
        return process if name in HERE else StepChild(process, self._ends(name))

    def _kill(self, child: Child) -> None:
        if isinstance(child, StepChild):
            child.send_signal(signal.SIGKILL)
        else:
            super()._kill(child)


class StepChild:
    """A process of the run, by the srun of its step. ends: has the exit code of the node that failed first, if any"""

    def __init__(self, srun: subprocess.Popen[bytes], ends: Path) -> None:
        self.pid = srun.pid
        self._srun, self._ends = srun, ends

    def poll(self) -> int | None:
        return None if self._srun.poll() is None else self.wait()

    def wait(self) -> int:
        """Its exit code, or minus the signal that killed it."""
        code = self._srun.wait()
        if code and self._ends.exists():
            code = int(self._ends.read_text(encoding="utf-8") or code)
        return KILLED - code if code > KILLED and code != INTERRUPTED else code

    def send_signal(self, sig: int) -> None:
        """SIGTERM reaches the process by way of step.py; SIGKILL ends the step with all that it has started."""
        if sig != signal.SIGKILL:
            self._srun.send_signal(signal.SIGUSR1)
            return
        self._srun.send_signal(signal.SIGTERM)
        timer = threading.Timer(KILL_S, self._srun.kill)
        timer.daemon = True
        timer.start()
