"""`asyncrl train --on ray` on a real cluster of Ray: several of its nodes on this machine, each with one CPU."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import (
    DEADLINE_S,
    FOR_EVER,
    STARTS_S,
    Process,
    finished,
    interrupt,
    newest_checkpoint,
    ran,
    started,
    succeeded,
    summary_of,
    until,
    until_trained,
    versions,
)

from asyncrl.cluster.ray.needs import RoleNeed
from asyncrl.cluster.ray.reserve import connected, reserved
from asyncrl.cluster.ray.run import RaySupervisor

pytestmark = pytest.mark.slow


class RayNodes:
    """A head, which the launchers join and which runs none of their processes, and nodes of one CPU each: each with an
    address of its own on loopback."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        self._cluster, self._count = Cluster(), 1
        self.add(cpus=0)
        self.address: str = self._cluster.address
        for _ in range(count):
            self.add()

    def add(self, cpus: int = 1, gpus: int = 0) -> Any:
        """gpus: that Ray believes to be there"""
        self._count += 1
        place = {"node_ip_address": f"127.0.0.{self._count}", "include_dashboard": False}
        return self._cluster.add_node(num_cpus=cpus, num_gpus=gpus, **place)

    def remove(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def lose_node_of(self, process: psutil.Process) -> None:
        """As if its power had failed; another one comes in its place."""
        above = {one.pid for one in process.parents()}
        (node,) = [one for one in self._cluster.worker_nodes if above & {self._raylet(one)}]
        self.remove(node)

    def close(self) -> None:
        self._cluster.shutdown()

    def _raylet(self, node: Any) -> int:
        return int(node.all_processes["raylet"][0].process.pid)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    pytest.importorskip("ray.cluster_utils")
    nodes = RayNodes(4)
    yield nodes
    nodes.close()


@contextmanager
def launched(config: Path, nodes: RayNodes, *words: str) -> Iterator[Process]:
    """`asyncrl train` on the cluster; no process of it is left."""
    on = ("--on", "ray", "--ray-address", nodes.address)
    with started("asyncrl", "train", str(config), *on, *words, executed=True) as launcher:
        yield launcher
    until(lambda: not processes_of(config), "the end of all processes of the run")


def processes_of(config: Path, *words: str) -> list[psutil.Process]:
    """Processes of the run, on all nodes."""
    file, found = str(config.parent / "it" / "config.yaml"), []
    for one in psutil.process_iter(["cmdline"]):
        line = one.info["cmdline"] or []
        if file in line and {"asyncrl", *words} <= {*line} and one.status() != psutil.STATUS_ZOMBIE:
            found.append(one)
    return found


def the_process(config: Path, *words: str) -> psutil.Process:
    """The one with these words; waits for it."""
    found: psutil.Process = until(
        lambda: next(iter(processes_of(config, *words)), None), f"a process with {words}"
    )
    return found


def test_a_run_outlives_a_lost_node_and_a_killed_learner_and_ctrl_c_saves(
    config_file: Path, nodes: RayNodes
) -> None:
    run = config_file.parent / "it"
    with launched(config_file, nodes, FOR_EVER, "generator.count=2") as launcher:
        until_trained(run, 2, launcher, deadline_s=STARTS_S)
        lost = the_process(config_file, "generator", "generator-0")
        nodes.lose_node_of(lost)
        nodes.add()
        until(lambda: not lost.is_running(), "the end of the generator", launcher)
        again = until(
            lambda: processes_of(config_file, "generator", "generator-0"), "the generator again", launcher
        )
        assert [one.pid for one in again] != [lost.pid]
        until_trained(run, versions(run)[-1] + 2, launcher)

        until(lambda: newest_checkpoint(run) >= 2, "a checkpoint", launcher)
        killed = the_process(config_file, "learner")
        killed.kill()
        until(lambda: not killed.is_running(), "the end of the learner", launcher)
        until(lambda: processes_of(config_file, "learner"), "the learner again", launcher)
        until_trained(run, versions(run)[-1] + 2, launcher)

        interrupt(launcher)
        code, printed = finished(launcher)
    assert code == 130, printed
    assert "generator-0 ended (killed by SIGKILL) and is started again" in printed
    assert "learner ended (killed by SIGKILL) and is started again from the newest checkpoint" in printed
    assert "run.resume=true goes on" in printed
    assert newest_checkpoint(run) == versions(run)[-1]
    assert "its node or its actor is lost" in (run / "logs" / "generator-0.log").read_text()
    assert {path.name for path in (run / "logs").glob("*.log")} == {
        "queue.log",
        "learner.log",
        "generator-0.log",
        "generator-1.log",
    }
    assert oct((run / "keys" / "server.key").stat().st_mode & 0o777) == "0o600"


def test_generators_join_later_and_a_killed_launcher_leaves_no_process(
    config_file: Path, nodes: RayNodes
) -> None:
    """The run goes on with a learner that is larger than a node, spread over two."""
    run = config_file.parent / "it"
    with launched(config_file, nodes, FOR_EVER) as launcher:
        until(lambda: newest_checkpoint(run) >= 2, "a checkpoint", launcher)
        ran("asyncrl", "scale", str(run), "2")
        the_process(config_file, "generator", "generator-1")
        launcher.kill()
    last = newest_checkpoint(run) + 2
    words = ("run.resume=true", f"run.versions={last}", "learner.processes=2")
    with launched(config_file, nodes, *words) as launcher:
        printed = succeeded(launcher)
    assert "on Ray: queue 1 × (CPU 1); learner 2 × (CPU 1); generators 1 × (CPU 1)" in printed
    assert versions(run) == list(range(1, last + 1))
    assert (run / "logs" / "learner-node-1.log").exists()
    assert summary_of(run)["versions"] == last


def test_a_cluster_without_room_is_named_and_nothing_is_started(config_file: Path, nodes: RayNodes) -> None:
    words = ("generator.count=9", "launch.start_deadline_s=3")
    with launched(config_file, nodes, *words) as launcher:
        code, printed = finished(launcher)
    assert code == 4
    assert "room for generators 9 × (CPU 1) did not come; its 5 nodes have CPU 4, GPU 0" in printed
    assert not (config_file.parent / "it" / "config.yaml").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_waits_for_room_can_be_stopped(
    config_file: Path, nodes: RayNodes, number: signal.Signals
) -> None:
    with launched(config_file, nodes, "generator.count=9", "launch.start_deadline_s=1000") as launcher:
        assert launcher.stdout is not None
        until(lambda: "on Ray:" in launcher.stdout.readline(), "the wait", launcher)  # type: ignore[union-attr]
        launcher.send_signal(number)
        code, _ = finished(launcher)
    assert code == (130 if number == signal.SIGINT else -signal.SIGTERM)


def test_each_process_sees_the_gpus_that_ray_gave_it(tmp_path: Path, nodes: RayNodes) -> None:
    import ray

    names = ("generator-0", "generator-1")
    print_gpus = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    (tmp_path / "config.yaml").touch()
    node = nodes.add(cpus=2, gpus=4)
    try:
        needs = [RoleNeed("generators", names, cpus=1, gpus=2)]
        with connected(ray, nodes.address), reserved(ray, needs, DEADLINE_S) as seats:
            supervisor = RaySupervisor(tmp_path / "logs", ray=ray, seats=seats, start_s=DEADLINE_S)
            for name in names:
                supervisor.start(name, print_gpus)
            assert supervisor.wait_ended(names, DEADLINE_S) == []
    finally:
        nodes.remove(node)
    assert {(tmp_path / "logs" / f"{name}.log").read_text() for name in names} == {"0,1\n", "2,3\n"}
