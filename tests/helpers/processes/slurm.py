"""A real Slurm on loopback: a controller, and nodes of two CPUs each that are all this machine."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

import missing
import pytest
from processes import DEADLINE_S, free_port, until

from asyncrl.system.signals import die_with_parent

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
ReturnToService=1
MpiDefault=none
SwitchType=switch/none
JobRequeue=1
KillWait=30
MinJobAge=3600
GresTypes=gpu
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NODE = (
    "NodeName=n{number} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=2 Gres=gpu:1 State=UNKNOWN\n"
)


class SlurmCluster:
    """Nodes n1, n2, …; each says that it has a GPU. It needs root: nodes start processes of any user."""

    def __init__(self, folder: Path, count: int) -> None:
        if os.getuid() or any(shutil.which(name, path=SBIN) is None for name in PROGRAMS):
            pytest.skip(missing.SLURM)
        self._folder, self.nodes = folder, [f"n{number}" for number in range(1, count + 1)]
        self._daemons: list[subprocess.Popen[bytes]] = []
        host = socket.gethostname()
        nodes = "".join(NODE.format(number=i + 1, host=host, port=free_port()) for i in range(count))
        (folder / "slurm.conf").write_text(CONFIG.format(host=host, port=free_port(), folder=folder) + nodes)
        (folder / "gres.conf").write_text("Name=gpu File=/dev/zero\n")
        (folder / "state").mkdir()
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._start_munge()
        self._start("slurmctld", "-D")
        for node in self.nodes:
            (folder / f"spool-{node}").mkdir()
            self._start("slurmd", "-D", "-N", node)
        until(lambda: self.states() == {"idle"}, f"idle nodes: {folder / 'slurmctld.log'}")

    def ask(self, *words: str) -> str:
        """The output of a command of Slurm."""
        done = subprocess.run(
            words, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def states(self) -> set[str]:
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%T"],
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        return {*done.stdout.split()}

    def job(self, number: str) -> dict[str, str]:
        """Fields of the first component."""
        first = self.ask("scontrol", "--oneliner", "show", "job", number).splitlines()[0]
        return dict(word.split("=", 1) for word in first.split() if "=" in word)

    def until_state(self, number: str, *states: str) -> str:
        def state() -> str:
            now = self.job(number)["JobState"]
            return now if now in states else ""

        return str(until(state, f"job {number} in {states}: {self.job(number)}"))

    def hosts(self, number: str) -> list[str]:
        """The nodes of a component."""
        return self.ask("scontrol", "show", "hostnames", self.job(number)["NodeList"]).split()

    def until_queued_again(self, number: str, times: int) -> None:
        """Until the job runs after it was queued again so many times. A scheduler with nothing else to do may overlook
        that its time to begin has come, until something changes."""

        def runs() -> bool:
            self.ask("scontrol", "update", "PartitionName=main", "State=UP")
            now = self.job(number)
            return now.get("Restarts") == str(times) and now["JobState"] == "RUNNING"

        until(runs, f"job {number} again: {self._folder / 'slurmctld.log'}")

    def close(self) -> None:
        for one in reversed(self._daemons):
            one.terminate()
        for one in self._daemons:
            try:
                one.wait(timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()

    def _start_munge(self) -> None:
        key, here = self._folder / "munge.key", self._folder
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {
            "socket": "munge.socket",
            "pid-file": "munge.pid",
            "log-file": "munge.log",
            "seed-file": "munge.seed",
        }
        self._start(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            *(f"--{o}={here / f}" for o, f in files.items()),
        )
        end = time.monotonic() + DEADLINE_S
        while not (here / "munge.socket").exists():
            assert time.monotonic() < end, "munged does not listen"
            assert self._daemons[0].poll() is None, (here / "munge.log").read_text()
            time.sleep(0.02)

    def _start(self, name: str, *words: str) -> None:
        program = shutil.which(name, path=SBIN)
        assert program
        with (self._folder / f"{name}.out").open("ab") as out:
            self._daemons.append(
                subprocess.Popen(
                    [program, *words],
                    env={**os.environ, **self.env},
                    stdout=out,
                    stderr=out,
                    stdin=subprocess.DEVNULL,
                    preexec_fn=die_with_parent,
                )
            )
