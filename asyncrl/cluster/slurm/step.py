"""Inside of a step of Slurm, on each of its nodes: python -m asyncrl.cluster.slurm.step FIRST COUNT ENDS COMMAND …

    launcher ──SIGUSR1──▸ srun ──SIGUSR1──▸ this process ──SIGTERM──▸ the process of the run

srun would kill its step at a SIGTERM of its own. FIRST, COUNT: the GPUs that the process gets, of those that Slurm
shows it. ENDS: a file that gets the exit code of the node that fails first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType

from asyncrl.device.visible import VARIABLES, visible_devices
from asyncrl.errors import ConfigError
from asyncrl.launch.ranks import CLEAN
from asyncrl.system.signals import die_with

STOPS = (signal.SIGUSR1,)
KILLED = 128
"""Exit codes above are those of signals, as in a shell."""


def main(words: Sequence[str]) -> int:
    first, count, ends, *command = words
    try:
        devices = visible_devices(devices_of(os.environ, int(first), int(count)))
    except ConfigError as error:
        print(f"asyncrl train: ConfigError: {error}", file=sys.stderr, flush=True)
        return ConfigError.exit_code
    return run([*command, *share_of_ranks(os.environ)], devices, ends)


def run(command: Sequence[str], env: Mapping[str, str], ends: str) -> int:
    """Start the process, pass a stop on, and return its exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # one that comes now waits for the process
    begin = partial(_begin, die_with(os.getpid()))
    process = subprocess.Popen(command, env={**os.environ, **env}, preexec_fn=begin)

    def stop(number: int, frame: FrameType | None) -> None:
        process.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGUSR1, stop)
    # Slurm gives these to all processes of a step when a job is cancelled: the process of the run has got it already.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    code = process.wait()
    code = code if code >= 0 else KILLED - code
    if code not in CLEAN:
        with suppress(OSError), open(ends, "x", encoding="utf-8") as file:
            file.write(str(code))
    return code


def _begin(die_with_parent: Callable[[], None]) -> None:
    """Between fork and exec. srun gives its signal to all processes of the step: this one alone listens."""
    die_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


def devices_of(variables: Mapping[str, str], first: int, count: int) -> str | None:
    """`count` of the devices that Slurm shows; None: all, for a process that has none of its own.

    >>> devices_of({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 2, 2), devices_of({}, 0, 0)
    ('6,7', None)
    """
    if not count:
        return None
    shown = next((variables[name] for name in VARIABLES if variables.get(name)), "")
    devices = [name for name in shown.split(",") if name]
    if len(devices) < first + count:
        rule = f"its devices are {first} to {first + count - 1} of node {os.uname().nodename}"
        raise ConfigError(
            "GPUs of the job", shown, rule, "submit the run with `asyncrl launch slurm` once more"
        )
    return ",".join(devices[first : first + count])


def share_of_ranks(variables: Mapping[str, str]) -> list[str]:
    """Words for a process whose ranks lie on several nodes.

    >>> share_of_ranks({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"})
    ['--nodes', '2', '--node', '1']
    """
    nodes = variables.get("SLURM_STEP_NUM_TASKS", "1")
    return [] if nodes == "1" else ["--nodes", nodes, "--node", variables["SLURM_PROCID"]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
