"""Programs that mean harm, and what becomes of them, in every sandbox. Tests that programs forge: `test_judge.py`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from missing import skip_without_sandbox

from asyncrl.rewards.sandbox import Limits, ProgramRun, Sandbox, SandboxError, Tests
from asyncrl.rewards.sandbox.choice import KINDS
from asyncrl.rewards.sandbox.sandbox import sandbox_problem

SOON = Limits(wall_s=3.0, cpu_s=60)
PATIENT = Limits(wall_s=30.0, total_s=60.0, cpu_s=30)
"""For programs that end by themselves, on a machine that may be busy."""


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    skip_without_sandbox(request.param)
    return str(request.param)


def sandbox(limits: Limits, kind: str) -> Sandbox:
    return KINDS[kind](limits)


def run(program: str, kind: str, limits: Limits = PATIENT) -> ProgramRun:
    (only,) = sandbox(limits, kind).run(program)
    return only


# ---- harmless programs


def test_a_harmless_program_reads_prints_and_may_use_its_folder(kind: str) -> None:
    program = "open('notes', 'w').write(input() * 2); print(open('notes').read())"
    one, other = sandbox(PATIENT, kind).run(program, inputs=["ab\n", "ü\n"])
    assert (one.out, one.well) == ("abab\n", True)
    assert (other.out, other.well) == ("üü\n", True)


def test_threads_processes_and_modules_work_as_ever(kind: str) -> None:
    program = """
import dataclasses, sqlite3, ssl, subprocess, sys, tempfile, threading, typing, numpy
@dataclasses.dataclass
class Point:
    x: "Number"
Number = int
print(typing.get_type_hints(Point), Point.__annotations__)
thread = threading.Thread(target=print, args=["thread"], kwargs={"flush": True})
thread.start()
thread.join()
words = [sys.executable, "-c", "print('process')"]
print(subprocess.run(words, capture_output=True, text=True).stdout, numpy.arange(3).sum())
tempfile.TemporaryFile().close()
exit(3)
"""
    lines = ["{'x': <class 'int'>} {'x': 'Number'}", "thread", "process", " 3", ""]
    assert run(program, kind) == ProgramRun("exit", 3, "\n".join(lines), None)


def test_an_exception_and_an_exit_status_are_told(kind: str) -> None:
    assert run("1 / 0", kind) == ProgramRun("exit", 1, "", None)
    assert run("import sys; print(1); sys.exit(3)", kind) == ProgramRun("exit", 3, "1\n", None)
    assert run("this is no program", kind).code == 1


# ---- time, CPU, processes, memory, files, output


def test_an_endless_loop_that_ignores_signals_is_killed_at_the_deadline(kind: str) -> None:
    program = """
import signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
print("begun", flush=True)
while True: pass
"""
    assert run(program, kind, SOON) == ProgramRun("time", -9, "begun\n", None)


def test_every_run_has_a_deadline_and_all_together_one(kind: str) -> None:
    program = "import sys\nwhile input() == 'on': pass"
    given = ["on\n" * (1 << 16), "off\n"]
    late = "while input() != 'off':\n    while True: pass"
    assert [one.ended for one in sandbox(SOON, kind).run(late, inputs=["on\n", "off\n"])] == ["time", "exit"]
    assert [one.ended for one in sandbox(PATIENT, kind).run(program, inputs=given)] == ["exit", "exit"]
    together = Limits(wall_s=30.0, total_s=1.0)
    assert [one.ended for one in sandbox(together, kind).run(late, inputs=["on\n"] * 3)] == ["time"] * 3


def test_cpu_time_is_limited_even_where_the_signal_is_caught(kind: str) -> None:
    program = """
import signal
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True: pass
"""
    ended = run(program, kind, Limits(wall_s=60.0, total_s=60.0, cpu_s=1))
    assert (ended.ended, ended.code) == ("exit", -9)


@pytest.fixture
def mark() -> Iterator[str]:
    """A program that gives its processes a name that the outside can see. Afterwards nobody has it."""
    name = uuid4().hex[:12]
    yield f"import ctypes; ctypes.CDLL(None).prctl(15, b'{name}')"
    left = [one for one in psutil.process_iter(["name"]) if one.info["name"] == name]
    assert psutil.wait_procs(left, timeout=20)[1] == []


def test_a_fork_bomb_meets_the_limit_and_dies_with_all_its_children(kind: str, mark: str) -> None:
    program = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""
    assert run(mark + program, kind, SOON).ended == "time"


def test_no_more_processes_than_the_limit(kind: str, mark: str) -> None:
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
    assert 0 < int(run(mark + program, kind, Limits(wall_s=30.0, processes=12)).out) < 12


def test_a_child_that_outlives_its_parent_is_killed(kind: str, mark: str) -> None:
    program = """
import os, signal
if os.fork() == 0:
    for leave in (os.setsid, os.setpgrp):
        try: leave()
        except OSError: print("stays", flush=True)
    signal.pause()
os.wait3(os.WNOHANG)
while True: pass
"""
    assert run(mark + program, kind, Limits(wall_s=3.0)).out == "stays\nstays\n"


def test_memory_and_files_are_limited(kind: str) -> None:
    limits = Limits(wall_s=30.0, memory_mb=512, file_mb=4)
    assert run("hog = [bytearray(1 << 24) for _ in range(1000)]", kind, limits).code == 1
    assert run("open('big', 'wb').write(bytes(1 << 24))", kind, limits).code == 1


def test_where_memory_runs_out_programs_end_before_the_run(kind: str) -> None:
    name = uuid4().hex[:12]
    program = f"import ctypes, signal; ctypes.CDLL(None).prctl(15, b'{name}'); signal.pause()"
    with ThreadPoolExecutor() as pool:
        running = pool.submit(run, program, kind)
        while not (found := [one for one in psutil.process_iter(["name"]) if one.info["name"] == name]):
            assert not running.done()
        score = Path(f"/proc/{found[0].pid}/oom_score_adj").read_text()
        found[0].kill()
        assert (score, running.result().code) == ("1000\n", -9)


def test_many_files_together_are_limited(kind: str) -> None:
    program = """
for n in range(100):
    open(str(n), "wb").write(bytes(1 << 20))
"""
    assert run(program, kind, Limits(wall_s=30.0, file_mb=8)).code == 1


def test_stdin_is_no_memory_that_no_limit_counts(kind: str) -> None:
    program = """
import os
fd = os.open("/dev/null", os.O_RDWR)
for write in (lambda: os.write(0, b"x"), lambda: os.ftruncate(0, 1 << 30)):
    try: write()
    except OSError: print("refused")
"""
    assert run(program, kind).out == 2 * "refused\n"


def test_the_children_of_one_run_leave_the_next_its_processes(kind: str) -> None:
    program = """
import os, signal
for _ in range(6):
    if os.fork() == 0: signal.pause()
"""
    runs = sandbox(Limits(wall_s=30.0, processes=12), kind).run(program, inputs=[""] * 4)
    assert [one.code for one in runs] == [0] * 4


def test_output_is_cut_off(kind: str) -> None:
    ended = run("while True: print('x' * 1000)", kind, Limits(wall_s=30.0, output_kb=8))
    assert (ended.ended, len(ended.out)) == ("output", 8 * 1024)


# ---- what it cannot reach


def test_calls_that_leave_the_sandbox_are_refused(kind: str) -> None:
    program = """
import ctypes, os, resource, signal
libc = ctypes.CDLL(None, use_errno=True)
clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
for made in (
    libc.unshare(0x10000000),
    libc.syscall(clone, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0),
    libc.memfd_create(b"memory", 0),
    libc.shmget(0, 4096, 0o600),
    libc.mount(b"none", b"/box", b"tmpfs", 0, None),
    libc.ptrace(16, 1, 0, 0),
    libc.prlimit(1, resource.RLIMIT_AS, None, None),
    libc.setuid(0),
    libc.syscall(*{"x86_64": (206,), "aarch64": (0,)}[os.uname().machine], 1, ctypes.byref(ctypes.c_ulong())),
):
    print(made, ctypes.get_errno())
print(libc.syscall(0x40000029, 2, 1, 0), ctypes.get_errno())  # socket of x32
print(libc.syscall(435, 0, 0), ctypes.get_errno())
"""
    assert run(program, kind).out == 10 * "-1 1\n" + "-1 38\n"


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
def test_there_are_no_sockets(kind: str, family: str) -> None:
    program = f"""
import socket
try: socket.socket(socket.{family})
except PermissionError: print("refused")
"""
    assert run(program, kind).out == "refused\n"


def test_the_devices_of_this_machine_are_not_there_and_none_can_be_made(kind: str) -> None:
    program = """
import os, stat
print(sorted(os.listdir("/dev")))
for mode, major, minor in ((stat.S_IFBLK, 7, 0), (stat.S_IFCHR, 1, 11), (stat.S_IFCHR, 10, 232)):
    try: os.mknod("device", mode | 0o600, os.makedev(major, minor))
    except OSError: print("refused")
print(os.statvfs("/box").f_flag & os.ST_NODEV > 0, os.statvfs("/").f_flag & os.ST_NODEV > 0)
print(len(open("/dev/urandom", "rb").read(8)), open("/dev/zero", "rb").read(1), open("/dev/null", "w").write("x"))
"""
    lines = ["['null', 'urandom', 'zero']", *["refused"] * 3, "True True", "8 b'\\x00' 1", ""]
    assert run(program, kind).out == "\n".join(lines)


def test_it_has_no_rights(kind: str) -> None:
    program = """
import ctypes, os, struct
held = ctypes.create_string_buffer(24)
ctypes.CDLL(None).capget(struct.pack("Ii", 0x20080522, 0), held)
print(os.getresuid(), os.getresgid(), set(os.getgroups()) - {65534}, held.raw == bytes(24))
"""
    assert run(program, kind).out == "(1000, 1000, 1000) (1000, 1000, 1000) set() True\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone has rights to lose")
def test_a_program_that_root_starts_belongs_to_nobody(kind: str, mark: str) -> None:
    name = mark.split("'")[1]
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run, f"{mark}\nwhile True: pass", kind, Limits(wall_s=3.0))
        ids = set[int]()
        while not ids and not running.done():
            found = (one for one in psutil.process_iter(["name", "uids"]) if one.info["name"] == name)
            ids = {uid for one in found for uid in one.info["uids"]}
    assert ids == {65534}


def test_the_files_of_the_user_and_of_the_machine_are_not_there(kind: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("dear")
    kept.chmod(0o600)
    places = [
        str(kept),
        str(Path.home() / ".bashrc"),
        str(Path(__file__)),
        str(Path(__file__).parents[3] / "pyproject.toml"),
    ]
    places += ["/etc", "/home", "/proc/self", "/proc/1", "/sys", "/run", "/var", "/bin/sh", "/dev/shm"]
    program = f"import os; print([place for place in {places!r} if os.path.exists(place)])"
    assert run(program, kind).out == "[]\n"


def test_nothing_but_its_folder_can_be_changed(kind: str) -> None:
    program = """
import json, os, shutil, sys
for harm in (
    lambda: os.remove(json.__file__),
    lambda: open(json.__file__, "w"),
    lambda: os.chmod(sys.executable, 0o777),
    lambda: open("/new", "w"),
    lambda: open("/dev/new", "w"),
    lambda: open("/sandbox/inside/judge.py", "a"),
    lambda: os.mkdir("/new"),
    lambda: os.rmdir("/box"),
    lambda: os.chmod("/dev/null", 0),
):
    try: harm()
    except OSError: print("refused")
"""
    assert run(program, kind).out == 9 * "refused\n"


def test_no_signal_reaches_the_processes_around_it(kind: str) -> None:
    program = f"""
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
for number in (signal.SIGKILL, signal.SIGINT, signal.SIGSTOP, signal.SIGALRM, signal.SIGXCPU):
    for pid in (1, os.getppid(), {os.getpid()}):
        try: os.kill(pid, number)
        except OSError: pass
print("done")
"""
    runs = sandbox(PATIENT, kind).run(program, inputs=["", ""])
    assert runs == [ProgramRun("exit", 0, "done\n", None)] * 2


def test_a_program_that_interrupts_all_that_it_can_reach_ends_itself_alone(kind: str) -> None:
    program = """
import os, signal
os.kill(1, signal.SIGINT)
os.kill(-1, signal.SIGINT)
os.killpg(0, signal.SIGINT)
"""
    for harm in (program, program.replace("SIGINT", "SIGKILL")):
        runs = sandbox(PATIENT, kind).run(harm, inputs=["", ""])
        assert [(one.ended, one.passed) for one in runs] == [("exit", None)] * 2


def test_the_processes_around_it_cannot_be_seen(kind: str) -> None:
    assert run("import os; print(os.listdir('/proc'), os.getppid())", kind).out == "[] 1\n"


def test_what_it_writes_goes_nowhere_else(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    program = """
import os
for fd in range(2, 256):
    try: os.write(fd, b"forged")
    except OSError: pass
print("done")
"""
    assert run(program, kind) == ProgramRun("exit", 0, "done\n", None)
    assert capfd.readouterr() == ("", "")


# ---- the sandbox itself


def test_it_names_why_it_does_not_work(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sandbox(PATIENT, kind)
    assert sandbox_problem(made) is None
    monkeypatch.setattr("asyncrl.rewards.sandbox.sandbox.PRINTS_42", "print(41)")
    assert str(sandbox_problem(made)).startswith(
        "a program that prints 42 gave ProgramRun(ended='exit', code=0, out='41"
    )
    monkeypatch.setattr("asyncrl.rewards.sandbox.containers.sys.platform", "darwin")
    assert sandbox_problem(sandbox(PATIENT, kind)) == "it needs Linux"


def test_one_whose_processes_die_raises(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sandbox(PATIENT, kind)
    monkeypatch.setattr("asyncrl.rewards.sandbox.containers.START_S", 0.0)
    monkeypatch.setattr(made, "_limits", Limits(total_s=0.001))
    with pytest.raises(SandboxError, match="did not end"):
        made.run("print(1)")
    with pytest.raises(SandboxError, match="did not end"):
        made.run("def f(): return 1", tests=Tests(["assert f() == 1"]))
