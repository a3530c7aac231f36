"""The nodes that a job has, from the variables of its script: a seat for each process of the run.

SLURM_JOB_NODELIST_HET_GROUP_0, … ──▸ nodes of each component ──▸ Seat of each process: its nodes and its devices there
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.cluster.roles import Role, roles
from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.processes import LEARNER, QUEUE
from asyncrl.sync.channels.addresses import LOOPBACK, own_address

ANSWER_S = 60.0
"""For an answer of Slurm's controller."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of a process. group: of its component, none for a job of one · cpus: of the component, on a node
    first, gpus: it gets so many of those that the job has on the node, from the first one on"""

    group: int | None
    nodes: tuple[str, ...]
    threads: int
    cpus: str
    first: int = 0
    gpus: int = 0

    def words(self) -> list[str]:
        """For srun. Steps share what the component has on a node; which devices, their processes choose themselves."""
        count = len(self.nodes)
        group = [] if self.group is None else [f"--het-group={self.group}"]
        shape = [f"--nodes={count}", f"--ntasks={count}", f"--nodelist={','.join(self.nodes)}"]
        return [
            *group,
            *shape,
            f"--cpus-per-task={self.cpus}",
            "--overlap",
            "--input=none",
            "--kill-on-bad-exit=1",
        ]


class Allocation:
    """The nodes of this job. Raises ConfigError outside of a job, and in one of another shape."""

    def __init__(self, config: Config, variables: Mapping[str, str]) -> None:
        self._variables = variables
        remedy = "submit the run with `asyncrl launch slurm`"
        require("SLURM_JOB_ID" in variables, "--on", "slurm", "runs inside of a job of Slurm", remedy)
        gpus = any(name.startswith("SLURM_GPUS") for name in variables)
        self._roles = [role for role in roles(config, gpus) if role.name != QUEUE]
        have, want = int(variables.get("SLURM_HET_SIZE", 1)), len(self._roles)
        rule = f"the job has {have} components, and the run needs {want}"
        require(have == want, "--on", "slurm", rule, remedy)
        self._nodes = [hostnames(self._of("SLURM_JOB_NODELIST", index)) for index in range(want)]

    @property
    def restarts(self) -> int:
        """The number of times that the job was queued again."""
        return int(self._variables.get("SLURM_RESTART_COUNT", 0))

    def seat(self, process: str) -> Seat:
        """The seat of any process but the queue. Generators beyond the count of their pool share the devices of
        others."""
        kind, _, number = process.rpartition("-")
        for index, role in enumerate(self._roles):
            if process in role.processes:
                return self._seat(index, role, role.processes.index(process))
            if role.verb == "generator" and role.processes[0] == f"{kind}-0":
                return self._seat(index, role, int(number) % len(role.processes))
        raise KeyError(process)

    def address(self) -> str:
        """The address of this node, as the other nodes of the job see it."""
        here = self._variables.get("SLURMD_NODENAME", "")
        others = [node for nodes in self._nodes for node in nodes if node != here]
        return own_address(node_address(others[0]), 1) if others else LOOPBACK

    def _seat(self, index: int, role: Role, number: int) -> Seat:
        nodes, group = self._nodes[index], index if "SLURM_HET_SIZE" in self._variables else None
        cpus = self._of("SLURM_CPUS_PER_TASK", index)
        if role.name == LEARNER:
            return Seat(group, tuple(nodes), role.threads, cpus, 0, role.gpus // len(nodes))
        share = math.ceil(len(role.processes) / len(nodes))
        node, slot = divmod(number, share)
        return Seat(group, (nodes[node],), role.threads, cpus, slot * role.gpus, role.gpus)

    def _of(self, name: str, index: int) -> str:
        """The value of a variable for one component."""
        return self._variables.get(f"{name}_HET_GROUP_{index}") or self._variables[name]


def hostnames(nodelist: str) -> list[str]:
    """Names of nodes, as 'n[1-3]' lists them."""
    return ask("show", "hostnames", nodelist).split()


def node_address(node: str) -> str:
    for field in ask("--oneliner", "show", "node", node).split():
        name, _, value = field.partition("=")
        if name == "NodeAddr":
            return value
    raise ConfigError("--on", "slurm", f"Slurm has no address of node {node}", "look at scontrol show node")


def ask(*words: str) -> str:
    """The output of scontrol. Raises ConfigError if it fails."""
    done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=ANSWER_S)
    if done.returncode:
        rule = f"scontrol {' '.join(words)} failed ({done.stderr.strip() or done.stdout.strip()})"
        raise ConfigError("--on", "slurm", rule, "look at this cluster's controller")
    return done.stdout
