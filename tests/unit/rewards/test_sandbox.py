"""Programs that mean harm, and what becomes of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from missing import skip_without_namespaces

from asyncrl.errors import ConfigError
from asyncrl.rewards.sandbox import SCRIPT, Isolation, Limits, ProgramRun, Sandbox

SOON = Limits(wall_s=1.0, cpu_s=60)
PATIENT = Limits(wall_s=30.0, cpu_s=30)
"""For programs that end by themselves, on a machine that may be busy."""

BOTH = pytest.mark.parametrize("isolation", ["namespaces", "limits"])


def sandbox(limits: Limits, isolation: Isolation = "namespaces") -> Sandbox:
    if isolation == "namespaces":
        skip_without_namespaces()
    return Sandbox(limits, isolation)


def run(program: str, limits: Limits = PATIENT, isolation: Isolation = "namespaces") -> ProgramRun:
    (only,) = sandbox(limits, isolation).run(program)
    return only


@pytest.fixture(autouse=True)
def in_a_folder_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@BOTH
def test_a_harmless_program_reads_prints_and_may_use_its_folder(isolation: Isolation) -> None:
    program = "open('notes', 'w').write(input() * 2); print(open('notes').read())"
    one, other = sandbox(PATIENT, isolation).run(program, inputs=["ab\n", "ü\n"])
    assert (one.out, one.well) == ("abab\n", True)
    assert (other.out, other.well) == ("üü\n", True)


@BOTH
def test_threads_processes_and_modules_work_as_ever(isolation: Isolation) -> None:
    program = """
import dataclasses, subprocess, threading, typing
@dataclasses.dataclass
class Point:
    x: "Number"
Number = int
print(typing.get_type_hints(Point), Point.__annotations__)
def f(x: Number): return x
print(f.__annotations__["x"])
thread = threading.Thread(target=print, args=["thread"], kwargs={"flush": True})
thread.start()
thread.join()
print(subprocess.run(["echo", "process"], capture_output=True, text=True).stdout)
"""
    lines = ["{'x': <class 'int'>} {'x': 'Number'}", "<class 'int'>", "thread", "process", "", ""]
    assert run(program, isolation=isolation).out == "\n".join(lines)


@BOTH
def test_an_exception_and_an_exit_status_are_told(isolation: Isolation) -> None:
    assert run("1 / 0", isolation=isolation) == ProgramRun("exit", 1, "", None)
    assert run("import sys; print(1); sys.exit(3)", isolation=isolation) == ProgramRun("exit", 3, "1\n", None)
    assert run("this is no program", isolation=isolation).code == 1


@BOTH
def test_an_endless_loop_that_ignores_signals_is_killed_at_the_deadline(isolation: Isolation) -> None:
    program = """
import signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print("begun", flush=True)
while True: pass
"""
    assert run(program, Limits(wall_s=3.0, cpu_s=60), isolation) == ProgramRun("time", -9, "begun\n", None)


def test_the_deadline_is_that_of_all_runs_together() -> None:
    runs = sandbox(SOON).run("while True: pass", inputs=["", "", ""])
    assert [one.ended for one in runs] == ["time"] * 3


def test_cpu_time_is_limited_even_where_the_signal_is_caught() -> None:
    program = """
import signal
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True: pass
"""
    ended = run(program, Limits(wall_s=60.0, cpu_s=1))
    assert (ended.ended, ended.code) == ("exit", -9)


@BOTH
def test_a_fork_bomb_meets_the_limit_and_dies_with_all_its_children(
    isolation: Isolation, tmp_path: Path
) -> None:
    program = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""
    assert run(program, SOON, isolation).ended == "time"
    assert_nobody_is_left(tmp_path)


@BOTH
def test_no_more_processes_than_the_limit(isolation: Isolation, tmp_path: Path) -> None:
    program = """
import os, signal
made = 0
try:
    while True:
        if os.fork() == 0: signal.pause()
        made += 1
except OSError:
    print(made)
"""
    made = int(run(program, Limits(wall_s=30.0, processes=12), isolation).out)
    assert 0 < made < (12 if isolation == "namespaces" else 100)  # others of the user may end meanwhile
    assert_nobody_is_left(tmp_path)


@BOTH
def test_a_child_that_outlives_its_parent_is_killed(isolation: Isolation, tmp_path: Path) -> None:
    program = """
import os, signal
if os.fork() == 0:
    try: os.setsid()
    except OSError: print("no session", flush=True)
    signal.pause()
os.wait3(os.WNOHANG)
"""
    ended = run(program, isolation=isolation)
    assert (ended.ended, ended.code) == ("exit", 0)
    assert_nobody_is_left(tmp_path)


@BOTH
def test_memory_and_files_are_limited(isolation: Isolation) -> None:
    limits = Limits(wall_s=30.0, memory_mb=512, file_mb=4)
    assert run("hog = [bytearray(1 << 24) for _ in range(1000)]", limits, isolation).code == 1
    assert run("open('big', 'wb').write(bytes(1 << 24))", limits, isolation).code == 1


def test_many_files_together_are_limited() -> None:
    program = """
for n in range(100):
    open(str(n), "wb").write(bytes(1 << 20))
"""
    assert run(program, Limits(wall_s=30.0, file_mb=8)).code == 1


@BOTH
def test_namespaces_and_memory_that_no_limit_counts_are_refused(isolation: Isolation) -> None:
    program = """
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
for made in (
    libc.unshare(0x10000000),
    libc.syscall(clone, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0),
    libc.memfd_create(b"memory", 0),
    libc.shmget(0, 4096, 0o600),
):
    print(made, ctypes.get_errno())
print(libc.syscall(435, 0, 0), ctypes.get_errno())
"""
    assert run(program, isolation=isolation).out == 4 * "-1 1\n" + "-1 38\n"


def test_the_children_of_one_run_leave_the_next_its_processes() -> None:
    program = """
import os, signal
for _ in range(6):
    if os.fork() == 0: signal.pause()
"""
    runs = sandbox(Limits(wall_s=30.0, processes=12)).run(program, inputs=[""] * 4)
    assert [one.code for one in runs] == [0] * 4


@BOTH
def test_output_is_cut_off(isolation: Isolation) -> None:
    ended = run("while True: print('x' * 1000)", Limits(wall_s=30.0, output_kb=8), isolation)
    assert (ended.ended, len(ended.out)) == ("output", 8 * 1024)


@BOTH
@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
def test_there_are_no_sockets(isolation: Isolation, family: str) -> None:
    program = f"""
import socket
try: socket.socket(socket.{family})
except PermissionError: print("refused")
"""
    assert run(program, isolation=isolation).out == "refused\n"


def test_files_cannot_be_changed_or_deleted(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("dear")
    program = f"""
import os, shutil
for harm in (
    lambda: os.remove({str(kept)!r}),
    lambda: open({str(kept)!r}, "w"),
    lambda: os.chmod({str(kept)!r}, 0o777),
    lambda: open({str(tmp_path / "new")!r}, "w"),
    lambda: open("/dev/shm/new", "w"),
    lambda: os.mkdir("/new"),
):
    try: harm()
    except OSError: print("refused")
shutil.rmtree({str(tmp_path)!r}, ignore_errors=True)
"""
    assert run(program).out == 6 * "refused\n"
    assert kept.read_text() == "dear"
    assert os.listdir(tmp_path) == ["kept"]


@BOTH
def test_no_signal_reaches_the_processes_around_it(isolation: Isolation) -> None:
    program = f"""
import os, signal
for pid in (os.getppid(), {os.getpid()}):
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
print("done")
"""
    assert run(program, isolation=isolation) == ProgramRun("exit", 0, "done\n", None)


def test_the_processes_around_it_cannot_be_seen() -> None:
    assert run("import os; print(os.listdir('/proc'), os.getppid())").out == "[] 1\n"


@BOTH
def test_what_it_writes_goes_nowhere_else(isolation: Isolation, capfd: pytest.CaptureFixture[str]) -> None:
    program = """
import os
for fd in range(2, 256):
    try: os.write(fd, b"forged")
    except OSError: pass
print("done")
"""
    assert run(program, isolation=isolation) == ProgramRun("exit", 0, "done\n", None)
    assert capfd.readouterr() == ("", "")


def test_tests_run_in_the_world_of_the_program() -> None:
    (ended,) = sandbox(PATIENT).run(
        "def double(x): return 2 * x", tests=["assert double(2) == 4", "assert double(2) == 5", "double.x"]
    )
    assert ended.passed == [True, False, False]


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "import os; f = lambda x: os._exit(0)",
        "import sys; f = lambda x: sys.exit(1)",
        "import os; os.write(3, b'1'); os._exit(0)",
        "raise SystemExit",
        "f = lambda x: 1 / 0",
        "while True: pass",
    ],
)
def test_leaving_early_passes_no_test(program: str) -> None:
    (ended,) = sandbox(Limits(wall_s=5.0)).run(program, tests=["assert f(1) == 2"])
    assert ended.passed in (None, [False])


def test_limits_must_be_above_0() -> None:
    with pytest.raises(ConfigError, match=r"^memory_mb = 0: must be above 0"):
        Limits(memory_mb=0)


def test_a_machine_that_permits_no_sandbox_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandbox(PATIENT).probe() is None
    assert Sandbox(PATIENT, "limits").probe() is None
    monkeypatch.setattr("asyncrl.rewards.sandbox.sys.platform", "darwin")
    assert Sandbox(PATIENT).probe() == "it needs Linux"
    monkeypatch.undo()
    too_little = Sandbox(Limits(memory_mb=1)).probe()
    assert too_little is not None
    assert "a program that prints 42" in too_little


def test_a_process_of_this_test_is_seen_and_those_of_others_are_not(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "input()", str(SCRIPT)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, env={"HOME": str(tmp_path / "x")}) as process:
        assert [one.pid for one in processes_in(tmp_path)] == [process.pid]
        assert processes_in(tmp_path / "other") == []
        assert process.stdin is not None
        process.stdin.write(b"\n")


def processes_in(folder: Path) -> list[psutil.Process]:
    """Processes of sandboxes whose folder is below this one; other tests run theirs at the same time."""
    return [one for one in psutil.process_iter(["cmdline"]) if _belongs(one, folder)]


def _belongs(process: psutil.Process, folder: Path) -> bool:
    if str(SCRIPT) not in (process.info["cmdline"] or ()):
        return False
    try:
        return Path(process.environ().get("HOME", "/")).is_relative_to(folder)
    except psutil.NoSuchProcess:
        return False


def assert_nobody_is_left(folder: Path) -> None:
    assert psutil.wait_procs(processes_in(folder), timeout=20)[1] == []
