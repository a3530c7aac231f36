"""The fork server, with modules that import at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import runs

from asyncrl.system import fork_server
from asyncrl.system.fork_server import ForkedProcess, ForkServer, own_server

LONG_S = 60.0
pytestmark = pytest.mark.skipif(not fork_server.AVAILABLE, reason="only Linux has subreapers")

WORKER = """
import gc, json, os, sys
print(json.dumps({
    "argv": sys.argv, "name": __name__, "A": os.environ.get("A"), "secret": os.environ.get("SECRET"),
    "cwd": os.getcwd(), "parent": os.getppid(), "session": os.getsid(0),
    "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd")), "imported": "xmlrpc" in sys.modules,
    "frozen": gc.get_freeze_count() > 0,
    "line": open("/proc/self/cmdline").read().rstrip("\\0"), "int": str(__import__("signal").getsignal(2)),
}))
print("err", file=sys.stderr)
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""

SLEEPER = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("here", flush=True)
signal.sigwait([signal.SIGUSR1])
"""

PARENT = """
import os, subprocess, sys
from asyncrl.system import fork_server
server = fork_server.own_server(["json"], {})
assert server is not None and server.ready and not os.get_inheritable(3)
process = server.fork([sys.executable, "-m", "worker", "7"], os.environ, {0: 0, 1: 1, 2: 2})
assert process is not None
print(os.getpid(), process.wait(), flush=True)
"""

WITH_DRIVER = """
import mmap, os, pathlib
path = pathlib.Path(__file__).with_name("libcuda.so.1")
path.write_bytes(b"driver")
mapped = mmap.mmap(os.open(path, os.O_RDONLY), 0, access=mmap.ACCESS_READ)
"""

THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that forked processes find."""
    folder = tmp_path / "modules"
    folder.mkdir()
    of_tests = {"worker": WORKER, "sleeper": SLEEPER, "parent": PARENT, "broken": "1/0"}
    of_tests |= {"threaded": THREADED, "with_driver": WITH_DRIVER}
    for name, text in of_tests.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    return folder


Start = Callable[..., ForkServer]


@pytest.fixture
def start(modules: Path) -> Iterator[Start]:
    """Starts servers that have imported these modules."""
    servers = []

    def start(*imported: str) -> ForkServer:
        command = [sys.executable, "-m", "asyncrl.system.forking", ",".join(imported or ("xmlrpc",))]
        server = ForkServer.execute(command, {**os.environ, "SECRET": "of the server"})
        servers.append(server)
        server.wait_ready(LONG_S)
        return server

    yield start
    for server in servers:
        server.end()


def fork(server: ForkServer, log: Path, *words: str, env: dict[str, str] | None = None, **more: Any) -> Any:
    with log.open("wb") as file, open(os.devnull, "rb") as nothing:
        places = {0: nothing.fileno(), 1: file.fileno(), 2: file.fileno()}
        variables = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ["PYTHONPATH"], **(env or {})}
        return server.fork([sys.executable, "-m", *words], variables, places, **more)


def first_line(log: Path, process: ForkedProcess) -> str:
    while "\n" not in (text := log.read_text()):
        assert process.poll() is None, text
        os.sched_yield()
    return text.partition("\n")[0]


def children() -> set[psutil.Process]:
    """Of this process, which has some of other tests too: a Redis, and a fork server that launchers share."""
    return set(psutil.Process().children())


def gone(pid: int) -> bool:
    end = time.monotonic() + LONG_S
    while runs(pid):
        assert time.monotonic() < end
        os.sched_yield()
    return True


def test_a_forked_process_is_as_one_that_is_executed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    process = fork(server, tmp_path / "log", "worker", "3", "two words", env={"A": "b"})
    assert process.wait() == 3
    line, err, *_ = (tmp_path / "log").read_text().splitlines()
    found = json.loads(line)
    assert err == "err"
    assert found == {
        "argv": [found["argv"][0], "3", "two words"],
        "name": "__main__",
        "A": "b",
        "secret": None,
        "cwd": str(tmp_path / "there"),
        "parent": os.getpid(),
        "session": process.pid,
        "fds": [0, 1, 2, 3],  # 3: of the listing
        "imported": True,
        "frozen": True,
        "line": f"{sys.executable} -m worker 3 two words",
        "int": str(signal.default_int_handler),
    }
    assert Path(found["argv"][0]).name == "worker.py"


@pytest.mark.parametrize("number", [3, 4, 5, 6, 7, 200])
def test_descriptors_come_under_their_numbers(start: Start, tmp_path: Path, number: int) -> None:
    """Whichever of them are open in the server, or here."""
    server = start()
    reading, writing = os.pipe()
    with open(os.devnull, "rb") as nothing:
        places = {0: nothing.fileno(), 1: writing, 2: 2, number: writing}
        code = f"import os; os.write({number}, b'announced')"
        (Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]) / "announcer.py").write_text(code)
        process = server.fork([sys.executable, "-m", "announcer"], os.environ, places)
    assert process is not None
    os.close(writing)
    with open(reading) as pipe:
        assert pipe.read() == "announced"  # and nobody else keeps the pipe open
    assert process.wait() == 0


@pytest.mark.parametrize(
    ("ends", "code", "printed"),
    [
        ("pass", 0, "last"),
        ("sys.exit()", 0, "last"),
        ("sys.exit(258)", 2, "last"),
        ("sys.exit('a reason')", 1, "a reason\nlast"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\nlast"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\nlast"),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ],
)
def test_it_ends_as_an_interpreter_does(
    start: Start, modules: Path, tmp_path: Path, ends: str, code: int, printed: str
) -> None:
    """Its threads first, then what it has registered."""
    (modules / "ends.py").write_text(f"""
import atexit, os, sys, threading
go = threading.Event()
threading.Thread(target=lambda: (go.wait(), sys.stdout.write("last"))).start()
atexit.register(lambda: print(sys.stdout.seekable() and ""))
threading._register_atexit(go.set)
{ends}
""")
    process = fork(start(), tmp_path / "log", "ends")
    assert process.wait() == code
    assert (tmp_path / "log").read_text().strip().endswith(printed)


def test_signals_and_ends(start: Start, tmp_path: Path) -> None:
    server = start()
    process = fork(server, tmp_path / "log", "sleeper")
    assert first_line(tmp_path / "log", process) == "here"
    assert process.poll() is None
    ends: list[int] = []
    waiting = threading.Thread(target=lambda: ends.append(process.wait()))
    waiting.start()
    process.send_signal(signal.SIGTERM)
    waiting.join(LONG_S)
    assert (ends, process.poll(), process.wait()) == ([-signal.SIGTERM], -signal.SIGTERM, -signal.SIGTERM)
    process.send_signal(signal.SIGKILL)  # to nobody


def test_processes_outlive_the_server_and_the_next_one_is_refused(start: Start, tmp_path: Path) -> None:
    server = start()
    process = fork(server, tmp_path / "log", "sleeper")
    first_line(tmp_path / "log", process)
    assert server._process is not None
    server._process.kill()
    server._process.wait()
    assert fork(server, tmp_path / "other", "worker") is None
    assert not server.ready
    assert server.failure
    assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    assert process.wait() == 0


@pytest.mark.parametrize(
    ("module", "failure"),
    [("broken", "ZeroDivisionError: division by zero"), ("no_such", "No module named 'no_such'")],
)
def test_what_cannot_be_imported_is_named(start: Start, module: str, failure: str) -> None:
    server = start("xmlrpc", module)
    assert not server.ready
    assert failure in server.failure


@pytest.mark.parametrize(
    ("module", "refusal"),
    [("threaded", "it has 2 threads"), ("with_driver", "it has loaded CUDA's driver")],
)
def test_a_server_that_would_lose_something_refuses(
    start: Start, tmp_path: Path, module: str, refusal: str
) -> None:
    server = start(module)
    assert not server.ready
    assert server.failure == refusal
    assert fork(server, tmp_path / "log", "worker") is None


def test_forked_processes_draw_different_numbers(start: Start, modules: Path, tmp_path: Path) -> None:
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    (modules / "draws.py").write_text(code)
    server, drawn = start("numpy"), set()
    for _ in range(2):
        fork(server, tmp_path / "log", "draws").wait()
        drawn |= set((tmp_path / "log").read_text().split())
    assert len(drawn) == 4


@pytest.mark.parametrize("long", [False, True], ids=["no_folder", "long_environment"])
def test_a_request_that_cannot_be_made_costs_no_other(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    server, before = start(), os.getcwd()
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    env = {"LONG": "x" * 400_000} if long else {}
    if long:
        os.chdir(before)
    assert fork(server, tmp_path / "log", "worker", env=env) is None
    os.chdir(before)
    assert fork(server, tmp_path / "log", "worker", "4").wait() == 4


def test_a_process_that_is_not_inherited_is_let_go(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel knows no subreapers, or lets nobody be one: its end would be lost."""
    monkeypatch.setattr(fork_server, "inheriting", nullcontext)
    server = start()
    assert fork(server, tmp_path / "log", "worker") is None
    assert "No child processes" in server.failure
    assert (tmp_path / "log").read_text() == ""


def test_two_threads_may_wait_and_fork(start: Start, modules: Path, tmp_path: Path) -> None:
    """As two trainings of a notebook do."""
    (modules / "slow.py").write_text("import time; time.sleep(0.5)")
    command = [sys.executable, "-m", "asyncrl.system.forking", "slow"]
    server, codes = ForkServer.execute(command, os.environ), []

    def work(number: int) -> None:
        assert server.wait_ready(LONG_S)
        for _ in range(10):
            codes.append(fork(server, tmp_path / f"log{number}", "worker", "5").wait())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    server.end()
    assert codes == [5] * 20


def test_a_stopped_server_is_not_waited_for_and_leaves_no_process(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    server = start()
    assert server._process is not None
    server._process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(fork_server, "FORK_S", 0.2)
    assert fork(server, tmp_path / "log", "worker") is None
    assert server.failure == "timed out"
    assert (tmp_path / "log").read_text() == ""
    assert children() <= before


def test_a_fork_that_is_late_leaves_nothing_that_runs(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process between may stay as an entry of the kernel's table: nobody learns its id."""

    def late(server: ForkServer, new: object) -> ForkedProcess:
        raise TimeoutError("timed out")

    monkeypatch.setattr(ForkServer, "_new_process", late)
    before = children()
    for number in range(5):
        assert fork(start(), tmp_path / f"log{number}", "worker") is None
        assert (tmp_path / f"log{number}").read_text() == ""
    assert all(gone(child.pid) for child in children() - before)


def test_a_server_that_imports_for_too_long_is_ended(modules: Path) -> None:
    (modules / "slow.py").write_text("import time; time.sleep(600)")
    server = ForkServer.execute([sys.executable, "-m", "asyncrl.system.forking", "slow"], os.environ)
    assert not server.wait_ready(0.1)
    assert server.failure == "it has not imported its modules within 0.1 s"
    assert server._process is not None
    assert server._process.poll() == -signal.SIGKILL


def test_a_process_may_get_a_server_of_its_own(start: Start, tmp_path: Path) -> None:
    """Whose processes are children of that process, and which has imported nothing anew."""
    process = fork(start(), tmp_path / "log", "parent", serves=True)
    assert process.wait() == 0
    line, *rest = (tmp_path / "log").read_text().splitlines()
    found = json.loads(line)
    assert (found["parent"], found["imported"], found["fds"]) == (process.pid, True, [0, 1, 2, 3])
    assert rest[-1] == f"{process.pid} 7"


LAUNCHER = """
import os, sys
from asyncrl.system.fork_server import own_server
server = own_server(["xmlrpc"], {})
assert server.wait_ready(60)
process = server.fork([sys.executable, "-m", "sleeper"], os.environ, {0: 0, 1: 1, 2: 2}, serves=True)
print(process.pid, server._process.pid, flush=True)
process.wait()
"""


@pytest.mark.usefixtures("modules")
def test_nothing_survives_a_launcher_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        lines = [launcher.stdout.readline(), launcher.stdout.readline()]
        (pids,) = (line for line in lines if line != "here\n")
        process, server = (int(word) for word in pids.split())
        own = [child.pid for child in psutil.Process(process).children()]
        launcher.kill()
        assert len(own) == 1
        assert all(gone(pid) for pid in (process, server, *own))


def test_this_process_has_one_server_and_a_new_one_if_that_fails(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "own", None)
    first = own_server(["xmlrpc"], {"A": "b"})
    assert first is not None
    assert own_server(["json"], {}) is first
    assert first._process is not None
    first._process.kill()  # as Linux does when the thread ends that has begun it
    first._process.wait()
    second = own_server(["xmlrpc"], {})
    assert second is not None
    assert second is not first
    assert second.wait_ready(LONG_S)
    second.end()


def test_another_run_with_other_variables_has_a_new_server(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What libraries read as they are imported would be old."""
    monkeypatch.setattr(fork_server, "own", None)
    first = own_server(["xmlrpc"], {})
    assert first is not None
    assert first.wait_ready(LONG_S)
    fork(first, tmp_path / "log", "worker").wait()
    assert own_server(["xmlrpc"], {}) is first
    monkeypatch.setenv("A_VARIABLE_OF_THIS_TEST", "1")  # that no other test has set before
    second = own_server(["xmlrpc"], {})
    assert second is not None
    assert second is not first
    assert not first.lives
    second.end()


@pytest.mark.parametrize("variable", fork_server.BOUND)
def test_there_is_none_where_openmp_binds_to_cores(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "own", None)
    assert own_server(["xmlrpc"], {variable: "true"}) is None


def test_torch_has_the_threads_that_openmp_would_have(start: Start, modules: Path, tmp_path: Path) -> None:
    (modules / "counted.py").write_text("import torch; print(torch.get_num_threads())")
    process = fork(start("torch"), tmp_path / "log", "counted", env={"OMP_NUM_THREADS": "3"})
    assert process.wait() == 0
    assert (tmp_path / "log").read_text() == "3\n"
