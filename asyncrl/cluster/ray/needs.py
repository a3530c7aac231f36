"""The needs of a run on a Ray cluster: from the configuration and the nodes, without Ray.

Config, nodes ──▸ one RoleNeed for the queue, the learner, the generators and each pool ──▸ a placement group each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config.schema import Config
from asyncrl.config.sections.placement import REWARDS
from asyncrl.launch.processes import LEARNER, QUEUE, generator_names, pool_names

NodeResources = Mapping[str, float]
"""Resources of one node, as Ray counts it: {"CPU": 64.0, "GPU": 8.0, …}."""


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
        RoleNeed(QUEUE, (QUEUE,), cpus=1),
        _learner_need(config, nodes, int(gpus)),
        _generator_need(config, int(gpus)),
        *_pool_needs(config, int(gpus)),
    ]


def _learner_need(config: Config, nodes: Sequence[NodeResources], gpus: int) -> RoleNeed:
    ranks, threads = config.learner.processes, config.learner.threads or 1
    count = fewest_nodes(ranks, {"CPU": threads, "GPU": gpus}, nodes)
    share = ranks // count
    return RoleNeed(LEARNER, (LEARNER,) * count, share * threads, share * gpus, threads, "STRICT_SPREAD")


def _generator_need(config: Config, gpus: int) -> RoleNeed:
    generator = config.generator
    ranks = generator.vllm.tensor_parallel * generator.vllm.data_parallel if generator.on_vllm else 1
    on_device = generator.makes_real_tokens and not generator.behind_http
    threads = generator.threads or 1
    names = tuple(generator_names(config))
    return RoleNeed("generators", names, max(ranks, threads), gpus * ranks * on_device, threads)


def _pool_needs(config: Config, gpus: int) -> list[RoleNeed]:
    names = pool_names(config)
    made = []
    for model, place in config.placement.pools.items():
        processes = tuple(name for name, (of, _) in names.items() if of == model)
        threads, on_device = place.threads or 1, model != REWARDS
        need = RoleNeed(model, processes, place.ranks * threads, gpus * place.ranks * on_device, threads)
        made.append(need)
    return made


def fewest_nodes(ranks: int, rank: Mapping[str, int], nodes: Sequence[NodeResources]) -> int:
    """The smallest number of nodes that have room for the ranks in equal parts, whatever else runs there now; 1 if
    they have none. rank: what each rank takes

    >>> fewest_nodes(8, {"CPU": 1, "GPU": 1}, [{"CPU": 9, "GPU": 8}, {"CPU": 9, "GPU": 4}])
    1
    >>> fewest_nodes(8, {"CPU": 1, "GPU": 1}, [{"CPU": 9, "GPU": 4}, {"CPU": 9, "GPU": 4}])
    2
    """
    for count in range(1, ranks + 1):
        needs = {name: each * ranks / count for name, each in rank.items()}
        fits = sum(all(node.get(name, 0) >= most for name, most in needs.items()) for node in nodes)
        if ranks % count == 0 and fits >= count:
            return count
    return 1
