"""The processes of a run on one machine: their names, commands, devices and environments."""

from __future__ import annotations

import itertools
import math
import signal
import sys
import time
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.device.visible import visible_devices
from asyncrl.launch.supervise import Supervisor
from asyncrl.launch.views.process_reports import ProcessReports
from asyncrl.system.cores import cores
from asyncrl.system.fork_server import ForkServer, own_server
from asyncrl.system.rank_process import LAUNCHED

QUEUE, LEARNER, DASH = "queue", "learner", "dash"


class Processes:
    """Starts the processes of a run as children of the supervisor.

    Attributes:
        address: The queue's; set once it listens, and before other processes are started.
        generators: Name of each, but for those that leave → its pool, its index in the pool.
        leaving: Name of each generator that was told to leave → when it is killed, by time.monotonic.
        pools: Name of each process of a pool → its model, its index in the pool.
    """

    def __init__(self, config: Config, folder: Path, supervisor: Supervisor, reports: ProcessReports) -> None:
        self._config, self._folder, self._supervisor, self._reports = config, folder, supervisor, reports
        self.address = ""
        self.generators = generator_names(config)
        self.leaving: dict[str, float] = {}
        self.pools = pool_names(config)

    @property
    def workers(self) -> list[str]:
        """Processes that end by themselves once the run is closed."""
        return [*self.generators, *self.pools]

    def start_queue(self, *words: str) -> None:
        self._start(QUEUE, process_command(self._folder, "queue", *words), threads=1, announces=True)

    def start_learner(self, *words: str) -> None:
        learner = self._config.learner
        command = process_command(self._folder, "learner", f"queue.address={self.address}", *words)
        several = learner.processes > 1
        self._start(LEARNER, command, learner.devices, learner.threads, starts_others=several)

    def start_dash(self) -> None:
        """The page for browsers. The run goes on without it."""
        command = [sys.executable, "-m", "asyncrl", "dash", str(self._folder)]
        self._supervisor.start(DASH, command, process_env(1), announces=True)

    def start_worker(self, name: str) -> None:
        """A generator, or a process of a pool."""
        words = (f"queue.address={self.address}", "--name", name)
        if name in self.pools:
            model, index = self.pools[name]
            place = self._config.placement.places[model]
            devices = share_of_devices(place.devices, index, place.processes)
            command = process_command(self._folder, "pool", model, *words)
            self._start(name, command, devices, place.threads, starts_others=place.ranks > 1)
            return
        pool, index = self.generators[name]
        section = self._config.generator_pools[pool]
        devices = share_of_devices(section.devices, index, section.count)
        command = process_command(self._folder, "generator", *words, *of_generators(pool))
        self._start(name, command, devices, section.threads)

    def scale(self, count: int, pool: str = "") -> tuple[list[str], list[str]]:
        """Start generators of a pool, or have its last ones leave, until there are `count`. Returns the names of
        both."""
        mine = [name for name, (of, _) in self.generators.items() if of == pool]
        every = ((generator_name(pool, i), (pool, i)) for i in itertools.count())
        free = (pair for pair in every if pair[0] not in {*mine, *self.leaving})
        more, fewer = dict(itertools.islice(free, max(0, count - len(mine)))), mine[count:]
        self.generators |= more
        for name in more:
            self.start_worker(name)
        launch, grace_s = self._config.launch, self._config.generator_pools[pool].grace_s
        for name in fewer:
            del self.generators[name]
            if self._supervisor.code(name) is None:
                self.leaving[name] = time.monotonic() + grace_s + launch.stop_deadline_s
                self._supervisor.send(name, signal.SIGTERM)
        return [*more], fewer

    def let_go(self, name: str) -> bool:
        """Take note of the end of a process. Returns whether it is a generator that `scale` counts no more: it left, or
        had died before it could."""
        left = self.leaving.pop(name, None) is not None
        return left or name not in (QUEUE, LEARNER, *self.workers)

    def kill_late(self) -> list[str]:
        """Kill generators that have not left in time. Returns their names."""
        late = [name for name, deadline in self.leaving.items() if time.monotonic() > deadline]
        for name in late:
            self.leaving[name] = math.inf
            self._supervisor.send(name, signal.SIGKILL)
        return late

    def _start(
        self,
        name: str,
        command: list[str],
        devices: str | None = None,
        threads: int | None = None,
        *,
        announces: bool = False,
        starts_others: bool = False,
    ) -> None:
        env = process_env(threads or shared_threads(self._config), devices)
        self._reports.started(name)
        self._supervisor.start(name, command, env, announces=announces, starts_others=starts_others)


def begin_imports(config: Config) -> ForkServer | None:
    """Begin to import what takes the processes of the run seconds; None: each of them imports it. vLLM is not among
    that: it begins threads. The earlier this is called, the sooner the run begins."""
    if not config.launch.fork:
        return None
    modules = ["asyncrl.cli", "asyncrl.learner.process", "asyncrl.generator.process"]
    if config.learner.own_backend is None and config.learner.backend == "megatron":
        modules.append("asyncrl.learner.backends.megatron.backend")
    if config.placement.pools:
        modules.append("asyncrl.pool.process")
    return own_server(modules, process_env(1))


def generator_name(pool: str, index: int) -> str:
    """
    >>> generator_name("", 0), generator_name("small", 1)
    ('generator-0', 'generator-small-1')
    """
    return f"generator-{pool}-{index}" if pool else f"generator-{index}"


def generator_names(config: Config) -> dict[str, tuple[str, int]]:
    """Name of each generator → its pool ('': of `generator` itself), its index in the pool."""
    pools = config.generator_pools.items()
    return {generator_name(of, i): (of, i) for of, pool in pools for i in range(pool.count)}


def of_generators(pool: str) -> tuple[str, ...]:
    """Words of a generator's command that name its pool."""
    return ("--pool", pool) if pool else ()


def pool_names(config: Config) -> dict[str, tuple[str, int]]:
    """Name of each process of a pool → its model, its index in the pool."""
    pools = config.placement.pools
    return {f"{of}-{i}": (of, i) for of, place in pools.items() for i in range(place.processes)}


def process_command(folder: Path, process: str, *words: str) -> list[str]:
    """The command of one process of the run: python -m asyncrl PROCESS <folder>/config.yaml …"""
    return [sys.executable, "-m", "asyncrl", process, str(folder / "config.yaml"), *words]


def process_env(threads: int, devices: str | None = None) -> dict[str, str]:
    """Variables that a process of the run gets on top of the launcher's environment."""
    env = {
        "OMP_NUM_THREADS": str(threads),
        # Two pools that spin on the same cores run several times slower than two that sleep.
        "OMP_WAIT_POLICY": "PASSIVE",
        # A file in the working folder must not hide a module of Python: a random.py there is none of ours.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        LAUNCHED: "1",
    }
    return {**env, **visible_devices(devices)}


def share_of_devices(devices: str | None, index: int, count: int) -> str | None:
    """The devices of a pool that process `index` of `count` may use.

    >>> [share_of_devices("4,5,6,7", i, 2) for i in range(2)], share_of_devices("0", 1, 2)
    (['4,6', '5,7'], '0')
    """
    if devices is None:
        return None
    every = devices.split(",")
    return ",".join(every[index::count] or [every[index % len(every)]])


def shared_threads(config: Config) -> int:
    """Cores of this machine shared out over the processes that compute."""
    pools = sum(place.processes * place.ranks for place in config.placement.pools.values())
    return max(1, cores() // (len(generator_names(config)) + config.learner.processes + pools))
