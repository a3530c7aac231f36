"""`asyncrl train` when its processes are killed, when it is interrupted, and when it goes on afterwards."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
from processes import (
    FOR_EVER,
    Process,
    child,
    counts_of,
    family,
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


def launched(config: Path, *overrides: str) -> tuple[str, ...]:
    return ("asyncrl", "train", str(config), *overrides)


def assert_no_orphans(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert alive == []


def test_a_killed_generator_is_replaced_and_nothing_is_lost(config_file: Path) -> None:
    run = config_file.parent / "it"
    with started(*launched(config_file, "run.versions=40", "checkpoint.every=100")) as launcher:
        until_trained(run, 2, launcher)
        child(launcher, "asyncrl", "generator").kill()
        printed = succeeded(launcher)
    assert "generator-0 ended (killed by SIGKILL) and is started again" in printed
    assert versions(run) == list(range(1, 41))
    assert counts_of(run) == (40, 160, 0)


def test_a_run_goes_on_without_its_fork_server(config_file: Path) -> None:
    """A generator that dies is forked again, or executed once the server was killed. Ranks are forked by a server of
    their own."""
    run, words = config_file.parent / "it", ("learner.processes=2", "run.versions=30", "--timings")
    with started(*launched(config_file, *words), executed=True) as launcher:
        until_trained(run, 2, launcher)
        everybody = family(launcher.pid)
        servers = [one for one in everybody if one.cmdline()[0] == "asyncrl fork server"]
        assert [one.ppid() for one in servers].count(launcher.pid) == 1
        assert len(servers) == 2
        first = child(launcher, "asyncrl", "generator")
        assert first.ppid() == launcher.pid
        first.kill()
        second = until(lambda: another(launcher, first), "another generator", launcher)
        for server in servers:
            server.kill()
        second.kill()
        until(lambda: another(launcher, second), "a third generator", launcher)
        printed = succeeded(launcher)
    assert printed.count("generator-0 ended (killed by SIGKILL) and is started again") == 2
    stages = [
        line.rsplit(maxsplit=2)[0] for line in printed.splitlines() if line.startswith(("fork", "learner "))
    ]
    assert [" ".join(stage.split()) for stage in stages] == [
        "fork server imports",
        "learner begins",
        "learner loads the model",
        "learner trains the first version",
    ]
    assert counts_of(run) == (30, 120, 0)
    assert_no_orphans(everybody)


def another(launcher: Process, than: psutil.Process) -> psutil.Process | None:
    found = child(launcher, "asyncrl", "generator")
    return None if found.pid == than.pid else found


def test_a_killed_learner_that_may_not_be_started_again_ends_the_run_by_name_and_it_can_be_resumed(
    config_file: Path,
) -> None:
    run = config_file.parent / "it"
    with started(*launched(config_file, FOR_EVER, "launch.learner_restarts=0")) as launcher:
        until_trained(run, 5, launcher)
        until(lambda: newest_checkpoint(run) >= 4, "the checkpoint of version 4, or a later one", launcher)
        others = family(launcher.pid)
        child(launcher, "asyncrl", "learner").kill()
        code, printed = finished(launcher)
    assert code == 5
    assert "learner ended (killed by SIGKILL)" in printed
    assert_no_orphans(others)
    saved = newest_checkpoint(run)
    assert saved >= 4
    goal = saved + 3
    ran(*launched(config_file, "run.resume=true", f"run.versions={goal}"))
    assert versions(run) == list(range(1, goal + 1))  # the cut-off versions were made again, once
    assert summary_of(run)["groups_trained"] == 4 * goal


def assert_saved(run: Path) -> int:
    """It has left one checkpoint, of its last version, which is returned."""
    (saved,) = [int(path.name[1:]) for path in (run / "checkpoints").glob("v*")]
    assert saved == versions(run)[-1]
    return saved


def assert_goes_on(config_file: Path, run: Path) -> None:
    saved = assert_saved(run)
    ran(*launched(config_file, "run.resume=true", f"run.versions={saved + 2}"))
    assert versions(run) == list(range(1, saved + 3))


@pytest.mark.slow
def test_ctrl_c_once_leaves_a_checkpoint_to_go_on_from(config_file: Path) -> None:
    run = config_file.parent / "it"
    with started(*launched(config_file, FOR_EVER, "checkpoint.every=100000")) as launcher:
        until_trained(run, 3, launcher)
        everybody = family(launcher.pid)
        interrupt(launcher)
        code, printed = finished(launcher)
    assert code == 130, printed
    assert "run.resume=true goes on" in printed
    assert_no_orphans(everybody)
    assert_goes_on(config_file, run)


@pytest.mark.parametrize(
    ("processes", "told"),
    [
        (1, "launcher"),
        pytest.param(2, "launcher", marks=pytest.mark.slow),
        pytest.param(1, "learner", marks=pytest.mark.slow),
        pytest.param(1, "learner's terminal", marks=pytest.mark.slow),
        pytest.param(2, "one rank", marks=pytest.mark.slow),
    ],
)
def test_sigterm_saves_and_ends_with_a_code_of_its_own(config_file: Path, processes: int, told: str) -> None:
    """Whoever of the processes of the run is told, and however many ranks the learner has."""
    run = config_file.parent / "it"
    shape = f"learner.processes={processes}"
    with started(*launched(config_file, FOR_EVER, shape, "checkpoint.every=100000")) as launcher:
        until_trained(run, 3, launcher)
        everybody = family(launcher.pid)
        if told == "launcher":
            launcher.terminate()
        else:
            learners = [one for one in everybody if {"asyncrl", "learner"} <= set(one.cmdline())]
            if told == "one rank":
                learners = [one for one in learners if one.parent() in learners]
            number = signal.SIGHUP if told == "learner's terminal" else signal.SIGTERM
            learners[-1].send_signal(number)
        code, printed = finished(launcher)
    assert code == 10, printed
    assert "run.resume=true goes on" in printed
    assert_no_orphans(everybody)
    assert_saved(run)
    if (processes, told) == (1, "launcher"):
        assert_goes_on(config_file, run)


def test_ctrl_c_twice_ends_at_once(config_file: Path) -> None:
    run = config_file.parent / "it"
    with started(*launched(config_file, FOR_EVER, "launch.stop_deadline_s=1000")) as launcher:
        until_trained(run, 1, launcher)
        everybody = family(launcher.pid)
        child(launcher, "asyncrl", "learner").suspend()  # cannot end cleanly
        interrupt(launcher)
        until(lambda: "stopping" in _said(launcher), "the first answer", launcher)
        interrupt(launcher)
        code, _ = finished(launcher)
    assert code == 130
    assert_no_orphans(everybody)


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_orphans(config_file: Path) -> None:
    run = config_file.parent / "it"
    with started(*launched(config_file, FOR_EVER, "learner.processes=2")) as launcher:
        until_trained(run, 1, launcher)
        everybody = family(launcher.pid)
        launcher.kill()
        assert_no_orphans(everybody)


@pytest.mark.slow
def test_two_runs_side_by_side_do_not_meet(config_file: Path) -> None:
    with (
        started(*launched(config_file, "run.name=one")) as one,
        started(*launched(config_file, "run.name=two")) as two,
    ):
        assert [finished(one)[0], finished(two)[0]] == [0, 0]
    for name in ("one", "two"):
        assert versions(config_file.parent / name) == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_run_in_use_and_a_run_that_is_there_are_refused(config_file: Path) -> None:
    run = config_file.parent / "it"
    with started(*launched(config_file, FOR_EVER)) as launcher:
        until_trained(run, 1, launcher)
        with started(*launched(config_file)) as second:
            code, printed = finished(second)
        assert code == 2
        assert "a live run uses" in printed
    with started(*launched(config_file)) as third:
        code, printed = finished(third)
    assert code == 2
    assert "run.resume=true" in printed


def _said(process: Process) -> str:
    """What the launcher has printed so far; it flushes every line."""
    assert process.stdout is not None
    return process.stdout.readline()
