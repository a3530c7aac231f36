"""`asyncrl train --on ray`: the processes of a run on the nodes of a Ray cluster.

    launcher ──what each role needs──▸ placement groups
             ──LocalRun──▸ RaySupervisor ──▸ an actor for each process and node ──▸ asyncrl queue, learner, …

LocalRun (launch/local_run.py) decides when to restart, leave out and stop, as on one machine. Rollouts travel through
the queue and weights through the weight-broadcast service: Ray carries commands, signals and exit codes alone.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from asyncrl.cluster.ray.host import HostActor, StartOrder
from asyncrl.cluster.ray.hosted import HostedChild
from asyncrl.cluster.ray.needs import run_needs
from asyncrl.cluster.ray.reserve import Seat, connected, node_address, node_resources, reserved
from asyncrl.cluster.roles import reachable, refuse_devices
from asyncrl.config.schema import Config
from asyncrl.launch.folder.run_folder import locked_run_folder, remove_empty
from asyncrl.launch.local_run import train
from asyncrl.launch.processes import DASH, QUEUE
from asyncrl.launch.supervise import Child, Supervisor
from asyncrl.system.packages import imported
from asyncrl.telemetry import tracing

HOST_THREADS = 4
"""Of an actor: one waits for events while others take signals."""

Gpus = Literal["auto", "yes", "no"]


def train_on_ray(config: Config, address: str = "auto", gpus: Gpus = "auto") -> dict[str, Any]:
    """Run to the last version on a cluster and return the summary that the learner wrote.

    address: of the cluster, as `ray.init` takes it
    gpus: whether each rank that computes with a model gets a GPU; auto: if the cluster has any

    Raises, beside the errors of `train`, ConfigError for a configuration that names devices or an address without a
    cluster, and DeadlineError for room that the cluster does not have.
    """
    ray = imported("ray", "ray", "--on", "ray")
    refuse_devices(config, "Ray")
    with locked_run_folder(config) as folder:
        try:
            with connected(ray, address):
                return _train_on(ray, config, gpus)
        finally:
            remove_empty(folder)


def _train_on(ray: Any, config: Config, gpus: Gpus) -> dict[str, Any]:
    nodes, seconds = node_resources(ray), config.launch.start_deadline_s
    on_gpus = gpus == "yes" or (gpus == "auto" and any(node.get("GPU", 0) for node in nodes))
    needs = run_needs(config, nodes, on_gpus)
    print(f"asyncrl: on Ray: {'; '.join(map(str, needs))}", file=sys.stderr, flush=True)
    with reserved(ray, needs, seconds) as seats:
        config = reachable(config, node_address(ray, seats[QUEUE][0]))
        return train(config, partial(RaySupervisor, ray=ray, seats=seats, start_s=seconds))


class RaySupervisor(Supervisor):
    """Starts the processes of a run on the cluster, and its page for browsers on this machine.

    logs: in the run folder · seats: of each process by its name · start_s: longest wait for a node that has room
    """

    def __init__(self, logs: Path, *, ray: Any, seats: Mapping[str, Sequence[Seat]], start_s: float) -> None:
        super().__init__(logs)
        self._run = logs.parent.absolute()
        self._ray, self._seats, self._start_s = ray, seats, start_s

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
        if name == DASH:
            super().start(name, command, env, announces=announces, streams=streams, passed=passed)
            return
        tracing.event("started", process=name)
        # `asyncrl scale` may want more generators of a pool than there are seats.
        seats = self._seats.get(name) or [Seat(None, 0, self._seats[f"{name.rpartition('-')[0]}-0"][0].need)]
        config = (self._run / "config.yaml").read_text(encoding="utf-8")
        starts = []
        for node, seat in enumerate(seats):
            share = ["--nodes", str(len(seats)), "--node", str(node)] if len(seats) > 1 else []
            order = StartOrder(
                name=f"{name}-node-{node}" if node else name,
                words=(*command[1:], *share),
                env={**(env or {}), "OMP_NUM_THREADS": str(seat.need.threads)},
                announces=announces,
                folder=os.getcwd(),
                run=str(self._run),
                config=config,
            )
            starts.append((self._actor(seat), order))
        end = partial(self._hosted_ended, name)
        self._children[name] = HostedChild(self._ray, starts, self._start_s, self._events.put, end)

    def _actor(self, seat: Seat) -> Any:
        in_group = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        place = "SPREAD"
        if seat.group is not None:
            place = in_group(placement_group=seat.group, placement_group_bundle_index=seat.index)
        needs = {"num_cpus": seat.need.cpus, "num_gpus": seat.need.gpus}
        remote = self._ray.remote(**needs, max_concurrency=HOST_THREADS, scheduling_strategy=place)
        return remote(HostActor).remote()

    def _hosted_ended(self, name: str, code: int, lines: list[str]) -> None:
        """lines: for the end of its log, in the form of the last message of a command"""
        # A full disk must not hide the end.
        with suppress(OSError), self.log(name).open("a", encoding="utf-8") as log:
            log.writelines(f"asyncrl train: {line}\n" for line in lines)
        self._report_end(name, code)

    def _kill(self, child: Child) -> None:
        if isinstance(child, HostedChild):
            child.send_signal(signal.SIGKILL)
        else:
            super()._kill(child)
