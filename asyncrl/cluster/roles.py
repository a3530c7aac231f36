"""The roles of a run: from the configuration alone, the same for every cluster.

Config ──▸ a Role for the queue, the learner, the generators and each pool ──▸ ray/ · kubernetes/ · slurm/

A configuration that leaves the machine is changed in two points: no devices by number, and a queue that other nodes
reach.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.config.sections.generator import key_of_pool
from asyncrl.config.sections.placement import REWARDS
from asyncrl.launch.folder.run_folder import run_folder
from asyncrl.launch.processes import LEARNER, QUEUE, generator_names, of_generators, pool_names
from asyncrl.rpc.keys import SERVER_FILE, make_keys

GENERATORS = "generators"

NodeResources = Mapping[str, float]
"""Resources of one node: {"CPU": 64.0, "GPU": 8.0, …}."""


@dataclass(frozen=True, slots=True)
class Role:
    """Processes of one kind.

    verb, operands: words of the command before and after CONFIG
    processes: their names
    ranks: of one process · threads: of one rank · cpus, gpus: of one process
    grace_s: that a process may work on after SIGTERM
    """

    name: str
    verb: str
    processes: tuple[str, ...]
    ranks: int = 1
    threads: int = 1
    cpus: int = 1
    gpus: int = 0
    operands: tuple[str, ...] = ()
    grace_s: float = 0.0

    def words(self, config: str, *more: str) -> list[str]:
        """The command of one process, after `asyncrl`.

        >>> Role("teacher", "pool", ("teacher-0",), operands=("teacher",)).words("c.yaml", "--name", "teacher-0")
        ['pool', 'c.yaml', 'teacher', '--name', 'teacher-0']
        """
        return [self.verb, config, *self.operands, *more]


def roles(config: Config, gpus: bool) -> list[Role]:
    """All roles of the run: queue, learner, generators, pools. gpus: whether each rank that computes with a model gets
    a GPU."""
    return [
        Role(QUEUE, QUEUE, (QUEUE,)),
        _learner(config, int(gpus)),
        *_generators(config, int(gpus)),
        *_pools(config, int(gpus)),
    ]


def _learner(config: Config, gpus: int) -> Role:
    ranks, threads = config.learner.processes, config.learner.threads or 1
    return Role(LEARNER, LEARNER, (LEARNER,), ranks, threads, ranks * threads, ranks * gpus)


def _generators(config: Config, gpus: int) -> Iterator[Role]:
    """The role of each pool of generators. One whose `devices` are '' computes on CPUs."""
    every = generator_names(config)
    for pool, section in config.generator_pools.items():
        ranks, threads = section.ranks, section.threads or 1
        on_device = section.makes_real_tokens and not section.behind_http and section.devices != ""
        yield Role(
            f"{GENERATORS}_{pool}" if pool else GENERATORS,
            "generator",
            tuple(name for name, (of, _) in every.items() if of == pool),
            ranks,
            threads,
            max(ranks, threads),
            gpus * ranks * on_device,
            of_generators(pool),
            section.grace_s,
        )


def _pools(config: Config, gpus: int) -> list[Role]:
    names, made = pool_names(config), []
    for model, place in config.placement.pools.items():
        processes = tuple(name for name, (of, _) in names.items() if of == model)
        ranks, threads, on_device = place.ranks, place.threads or 1, model != REWARDS
        role = Role(
            model, "pool", processes, ranks, threads, ranks * threads, gpus * ranks * on_device, (model,)
        )
        made.append(role)
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


def refuse_devices(config: Config, cluster: str) -> None:
    """Raise ConfigError where the configuration names the devices of processes, or has two pools share some. A pool of
    generators with '' for none names none. cluster: who gives devices"""
    pools = config.generator_pools.items()
    named = {key_of_pool(name): generators.devices or None for name, generators in pools}
    named["learner"] = config.learner.devices
    named |= {config.placement.key_of(name): place.devices for name, place in config.placement.pools.items()}
    for pool, devices in named.items():
        rule = (
            f"names devices of one machine, and {cluster} gives each process those that are free on its node"
        )
        require(devices is None, f"{pool}.devices", devices, rule, "leave it out")
    rule = f"shares devices, and {cluster} gives each process some of its own"
    require(not config.placement.colocate, "placement.colocate", True, rule, "set placement.colocate=false")


def reachable(config: Config, host: str) -> Config:
    """The configuration with which the queue listens at `host`, at the port of queue.address, for owners of keys alone:
    those of queue.keys, else keys in the run folder, which are made."""
    keys = config.queue.keys
    if keys is None:
        folder = run_folder(config).absolute() / "keys"
        if not (folder / SERVER_FILE).exists():
            make_keys(folder)
        keys = str(folder)
    port = config.queue.address.rpartition(":")[2]
    name = f"[{host}]" if ":" in host else host
    queue = dataclasses.replace(config.queue, address=f"tcp://{name}:{port}", keys=keys)
    return dataclasses.replace(config, queue=queue)
