"""`asyncrl launch slurm` on a real Slurm: a controller and four nodes on this machine, each with two CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from processes import (
    FOR_EVER,
    STARTS_S,
    finished,
    newest_checkpoint,
    started,
    succeeded,
    summary_of,
    until,
    until_trained,
    versions,
)
from slurm import SlurmCluster

pytestmark = pytest.mark.slow

Submit = Callable[..., str]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), 4)
    yield cluster
    cluster.close()


@pytest.fixture
def submit(cluster: SlurmCluster, config_file: Path) -> Iterator[Submit]:
    """Submits the run and returns the number of its job; no job is left."""
    jobs: list[str] = []

    def submitted(*words: str, gpus: int = 0) -> str:
        shape = ("--cpus-per-node", "2", "--gpus-per-node", str(gpus))
        command = ("asyncrl", "launch", "slurm", str(config_file), *shape, *words)
        with started(*command, executed=True, env=cluster.env) as process:
            printed = succeeded(process)
        jobs.append(printed.split()[1].rstrip(":"))
        return jobs[-1]

    yield submitted
    for job in jobs:
        cluster.ask("scancel", "--quiet", job)
        cluster.until_state(job, "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT")
    until(lambda: cluster.states() == {"idle"}, "idle nodes")


def output(config_file: Path, job: str) -> str:
    path = config_file.parent / f"it.slurm-{job}.log"
    return path.read_text() if path.exists() else ""


def process_of(config_file: Path, *words: str) -> psutil.Process:
    """The process of the run with these words, and not its step.py."""
    file = str(config_file.parent / "it" / "config.yaml")

    def find() -> psutil.Process | None:
        for one in psutil.process_iter(["cmdline"]):
            line = one.info["cmdline"] or []
            if line[1:3] == ["-m", "asyncrl"] and file in line and {*words} <= {*line}:
                return one
        return None

    found: psutil.Process = until(find, f"a process with {words}")
    return found


def test_a_run_over_several_nodes_outlives_its_processes_and_goes_on_after_scancel(
    config_file: Path, cluster: SlurmCluster, submit: Submit
) -> None:
    run, shape = config_file.parent / "it", ("learner.processes=2", "generator.count=2")
    job = submit(FOR_EVER, *shape)
    until_trained(run, 1, deadline_s=STARTS_S)
    assert cluster.job(job)["NumNodes"] == "2"
    process_of(config_file, "generator", "generator-1").kill()
    until(lambda: "generator-1 ended" in output(config_file, job), "its end")
    until(lambda: newest_checkpoint(run) >= 2, "a checkpoint")
    process_of(config_file, "learner", "--node", "1").kill()
    until(lambda: "learner ended" in output(config_file, job), "the learner's end")
    until_trained(run, versions(run)[-1] + 2)
    printed = output(config_file, job)
    assert "generator-1 ended (killed by SIGKILL) and is started again" in printed
    assert "learner ended (killed by SIGKILL) and is started again from the newest checkpoint" in printed

    cluster.ask("scancel", job)
    cluster.until_state(job, "CANCELLED")
    until(lambda: cluster.states() == {"idle"}, "the end of its processes")
    last = versions(run)[-1]
    assert newest_checkpoint(run) == last, output(config_file, job)

    again = submit("run.resume=true", f"run.versions={last + 1}", *shape)
    assert cluster.until_state(again, "COMPLETED", "FAILED") == "COMPLETED", output(config_file, again)
    assert versions(run) == list(range(1, last + 2))
    assert summary_of(run)["versions"] == last + 1
    assert {path.name for path in (run / "logs").glob("*.log")} == {
        "queue.log",
        "learner.log",
        "generator-0.log",
        "generator-1.log",
    }


def test_a_job_is_queued_again_before_its_time_is_over_and_after_a_lost_node_and_stops_in_order(
    config_file: Path, cluster: SlurmCluster, submit: Submit
) -> None:
    """USR1 is the signal that Slurm sends before the end of a job's time."""
    run = config_file.parent / "it"
    job = submit(FOR_EVER, "checkpoint.every=20", "generator.count=2", gpus=1)
    until_trained(run, 2, deadline_s=STARTS_S)
    assert cluster.job(str(int(job) + 1))["NumNodes"] == "2"
    for words in (("generator", "generator-0"), ("generator", "generator-1"), ("learner",)):
        assert process_of(config_file, *words).environ()["CUDA_VISIBLE_DEVICES"] == "0"

    cluster.ask("scancel", "--signal=USR1", "--batch", job)
    until(lambda: cluster.job(job).get("Restarts") == "1", "the job in the queue again")
    saved = newest_checkpoint(run)
    assert saved == versions(run)[-1]
    cluster.until_queued_again(job, 1)
    until_trained(run, saved + 1)
    assert "the job was queued again (1): the run goes on" in output(config_file, job)
    assert versions(run)[: saved + 1] == list(range(1, saved + 2))

    node = cluster.hosts(str(int(job) + 1))[0]
    cluster.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")
    try:
        cluster.until_queued_again(job, 2)
        last = versions(run)[-1]
        assert "DUE TO NODE FAILURE" in output(config_file, job)
        until(lambda: "the job was queued again (2)" in output(config_file, job), "its second time")
        assert node not in cluster.hosts(str(int(job) + 1))
        until_trained(run, last + 1)
        assert versions(run) == list(range(1, versions(run)[-1] + 1))
    finally:
        cluster.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")

    cluster.ask("scancel", "--signal=TERM", "--batch", job)
    cluster.until_state(job, "FAILED")
    assert cluster.job(job)["ExitCode"] == "10:0"
    assert newest_checkpoint(run) == versions(run)[-1]
    assert "run.resume=true goes on from the newest checkpoint" in output(config_file, job)


def test_what_the_nodes_cannot_hold_is_refused_before_anything_is_submitted(
    config_file: Path, cluster: SlurmCluster
) -> None:
    words = ("--cpus-per-node", "2", "--gpus-per-node", "0", "generator.threads=3")
    with started("asyncrl", "launch", "slurm", str(config_file), *words, env=cluster.env) as process:
        code, printed = finished(process)
    assert code == 2
    assert "--cpus-per-node = 2: generators: a node must have 3" in printed
