"""A run as a job of Slurm: its script, the seats of its processes, their steps. Without Slurm: srun is a stand-in."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import until

from asyncrl.cli import main
from asyncrl.cluster.slurm import allocation, run, step
from asyncrl.cluster.slurm.allocation import Allocation, Seat
from asyncrl.cluster.slurm.job import JobOrder, components, script
from asyncrl.cluster.slurm.run import SlurmSupervisor, StepChild, train_on_slurm
from asyncrl.config.schema import Config, GeneratorConfig, LearnerConfig, RunConfig
from asyncrl.config.sections.generator import VllmConfig
from asyncrl.config.sections.placement import PlacementConfig, RewardsPlaceConfig
from asyncrl.errors import ConfigError, StoppedError
from asyncrl.launch.supervise import ChildEnded, Supervisor

JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_HET_SIZE": "2",
    "SLURMD_NODENAME": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1,n2",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n3,n4",
    "SLURM_CPUS_PER_TASK_HET_GROUP_0": "9",
    "SLURM_CPUS_PER_TASK_HET_GROUP_1": "4",
    "SLURM_GPUS_PER_NODE_HET_GROUP_0": "8",
}
"""Variables of the script of a job."""

SRUN = """#!/bin/sh
# srun's stand-in: the command of the step, with the variables of one of its tasks.
while [ "$1" != -m ]; do prior=$1; shift; done
export SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0
exec "$prior" "$@"
"""


@pytest.fixture(autouse=True)
def scontrol(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*words: str) -> str:
        return (
            words[-1].replace(",", "\n")
            if "hostnames" in words
            else f"NodeName={words[-1]} NodeAddr=127.0.0.1"
        )

    monkeypatch.setattr(allocation, "ask", ask)


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def large() -> Config:
    vllm = GeneratorConfig(count=4, engine="vllm", vllm=VllmConfig(tensor_parallel=4), threads=1)
    return Config(learner=LearnerConfig(processes=16), generator=vllm)


def shapes(config: Config, order: JobOrder) -> list[tuple[str, int, int, int]]:
    return [(one.role.name, one.nodes, one.cpus, one.gpus) for one in components(config, order)]


def test_each_role_has_the_fewest_nodes_that_hold_it() -> None:
    assert shapes(large(), JobOrder()) == [("learner", 2, 9, 8), ("generators", 2, 8, 8)]
    pools = PlacementConfig(rewards=RewardsPlaceConfig(where="pool", processes=5))
    config = Config(
        learner=LearnerConfig(processes=2), generator=GeneratorConfig(count=3, threads=1), placement=pools
    )
    order = JobOrder(gpus_per_node=0, cpus_per_node=2)
    assert shapes(config, order) == [("learner", 2, 2, 0), ("generators", 2, 2, 0), ("rewards", 3, 2, 0)]
    assert shapes(config, JobOrder(gpus_per_node=0))[1:] == [("generators", 1, 3, 0), ("rewards", 1, 5, 0)]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (JobOrder(gpus_per_node=2), "--gpus-per-node = 2: generators: a node must have 4"),
        (JobOrder(gpus_per_node=8, cpus_per_node=3), "--cpus-per-node = 3: generators: a node must have 4"),
        (JobOrder(gpus_per_node=8, cpus_per_node=1), "--cpus-per-node = 1: learner: a node must have 2"),
    ],
)
def test_a_process_that_no_node_holds_is_refused(order: JobOrder, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        components(large(), order)
    assert str(caught.value).startswith(message)


def test_the_script_has_a_component_for_each_role(tmp_path: Path) -> None:
    config = Config(run=RunConfig(name="it", dir=str(tmp_path)), generator=GeneratorConfig(count=9))
    order = JobOrder(partition="gpu", time="1:00:00", more=["--constraint=a b"])
    lines = script(config, order, ["python", "-m", "asyncrl", "run.name=a b"]).splitlines()
    assert lines[0] == "#!/bin/sh"
    assert f"--output={tmp_path}/it.slurm-%j.log" in lines[1]
    assert "--requeue" in lines[1].split()
    assert lines[2] == "#SBATCH --signal=B:USR1@60"
    of_all = "#SBATCH --partition=gpu --time=1:00:00 '--constraint=a b'"
    assert lines[3] == f"{of_all} --nodes=1 --ntasks-per-node=1 --cpus-per-task=2 --gpus-per-node=1"
    assert lines[4] == "#SBATCH hetjob"
    assert lines[5] == f"{of_all} --nodes=2 --ntasks-per-node=1 --cpus-per-task=5 --gpus-per-node=5"
    assert lines[6:] == ["exec python -m asyncrl 'run.name=a b'"]


def test_processes_have_the_seats_of_their_component() -> None:
    seats = Allocation(large(), JOB)
    assert seats.seat("learner") == Seat(0, ("n1", "n2"), 1, "9", 0, 8)
    found = [seats.seat(f"generator-{i}") for i in range(4)]
    assert [(one.group, one.nodes, one.first, one.gpus) for one in found] == [
        (1, ("n3",), 0, 4),
        (1, ("n3",), 4, 4),
        (1, ("n4",), 0, 4),
        (1, ("n4",), 4, 4),
    ]
    assert seats.seat("generator-5") == found[1]
    with pytest.raises(KeyError):
        seats.seat("generator-small-0")
    words = seats.seat("learner").words()
    assert words[:4] == ["--het-group=0", "--nodes=2", "--ntasks=2", "--nodelist=n1,n2"]
    assert {"--overlap", "--kill-on-bad-exit=1", "--cpus-per-task=9"} <= {*words}
    assert seats.address() == "127.0.0.1"


def test_pools_of_generators_have_components_of_their_own() -> None:
    placement = PlacementConfig(generators={"small": {"count": 3, "vllm": {"tensor_parallel": 2}}})
    config = dataclasses.replace(large(), placement=placement)
    job = JobOrder(gpus_per_node=4)
    assert shapes(config, job)[1:] == [("generators", 4, 4, 4), ("generators_small", 2, 4, 4)]
    nodes = {"SLURM_JOB_NODELIST_HET_GROUP_2": "n5,n6", "SLURM_CPUS_PER_TASK_HET_GROUP_2": "4"}
    seats = Allocation(config, {**JOB, **nodes, "SLURM_HET_SIZE": "3"})
    found = [seats.seat(f"generator-small-{i}") for i in range(4)]
    assert [(one.group, one.nodes, one.first, one.gpus) for one in found] == [
        (2, ("n5",), 0, 2),
        (2, ("n5",), 2, 2),
        (2, ("n6",), 0, 2),
        (2, ("n5",), 0, 2),  # beyond the count of its pool
    ]
    assert seats.seat("generator-1").group == 1


def test_a_run_outside_of_a_job_of_its_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--on = 'slurm': runs inside of a job .*asyncrl launch slurm"):
        Allocation(large(), {})
    with pytest.raises(ConfigError, match="the job has 3 components, and the run needs 2"):
        Allocation(large(), {**JOB, "SLURM_HET_SIZE": "3"})


def test_a_job_that_was_queued_again_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(run=RunConfig(name="it", dir=str(tmp_path)))
    monkeypatch.setattr(run, "train", lambda config, supervisor_of: {"resume": config.run.resume})
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        assert train_on_slurm(config) == {"resume": False}
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        assert train_on_slurm(config) == {"resume": True}
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_job_whose_time_is_over_stops_and_is_queued_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def train(config: Config, supervisor_of: object) -> None:
        with Supervisor().interrupts():
            os.kill(os.getpid(), signal.SIGUSR1)
            raise StoppedError("stopped")

    monkeypatch.setattr(run, "train", train)
    monkeypatch.setattr(run, "ask", lambda *words: asked.append(words))
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with pytest.raises(StoppedError):
            train_on_slurm(Config(run=RunConfig(name="it", dir=str(tmp_path))))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert asked == [("requeue", "7")]


def test_each_process_gets_the_devices_of_its_seat() -> None:
    assert step.devices_of({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 2, 2) == "6,7"


def test_devices_that_slurm_does_not_show_are_named(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert step.main(["4", "4", str(tmp_path / "ends"), "true"]) == ConfigError.exit_code
    assert "its devices are 4 to 7 of node" in capfd.readouterr().err


STOPS = """
import signal, sys, time
def stop(number, frame):
    sys.exit(10)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(600)
"""


def until_ready(supervisor: SlurmSupervisor, name: str) -> None:
    until(lambda: "ready" in supervisor.log(name).read_text(), f"{name} to be ready")


def without_gpus() -> dict[str, str]:
    return {name: value for name, value in JOB.items() if not name.startswith("SLURM_GPUS")}


@pytest.fixture
def on_cpus(tmp_path: Path, srun: None) -> Iterator[SlurmSupervisor]:
    made = SlurmSupervisor(tmp_path / "logs", allocation=Allocation(Config(), without_gpus()))
    with made.interrupts():
        yield made


def test_a_stop_reaches_the_process_as_sigterm_and_its_code_comes_back(on_cpus: SlurmSupervisor) -> None:
    on_cpus.start("learner", [sys.executable, "-c", STOPS])
    until_ready(on_cpus, "learner")
    on_cpus.send("learner", signal.SIGTERM)
    assert on_cpus.next_event(60.0) == ChildEnded("learner", 10)


def test_a_signal_of_srun_to_all_processes_of_a_step_is_one_stop(on_cpus: SlurmSupervisor) -> None:
    on_cpus.start("learner", [sys.executable, "-c", STOPS])
    until_ready(on_cpus, "learner")
    os.killpg(on_cpus.pid("learner"), signal.SIGUSR1)
    assert on_cpus.next_event(60.0) == ChildEnded("learner", 10)


def test_a_killed_process_reads_as_killed(on_cpus: SlurmSupervisor) -> None:
    on_cpus.start("generator-0", [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert on_cpus.next_event(60.0) == ChildEnded("generator-0", -9)


def test_the_node_that_fails_first_gives_the_exit_code(tmp_path: Path) -> None:
    ends = tmp_path / "ends"
    for code in (7, 1):
        words = ["0", "0", str(ends), sys.executable, "-c", f"raise SystemExit({code})"]
        ended = subprocess.run([sys.executable, "-m", "asyncrl.cluster.slurm.step", *words])
        assert ended.returncode == code
    killed = StepChild(subprocess.Popen(["sh", "-c", "exit 137"]), ends)
    assert killed.wait() == killed.poll() == 7


def test_the_queue_outlives_a_signal_to_all_and_ends_by_its_own(on_cpus: SlurmSupervisor) -> None:
    """A job that is cancelled gets SIGTERM in all of its processes, and the learner still needs the queue."""
    program = (
        "import signal; print('ready', signal.getsignal(signal.SIGTERM).name, flush=True); signal.pause()"
    )
    on_cpus.start("queue", [sys.executable, "-c", program])
    until_ready(on_cpus, "queue")
    assert "ready SIG_IGN" in on_cpus.log("queue").read_text()
    os.kill(on_cpus.pid("queue"), signal.SIGTERM)
    on_cpus.send("queue", signal.SIGTERM)
    event = on_cpus.next_event(60.0)
    assert isinstance(event, ChildEnded)
    assert event.code in (1, 130, -2)  # by SIGINT


def test_nothing_is_submitted_without_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "slurm", "configs/recipes/demo.yaml", "--gpus-per-node", "0", f"run.dir={tmp_path}"]
    assert main([*words, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert f"--on slurm run.dir={tmp_path}\n" in text
    assert subprocess.run(["sh", "-n"], input=text, text=True).returncode == 0
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(words) == 2
    assert "sbatch = 'sbatch': is no command here" in capsys.readouterr().err
