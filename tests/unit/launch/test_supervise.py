from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import signals_must_be_heard

from asyncrl.errors import DeadlineError
from asyncrl.launch import supervise
from asyncrl.launch.supervise import ChildEnded, ChildMessage, Interrupted, Supervisor, wait_line
from asyncrl.system.fork_server import ForkServer

FOREVER = ["sleep", "600"]
LONG_S = 60.0


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "logs")
    with signals_must_be_heard(), supervisor.interrupts():
        yield supervisor


def shell(script: str) -> list[str]:
    return ["sh", "-c", script, "sh"]


def test_a_child_that_ends_is_an_event_and_its_output_is_in_its_log(supervisor: Supervisor) -> None:
    supervisor.start("talker", shell("echo out; echo err >&2; exit 3"))
    assert supervisor.next_event(LONG_S) == ChildEnded("talker", 3)
    assert supervisor.why_it_ended("talker") == ("", ["out", "err"])
    assert supervisor.running() == []


def test_a_child_killed_by_a_signal_has_its_negative_number(supervisor: Supervisor) -> None:
    supervisor.start("victim", shell("kill -SEGV $$"))
    assert supervisor.next_event(LONG_S) == ChildEnded("victim", -signal.SIGSEGV)


def test_a_second_start_appends_to_the_log(supervisor: Supervisor) -> None:
    for word in ("one", "two"):
        supervisor.start("worker", shell(f"echo {word}"))
        assert supervisor.next_event(LONG_S) == ChildEnded("worker", 0)
    assert supervisor.why_it_ended("worker")[1] == ["one", "two"]


def test_only_the_end_of_a_long_log_is_told(supervisor: Supervisor) -> None:
    supervisor.start("worker", shell("seq 1 1000"))
    supervisor.next_event(LONG_S)
    assert supervisor.why_it_ended("worker")[1][-2:] == ["999", "1000"]
    assert "900" not in supervisor.why_it_ended("worker")[1]


def test_children_get_what_is_added_to_the_environment(supervisor: Supervisor) -> None:
    supervisor.start("worker", shell("echo $OMP_NUM_THREADS"), {"OMP_NUM_THREADS": "7"})
    supervisor.next_event(LONG_S)
    assert supervisor.why_it_ended("worker")[1] == ["7"]


def test_what_a_child_announces(supervisor: Supervisor) -> None:
    # The words added are: --announce FD
    supervisor.start("queue", shell("echo tcp://127.0.0.1:5 >/dev/fd/$2; exec sleep 600"), announces=True)
    assert wait_line(supervisor, "queue", "its address", LONG_S) == ChildMessage("queue", "tcp://127.0.0.1:5")
    assert supervisor.running() == ["queue"]


def test_a_child_that_announces_and_dies_is_heard_first(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = supervise._first_line

    def read_late(descriptor: int) -> str:
        while supervisor.code("queue") is None:
            os.sched_yield()
        return read(descriptor)

    monkeypatch.setattr(supervise, "_first_line", read_late)
    supervisor.start("queue", shell("echo tcp://127.0.0.1:5 >/dev/fd/$2; exit 3"), announces=True)
    assert supervisor.next_event(LONG_S) == ChildMessage("queue", "tcp://127.0.0.1:5")
    assert supervisor.next_event(LONG_S) == ChildEnded("queue", 3)


def test_a_child_that_dies_before_it_announces(supervisor: Supervisor) -> None:
    supervisor.start("queue", shell("exit 2"), announces=True)
    assert wait_line(supervisor, "queue", "its address", LONG_S) == ChildEnded("queue", 2)


def test_the_line_of_another_child_is_not_taken_for_it(supervisor: Supervisor) -> None:
    supervisor.start("other", shell("echo wrong >/dev/fd/$2; exec sleep 600"), announces=True)
    while supervisor._events.empty():
        os.sched_yield()
    supervisor.start("queue", shell("echo right >/dev/fd/$2; exec sleep 600"), announces=True)
    assert wait_line(supervisor, "queue", "its address", LONG_S) == ChildMessage("queue", "right")


def test_a_child_that_never_announces(supervisor: Supervisor) -> None:
    supervisor.start("queue", shell("exec sleep 600"), announces=True)
    with pytest.raises(DeadlineError, match=r"waited 0\.0 s for process queue: its address did not come"):
        wait_line(supervisor, "queue", "its address", 0.0)


def test_signals_of_the_user_are_events(supervisor: Supervisor) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)
        assert supervisor.next_event(LONG_S) == Interrupted(number)


def test_children_that_listen_to_sigterm_are_not_killed(supervisor: Supervisor) -> None:
    supervisor.start("a", FOREVER)
    supervisor.start("b", FOREVER)
    assert supervisor.stop_all(LONG_S) == []
    assert supervisor.running() == []


def test_a_child_that_ignores_sigterm_is_killed(supervisor: Supervisor) -> None:
    supervisor.start(
        "deaf", shell('trap "" TERM; echo ready >/dev/fd/$2; while :; do sleep 600; done'), announces=True
    )
    wait_line(supervisor, "deaf", "the trap", LONG_S)
    assert supervisor.stop_all(0.0) == ["deaf"]
    assert supervisor.running() == []


def test_what_a_child_has_started_in_its_session_is_killed_with_it(supervisor: Supervisor) -> None:
    """A rank's shared memory and ports would go on with a process that nobody knows of."""
    supervisor.start("parent", shell("sleep 600 & echo $! >/dev/fd/$2; wait"), announces=True)
    said = wait_line(supervisor, "parent", "its child", LONG_S)
    assert isinstance(said, ChildMessage)
    grandchild = psutil.Process(int(said.line))
    supervisor.kill_all()
    _, alive = psutil.wait_procs([grandchild], timeout=LONG_S)
    for one in alive:
        one.kill()
    assert not alive


def test_another_interrupt_cuts_a_wait_short(supervisor: Supervisor) -> None:
    supervisor.start("slow", FOREVER)
    os.kill(os.getpid(), signal.SIGINT)
    assert supervisor.wait_ended(["slow"], LONG_S) == ["slow"]


ANNOUNCES = """
import os, sys
os.write(int(sys.argv[sys.argv.index("--announce") + 1]), f"{os.getppid()} {'xmlrpc' in sys.modules}".encode())
print("to the log")
print(os.environ["A"], file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture
def announcing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a module that names its parent, and whether it was forked."""
    (tmp_path / "announces.py").write_text(ANNOUNCES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return [sys.executable, "-m", "announces"]


@pytest.fixture
def forks(announcing: list[str]) -> Iterator[ForkServer]:
    command = [sys.executable, "-m", "asyncrl.system.forking", "xmlrpc"]
    server = ForkServer.execute(command, os.environ)
    yield server
    server.end()


def test_modules_are_forked_once_the_server_has_imported(
    forks: ForkServer, announcing: list[str], tmp_path: Path
) -> None:
    supervisor = Supervisor(tmp_path / "logs", forks)
    with supervisor.interrupts():
        for forked in (False, True):
            supervisor.start("worker", announcing, {"A": "b"}, announces=True)
            said = wait_line(supervisor, "worker", "its parent", LONG_S)
            assert said == ChildMessage("worker", f"{os.getpid()} {forked}")
            assert supervisor.next_event(LONG_S) == ChildEnded("worker", 3)
            if not forked:
                assert supervisor.expect_forks(LONG_S)
                assert supervisor.next_event(LONG_S) == ChildMessage(
                    supervise.FORK_SERVER, supervise.IMPORTED
                )
                assert not supervisor.expect_forks(LONG_S)
    assert (
        sorted((tmp_path / "logs" / "worker.log").read_text().splitlines()) == ["b"] * 2 + ["to the log"] * 2
    )


def test_a_server_that_has_died_is_done_without(
    forks: ForkServer, announcing: list[str], tmp_path: Path
) -> None:
    supervisor = Supervisor(tmp_path / "logs", forks)
    with supervisor.interrupts():
        assert forks._process is not None
        forks._process.kill()
        assert supervisor.expect_forks(LONG_S)
        assert supervisor.next_event(LONG_S) == ChildMessage(supervise.FORK_SERVER, "it has ended")
        supervisor.start("worker", announcing, {"A": "b"}, announces=True)
        said = wait_line(supervisor, "worker", "its parent", LONG_S)
        assert said == ChildMessage("worker", f"{os.getpid()} False")


def test_nohup_keeps_a_closed_terminal_out(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        supervisor = Supervisor(tmp_path)
        with supervisor.interrupts():
            os.kill(os.getpid(), signal.SIGHUP)
            assert supervisor.next_event(0.0) is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_no_child_is_left_when_the_supervisor_goes(tmp_path: Path) -> None:
    supervisor = Supervisor(tmp_path)
    with supervisor.interrupts():
        supervisor.start("a", FOREVER)
    assert supervisor.running() == []


LAUNCHER = """
import sys
import threading
from pathlib import Path
from asyncrl.launch.supervise import Supervisor, wait_line
supervisor = Supervisor(Path(sys.argv[1]))
supervisor.start("child", ["sh", "-c", "echo $$ >/dev/fd/$2; exec sleep 600", "sh"], announces=True)
print(wait_line(supervisor, "child", "its process id", 60.0).line, flush=True)
supervisor.next_event(600.0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with their parent")
def test_no_child_survives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    child = psutil.Process(int(launcher.stdout.readline()))
    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs([child], timeout=LONG_S)
    assert not alive


def test_a_run_may_be_begun_in_another_thread_than_the_main_one(tmp_path: Path) -> None:
    """As some notebook servers do. Python gives signals to the main thread alone."""
    said: list[object] = []

    def work() -> None:
        supervisor = Supervisor(tmp_path)
        with supervisor.interrupts():
            supervisor.start("child", shell("exit 3"))
            said.append(supervisor.next_event(LONG_S))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LONG_S)
    assert said == [ChildEnded("child", 3)]
