"""The needs of a run on a Ray cluster: from the configuration and the nodes, without Ray.

roles, nodes ──▸ one RoleNeed for the queue, the learner, the generators and each pool ──▸ a placement group each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.cluster.roles import NodeResources, Role, fewest_nodes, roles
from asyncrl.config.schema import Config
from asyncrl.launch.processes import LEARNER


@dataclass(frozen=True, slots=True)
class RoleNeed:
    """The needs of one role.

    processes: their names; one that has its ranks on several nodes stands here once for each node
    cpus, gpus: of one of these
    threads: OMP_NUM_THREADS of one rank
    strategy: of the placement group; STRICT_SPREAD: each of them on another node
    """

    role: str
    processes: tuple[str, ...]
    cpus: int
    gpus: int = 0
    threads: int = 1
    strategy: str = "SPREAD"

    @property
    def bundle(self) -> dict[str, int]:
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}

    def __str__(self) -> str:
        """
        >>> str(RoleNeed("learner", ("learner", "learner"), 4, 4))
        'learner 2 × (CPU 4, GPU 4)'
        """
        each = ", ".join(f"{name} {count}" for name, count in self.bundle.items())
        return f"{self.role} {len(self.processes)} × ({each})"


def run_needs(config: Config, nodes: Sequence[NodeResources], gpus: bool) -> list[RoleNeed]:
    """The needs of each role of the run. gpus: whether each rank that computes with a model gets a GPU."""
    return [
        _spread_need(role, nodes)
        if role.name == LEARNER
        else RoleNeed(role.name, role.processes, role.cpus, role.gpus, role.threads)
        for role in roles(config, gpus)
    ]


def _spread_need(role: Role, nodes: Sequence[NodeResources]) -> RoleNeed:
    """The need of a process whose ranks may lie on several nodes."""
    count = fewest_nodes(role.ranks, {"CPU": role.threads, "GPU": role.gpus // role.ranks}, nodes)
    share = role.processes * count
    return RoleNeed(role.name, share, role.cpus // count, role.gpus // count, role.threads, "STRICT_SPREAD")
