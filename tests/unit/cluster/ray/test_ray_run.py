"""A run on a cluster, by stand-ins for its processes and for Ray: LocalRun decides as on one machine."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_ray import FakeRay

from asyncrl.cli import main
from asyncrl.cluster.ray import run as ray_run
from asyncrl.cluster.ray.needs import RoleNeed
from asyncrl.cluster.ray.reserve import Seat, connected, node_address, reserved
from asyncrl.cluster.ray.run import Gpus, RaySupervisor, train_on_ray
from asyncrl.config.schema import Config, LaunchConfig, RunConfig
from asyncrl.errors import ConfigError, DeadlineError, ProcessDiedError
from asyncrl.launch import local_run, processes
from asyncrl.launch.folder.run_folder import run_folder
from asyncrl.launch.supervise import ChildEnded
from asyncrl.system import packages

SHELL = "import os, sys; os.execvp('sh', ['sh', '-c', *sys.argv[1:]])"
QUEUE = "for fd; do :; done; echo tcp://127.0.0.1:1 >/dev/fd/$fd; exec sleep 600"
DONE = 'echo "{\\"versions\\": 3}" > $(dirname $1)/summary.json'
NODE = {"CPU": 8.0}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    launch = LaunchConfig(generator_restarts=1, restart_pause_s=0.0, stop_deadline_s=20.0, quiet=True)
    return Config(run=RunConfig(name="it", dir=str(tmp_path)), launch=launch)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What each process of the run does."""
    scripts = {"queue": QUEUE, "learner": DONE, "generator": "exit 0"}

    def command(folder: Path, process: str, *words: str) -> list[str]:
        shell = [sys.executable, "-c", SHELL, scripts[process]]
        return [*shell, process, str(folder / "config.yaml"), *words]

    monkeypatch.setattr(processes, "process_command", command)
    return scripts


def seats(**more: int) -> Mapping[str, Sequence[Seat]]:
    """One for each process, and as many as named."""
    counts = {"queue": 1, "learner": 1, "generator-0": 1} | more
    need = RoleNeed("role", (), cpus=2, gpus=1, threads=5)
    return {name: [Seat("group", i, need) for i in range(count)] for name, count in counts.items()}


def train(config: Config, ray: FakeRay, start_s: float = 60.0, **more: int) -> dict[str, Any]:
    return local_run.train(config, partial(RaySupervisor, ray=ray, seats=seats(**more), start_s=start_s))


def test_the_processes_run_below_actors_and_the_run_ends_well(
    config: Config, scripts: dict[str, str], tmp_path: Path
) -> None:
    scripts["generator"] = 'echo "$OMP_NUM_THREADS $2 $4"'
    ray = FakeRay(NODE)
    assert train(config, ray) == {"versions": 3}
    assert len(ray.actors) == 3
    place = {"placement_group": "group", "placement_group_bundle_index": 0}
    wanted = {
        "num_cpus": 2,
        "num_gpus": 1,
        "max_concurrency": ray_run.HOST_THREADS,
        "scheduling_strategy": place,
    }
    assert ray.options[0] == wanted
    log = tmp_path / "it" / "logs" / "generator-0.log"
    assert log.read_text() == "5 queue.address=tcp://127.0.0.1:1 generator-0\n"


def test_a_generator_whose_node_is_lost_is_started_on_another_one(
    config: Config,
    scripts: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_run, "REFRESH_S", 0.05)
    folder = tmp_path / "it"
    scripts["generator"] = (
        "cd $(dirname $1); [ -e first ] && { touch second; exit 0; }; touch first; exec sleep 600"
    )
    scripts["learner"] = f"cd $(dirname $1); while [ ! -e second ]; do sleep 0.05; done; {DONE}"
    ray = FakeRay(NODE)

    class Losing(RaySupervisor):
        def next_event(self, seconds: float) -> Any:
            if (folder / "first").exists() and len(ray.actors) == 3:
                ray.actors[2].lose()
            return super().next_event(seconds)

    found = local_run.train(config, partial(Losing, ray=ray, seats=seats(), start_s=60.0))
    assert found == {"versions": 3}
    assert len(ray.actors) == 4
    assert "generator-0 ended (killed by SIGKILL) and is started again, 1 of 1" in capsys.readouterr().err
    lost = "asyncrl train: its node or its actor is lost: Its node has died.\n"
    assert lost in (folder / "logs" / "generator-0.log").read_text()


def test_a_learner_on_two_nodes_is_one_process_of_the_run(
    config: Config, scripts: dict[str, str], tmp_path: Path
) -> None:
    scripts["learner"] = f'echo "$@"; {DONE}'
    assert train(config, FakeRay(NODE), learner=2) == {"versions": 3}
    logs = tmp_path / "it" / "logs"
    assert (logs / "learner.log").read_text().strip().endswith("--nodes 2 --node 0")
    assert (logs / "learner-node-1.log").read_text().strip().endswith("--nodes 2 --node 1")


def test_a_learner_that_finds_no_node_ends_the_run_by_name(config: Config, scripts: dict[str, str]) -> None:
    class OfTheQueue(FakeRay):
        def get(self, answer: Any, timeout: float) -> Any:
            return super().get(answer, 60.0 if len(self.actors) < 2 else timeout)

    # Time enough for the learner to end before its generator is started again.
    patient = dataclasses.replace(config, launch=dataclasses.replace(config.launch, restart_pause_s=60.0))
    with pytest.raises(ProcessDiedError, match="room for learner did not come; its 1 nodes") as caught:
        train(patient, OfTheQueue(NODE), start_s=0.0)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(("kind", "gpus"), [("generator", 1), ("generator-small", 4)])
def test_generators_that_join_later_run_where_there_is_room(tmp_path: Path, kind: str, gpus: int) -> None:
    """`asyncrl scale`: nothing was reserved for them. They need as much as the others of their pool."""
    ray, folder = FakeRay(NODE), tmp_path / "it"
    small = {"generator-small-0": [Seat("group", 0, RoleNeed("role", (), cpus=2, gpus=4))]}
    supervisor = RaySupervisor(folder / "logs", ray=ray, seats={**seats(), **small}, start_s=60.0)
    (folder / "config.yaml").touch()
    with supervisor.interrupts():
        supervisor.start(f"{kind}-1", [sys.executable, "-c", "raise SystemExit(3)"])
        assert supervisor.next_event(60.0) == ChildEnded(f"{kind}-1", 3)
    assert (ray.options[0]["num_gpus"], ray.options[0]["scheduling_strategy"]) == (gpus, "SPREAD")


def test_the_page_for_browsers_runs_here(config: Config, tmp_path: Path) -> None:
    supervisor = RaySupervisor(tmp_path / "logs", ray=FakeRay(NODE), seats={}, start_s=1.0)
    with supervisor.interrupts():
        supervisor.start("dash", ["sh", "-c", "exit 3"])
        assert supervisor.next_event(60.0) == ChildEnded("dash", 3)
        supervisor.start("dash", ["sleep", "600"])
        supervisor.kill_all()
        assert supervisor.next_event(60.0) == ChildEnded("dash", -9)


def test_all_that_a_run_needs_is_held_inside_and_freed_after() -> None:
    ray = FakeRay({"CPU": 1.0}, NODE)
    needs = [
        RoleNeed("queue", ("queue",), 1),
        RoleNeed("learner", ("learner",) * 2, 4, 0, 1, "STRICT_SPREAD"),
    ]
    with reserved(ray, needs, 60.0) as held:
        assert {name: [seat.index for seat in them] for name, them in held.items()} == {
            "queue": [0],
            "learner": [0, 1],
        }
        group = held["learner"][1].group
        assert (group.bundles, group.strategy) == ([{"CPU": 4}] * 2, "STRICT_SPREAD")
        assert node_address(ray, held["queue"][0]) == "10.0.0.1"
        assert ray.removed == []
    assert len(ray.removed) == 2


def test_what_the_cluster_lacks_is_named_and_nothing_is_held() -> None:
    ray = FakeRay(NODE, {"CPU": 2.0, "GPU": 1.0})
    needs = [RoleNeed("queue", ("queue",), 1), RoleNeed("learner", ("learner",), 4, 4)]
    text = (
        r"room for learner 1 × \(CPU 4, GPU 4\) did not come; its 2 nodes have CPU 10, GPU 1; free, .*; "
        r"the largest has CPU 2, GPU 1; launch.start_deadline_s=0.05 is the limit"
    )
    with pytest.raises(DeadlineError, match=text), reserved(ray, needs, 0.05):
        pytest.fail("it has no room")
    assert len(ray.removed) == 2


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://head:10001", "for clients outside"),
        ("auto", "no Ray cluster can be joined there .nobody."),
        ("127.0.0.1:1", "Connection refused"),
        ("127.0.0.1:99999", "no Ray cluster can be joined there"),
    ],
)
@pytest.mark.parametrize("by", ["option", "variable"])
def test_an_address_without_a_cluster_is_refused(
    address: str, message: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**words: Any) -> None:
        if words["address"] == "auto":
            raise ConnectionError("first\nnobody\n")
        pytest.fail(f"Ray waits for {words}")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if by == "variable":
        monkeypatch.setenv("RAY_ADDRESS", address)
    ray = SimpleNamespace(is_initialized=lambda: False, init=init, exceptions=FakeRay.exceptions)
    with (
        pytest.raises(ConfigError, match=f"--ray-address = '{address}': .*{message}"),
        connected(ray, "auto" if by == "variable" else address),
    ):
        pytest.fail("it is connected")


def test_a_driver_stays_one() -> None:
    with connected(SimpleNamespace(is_initialized=lambda: True), "auto"):
        pass


@pytest.mark.parametrize(
    ("gpus", "node", "learner"),
    [
        ("auto", {"CPU": 8.0, "GPU": 1.0}, "learner 1 × (CPU 1, GPU 1)"),
        ("no", {"CPU": 8.0, "GPU": 1.0}, "learner 1 × (CPU 1)"),
        ("auto", NODE, "learner 1 × (CPU 1)"),
        ("yes", NODE, None),
    ],
)
def test_ranks_get_gpus_if_the_cluster_has_any(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpus: Gpus,
    node: dict[str, float],
    learner: str | None,
) -> None:
    ray = FakeRay(node, node)
    monkeypatch.setattr(ray_run, "imported", lambda *_: ray)
    monkeypatch.setattr(ray_run, "train", lambda config, supervisor_of: {"at": config.queue.address})
    config = dataclasses.replace(config, launch=dataclasses.replace(config.launch, start_deadline_s=0.05))
    if learner is None:
        with pytest.raises(DeadlineError, match=r"room for learner 1 × \(CPU 1, GPU 1\), generators"):
            train_on_ray(config, gpus=gpus)
        assert not run_folder(config).exists()
    else:
        assert train_on_ray(config, gpus=gpus) == {"at": "tcp://10.0.0.1:*"}
        assert f"on Ray: queue 1 × (CPU 1); {learner};" in capsys.readouterr().err


def test_a_run_that_finds_no_cluster_leaves_no_folder(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = SimpleNamespace(is_initialized=lambda: False, exceptions=FakeRay.exceptions)
    monkeypatch.setattr(ray_run, "imported", lambda *_: ray)
    with pytest.raises(ConfigError, match="no Ray cluster can be joined there"):
        train_on_ray(config, "127.0.0.1:1")
    assert not run_folder(config).exists()


def test_a_run_on_ray_without_ray_names_the_package(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda module: None)
    words = [
        f"model.path={model_folder}",
        "tasks.source=asyncrl.tasks.addition:train",
        "reward.function=asyncrl.tasks.addition:reward",
        f"run.dir={tmp_path}",
    ]
    empty = tmp_path / "empty.yaml"
    empty.write_text("batch: {groups: 4}\n")
    assert main(["train", str(empty), "--on", "ray", *words]) == 2
    assert "pip install 'asyncrl[ray]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
