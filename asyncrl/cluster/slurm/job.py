"""`asyncrl launch slurm`: the script of a job. Each role has a component of its own, whose nodes are alike.

component 0   nodes of the learner; on the first one also the launcher and the queue
component 1   nodes of the generators
component 2…  nodes of each pool
"""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.cluster.roles import Role, fewest_nodes, refuse_devices, roles
from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.processes import LEARNER, QUEUE

LAUNCHER_CPUS = 1
"""For the launcher and the queue."""
UNKNOWN = 1 << 20
"""CPUs of a node, where nobody says how many there are: as many as are needed."""
SUBMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class JobOrder:
    """partition, account, time: as `sbatch` takes them; none: its defaults · more: further words for all components
    gpus_per_node, cpus_per_node: of the nodes; no GPUs: no rank gets one; no CPUs: nobody says how many
    """

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    gpus_per_node: int = 8
    cpus_per_node: int = 0
    more: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True)
class Component:
    """nodes: their number · cpus, gpus: of one of them"""

    role: Role
    nodes: int
    cpus: int
    gpus: int

    def words(self) -> list[str]:
        gpus = [f"--gpus-per-node={self.gpus}"] if self.gpus else []
        return [f"--nodes={self.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={self.cpus}", *gpus]


def components(config: Config, order: JobOrder) -> list[Component]:
    """Raises ConfigError for a process that no node has room for."""
    refuse_devices(config, "Slurm")
    every = [role for role in roles(config, order.gpus_per_node > 0) if role.name != QUEUE]
    return [_component(role, order) for role in every]


def _component(role: Role, order: JobOrder) -> Component:
    cpus = order.cpus_per_node or UNKNOWN
    if role.name == LEARNER:
        cpus -= LAUNCHER_CPUS
        node = {"CPU": cpus, "GPU": order.gpus_per_node}
        rank = {"CPU": role.threads, "GPU": role.gpus // role.ranks}
        nodes = fewest_nodes(role.ranks, rank, [node] * role.ranks)
        if role.cpus > nodes * cpus or role.gpus > nodes * order.gpus_per_node:
            nodes = role.ranks  # no node holds one of them
        made = Component(role, nodes, role.cpus // nodes + LAUNCHER_CPUS, role.gpus // nodes)
    else:
        room = min(cpus // role.cpus, order.gpus_per_node // role.gpus if role.gpus else cpus)
        nodes = math.ceil(len(role.processes) / max(1, room))
        share = math.ceil(len(role.processes) / nodes)
        made = Component(role, nodes, share * role.cpus, share * role.gpus)
    for name, value, needed in (
        ("--gpus-per-node", order.gpus_per_node, made.gpus),
        ("--cpus-per-node", order.cpus_per_node or UNKNOWN, made.cpus),
    ):
        rule = f"{role.name}: a node must have {needed} for the ranks that lie on it together"
        require(
            needed <= value, name, value, rule, "name larger nodes, or give a process fewer ranks or threads"
        )
    return made


def script(config: Config, order: JobOrder, command: Sequence[str]) -> str:
    """The job. command: of the launcher"""
    lines = [f"#SBATCH {' '.join(map(shlex.quote, words))}" for words in _options(config, order)]
    # The launcher itself must get the signals of the script, and each once.
    return "\n".join(["#!/bin/sh", *lines, f"exec {shlex.join(command)}"]) + "\n"


def _options(config: Config, order: JobOrder) -> Iterator[list[str]]:
    """The options of the job, then those of each component."""
    named = {"partition": order.partition, "account": order.account, "time": order.time}
    of_all = [*(f"--{name}={value}" for name, value in named.items() if value is not None), *order.more]
    output = Path(config.run.dir).absolute() / f"{config.run.name}.slurm-%j.log"
    seconds = math.ceil(2 * config.launch.stop_deadline_s)
    yield [f"--job-name={config.run.name}", "--requeue", "--open-mode=append", f"--output={output}"]
    yield [f"--signal=B:USR1@{seconds}"]
    for index, component in enumerate(components(config, order)):
        if index:
            yield ["hetjob"]
        yield [*of_all, *component.words()]


def launcher_command(config_file: str, words: Sequence[str]) -> list[str]:
    file = str(Path(config_file).absolute())
    return [sys.executable, "-m", "asyncrl", "train", file, "--on", "slurm", *words]


def submit(config: Config, text: str) -> str:
    """Returns the number of the job. Raises ConfigError for a script that Slurm refuses."""
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=text, capture_output=True, text=True, timeout=SUBMIT_S
        )
    except FileNotFoundError:
        rule, remedy = (
            "is no command here",
            "run this where jobs are submitted, or print the script with --dry-run",
        )
        raise ConfigError("sbatch", "sbatch", rule, remedy) from None
    if done.returncode:
        why = done.stderr.strip().rpartition("\n")[2]
        remedy = "look at the script with --dry-run; --sbatch adds words for the components"
        raise ConfigError("sbatch", "the job of the run", f"is refused ({why})", remedy)
    return done.stdout.strip().partition(";")[0]
