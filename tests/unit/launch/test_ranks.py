"""The supervisor of ranks, on stand-ins: small shell scripts and Python programs."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import signals_must_be_heard
from waiting import Clock

from asyncrl.errors import ConfigError, RankLostError
from asyncrl.launch import ranks
from asyncrl.launch.ranks import RankShare, SignsOfLife, run_ranks
from asyncrl.system.fork_server import ForkServer
from asyncrl.system.rank_process import MEETING, PULSE_FD

LONG_S = 600.0
TWO = RankShare("learner", 2)

FOR_EVER = "while :; do sleep 0.05; done"


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    with signals_must_be_heard():
        yield


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def of_ranks(first: str, second: str) -> list[str]:
    return shell(f"if [ $RANK = 0 ]; then {first}; else {second}; fi")


def test_ranks_have_their_numbers_and_their_lines_a_mark(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(shell("echo $RANK of $WORLD_SIZE here $LOCAL_RANK"), TWO, LONG_S) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 of 2 here 0", "[rank1]: 1 of 2 here 1"]


def test_a_line_has_one_mark(capfd: pytest.CaptureFixture[str]) -> None:
    """torch marks those of tracebacks by itself."""
    run_ranks(of_ranks("exit 0", "echo [rank1]: Traceback; printf last"), TWO, LONG_S)
    assert capfd.readouterr().out == "[rank1]: Traceback\n[rank1]: last\n"


def test_the_second_machine_has_the_other_ranks_and_meets_through_the_queue(
    capfd: pytest.CaptureFixture[str],
) -> None:
    share = RankShare("learner", 4, nodes=2, node=1)
    run_ranks(shell(f"echo $RANK of $WORLD_SIZE here $LOCAL_RANK by ${MEETING}"), share, LONG_S)
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[rank2]: 2 of 4 here 0 by queue:learner",
        "[rank3]: 3 of 4 here 1 by queue:learner",
    ]


def test_ranks_of_one_machine_meet_in_a_folder_that_nobody_else_reads_and_nobody_keeps(
    tmp_path: Path,
) -> None:
    note = tmp_path / "note"
    look = f"stat -c %a ${{{MEETING}#folder:}} > {note}; echo ${{{MEETING}#folder:}} >> {note}"
    run_ranks(of_ranks(look, "exit 0"), TWO, LONG_S)
    mode, folder = note.read_text().split()
    assert stat.S_IMODE(int(mode, 8)) == 0o700
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    ("share", "key"),
    [
        (RankShare("learner", 4, nodes=3), "--nodes = 3"),
        (RankShare("learner", 4, nodes=0), "--nodes = 0"),
        (RankShare("learner", 4, nodes=2, node=2), "--node = 2"),
        (RankShare("learner", 4, nodes=2, node=-1), "--node = -1"),
    ],
)
def test_ranks_are_shared_out_in_equal_parts(share: RankShare, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        share.check("learner.processes")


def test_the_end_of_the_rank_that_failed_is_the_end_of_all(caplog: pytest.LogCaptureFixture) -> None:
    patient = f"trap 'exit 1' TERM; {FOR_EVER}"
    assert run_ranks(of_ranks(patient, "exit 7"), TWO, LONG_S) == 7
    assert "rank 1 ended first (exit code 7)" in caplog.text


def test_a_rank_that_does_not_end_with_the_others_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "END_S", 0.1)
    monkeypatch.setattr(ranks, "SETTLE_S", 0.1)
    stubborn = f"trap '' TERM; {FOR_EVER}"
    assert run_ranks(of_ranks(stubborn, "exit 1"), TWO, LONG_S) == 1


def test_a_rank_that_ends_because_of_another_ones_death_is_not_the_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connections break before the kernel reports the death, which comes once its own end was looked at."""
    check_ends = ranks.Ranks._check_ends

    def look(these: ranks.Ranks) -> None:
        check_ends(these)
        if "rank 0" in these._ends:
            (tmp_path / "seen").touch()

    monkeypatch.setattr(ranks.Ranks, "_check_ends", look)
    monkeypatch.setattr(ranks, "SETTLE_S", LONG_S)
    dies = f"until [ -e {tmp_path / 'seen'} ]; do sleep 0.02; done; kill -KILL $$"
    assert run_ranks(of_ranks("exit 1", dies), TWO, LONG_S) == -signal.SIGKILL
    assert "rank 1 ended first (killed by SIGKILL)" in caplog.text


def test_sigterm_reaches_every_rank_and_a_clean_stop_is_one(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    first = f"trap 'exit 10' TERM; touch {ready}; {FOR_EVER}"
    waits = f"until [ -e {ready} ]; do sleep 0.02; done"
    second = f"trap 'sleep 0.3; exit 10' TERM; {waits}; kill -TERM $PPID; {FOR_EVER}"
    assert run_ranks(of_ranks(first, second), TWO, LONG_S) == 10


def test_a_rank_that_was_stopped_is_named_and_the_others_end(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, threading\n"
        "from asyncrl.system.rank_process import begin_signs_of_life\n"
        "begin_signs_of_life()\n"
        f"open(os.path.join({str(tmp_path)!r}, os.environ['RANK']), 'w').write(str(os.getpid()))\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGSTOP)\n"
        "threading.Event().wait()\n"
    )
    with pytest.raises(RankLostError, match=r"learner: rank 1 \(process \d+\) gave no sign of life for 5 s"):
        run_ranks([sys.executable, "-c", code], TWO, 5.0)
    for rank in "01":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / rank).read_text()), 0)


def test_a_rank_whose_supervisor_is_gone_ends() -> None:
    """Linux kills it; elsewhere nobody reads its signs of life."""
    reading, writing = os.pipe()
    code = (
        "import threading\n"
        "from asyncrl.system.rank_process import begin_signs_of_life\n"
        "begin_signs_of_life()\n"
        "threading.Event().wait()\n"
    )
    env = {**os.environ, PULSE_FD: str(writing)}
    with subprocess.Popen([sys.executable, "-c", code], env=env, pass_fds=[writing]) as rank:
        os.close(writing)
        assert os.read(reading, 1) == b"."
        os.close(reading)
        assert rank.wait(LONG_S) == -signal.SIGKILL


def test_a_rank_is_silent_after_its_last_sign_alone() -> None:
    clock = Clock(100.0)
    signs = SignsOfLife(clock)
    signs.begin("rank 0")
    signs.begin("rank 1")
    for now in range(101, 112):
        clock.now = float(now)
        signs.seen("rank 0")
        assert signs.silent(10.0) == (["rank 1"] if now > 110 else [])
    signs.forget("rank 1")
    assert signs.silent(10.0) == []


def test_a_supervisor_that_was_stopped_itself_blames_nobody() -> None:
    clock = Clock(100.0)
    signs = SignsOfLife(clock)
    signs.begin("rank 0")
    clock.now = 500.0
    assert signs.silent(10.0) == []
    for now in (504.0, 508.0, 510.0):
        clock.now = now
        assert signs.silent(10.0) == []
    clock.now = 510.5
    assert signs.silent(10.0) == ["rank 0"]


@pytest.fixture
def importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """A fork server that imports until it is ended."""
    (tmp_path / "endless.py").write_text("import signal; signal.pause()")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    server = ForkServer.execute([sys.executable, "-m", "asyncrl.system.forking", "endless"], os.environ)
    yield server
    server.end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_ranks_begin_ends_them_all(
    importing: ForkServer, capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    timer = threading.Timer(0.1, os.kill, [os.getpid(), number])
    timer.start()
    assert run_ranks(shell("echo began"), TWO, LONG_S, importing, LONG_S) == -number
    assert "began" not in capfd.readouterr().out


def test_ranks_begin_without_a_fork_server_that_imports_for_too_long(
    importing: ForkServer, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert run_ranks(shell("echo began"), RankShare("learner", 1), LONG_S, importing, 0.1) == 0
    assert "began" in capfd.readouterr().out
    assert "each rank imports torch by itself" in caplog.text
