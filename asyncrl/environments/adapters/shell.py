"""A Linux of its own for each rollout, by bubblewrap: this system's programs, and folders in memory.

    Shell ── a line of script ──▸ bash of the sandbox's root ── as nobody ──▸ the policy's command
          ◂─ status, output ────

It has no network, no rights, /usr read-only, and ends with all its processes. Unlike the sandboxes of `rewards/` it has
the system's programs, and no filter of system calls.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import shlex
import shutil
import signal
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from asyncrl.rewards.sandbox import Limits, SandboxError
from asyncrl.rewards.sandbox.containers import FIRST_TO_END, Bubblewrap

USER = "setpriv --reuid 1000 --regid 1000 --clear-groups --bounding-set=-all --inh-caps=-all --no-new-privs"
"""The policy's user, whom the sandbox's root does not trust."""
PROGRAMS = ("bwrap", "setpriv", "bash", "timeout", "prlimit", "tar", "base64")
LONGEST_LINE = 1 << 26
"""Bytes of an answer."""


class Shell:
    """One caller at a time. folders: those that commands may write to · memory_mb: of each process · folder_mb: of
    each folder · most_chars: of an output"""

    def __init__(self, folders: Sequence[str], memory_mb: int, folder_mb: int, most_chars: int) -> None:
        self._folders, self._folder_mb = folders, folder_mb
        self._memory_mb, self._most = memory_mb, most_chars
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Raises SandboxError if this machine does not permit it."""
        for program in PROGRAMS:
            if shutil.which(program) is None:
                raise SandboxError(f"{program} is not installed")
        outer = Bubblewrap(Limits())
        self._process = await asyncio.create_subprocess_exec(
            *(*FIRST_TO_END, "bwrap", *outer.identity(), *self._words(), "--", "bash", "--norc"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            pass_fds=outer.descriptors(),
            start_new_session=True,
            limit=LONGEST_LINE,
        )
        await self._line(">/out/now; echo 0 ''")

    async def run(
        self, command: str, place: str, deadline_s: float, environment: str = ""
    ) -> tuple[int, str]:
        """The status of a command and what it printed; 137 if it was killed at its deadline.

        environment: assignments, as `env` takes them
        """
        limited = f"timeout -s KILL {deadline_s} prlimit --nproc=256 --as={self._memory_mb << 20} --core=0"
        started = f"cd {shlex.quote(place)}; {_as_user(f'env {environment} {limited} bash -c')}"
        # A process that an earlier command has left may still write to the file of that one.
        text = f"rm /out/now; {started} {shlex.quote(command)} </dev/null >/out/now 2>&1"
        return await self._line(f"( {text} ); echo $? $(head -c {4 * self._most} /out/now | base64 -w0)")

    async def put(self, source: Path, place: str) -> None:
        """Copy a file, or what is in a folder, to a place that belongs to the sandbox's root or its user."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(source, "." if source.is_dir() else source.name)
        raw = base64.b64encode(packed.getvalue()).decode()
        unpack = f"base64 -d <<'END' | tar -x --no-same-owner -C {shlex.quote(place)}"
        status, _ = await self._line(f"{unpack}; echo $? ''\n{raw}\nEND\n")
        if status != 0:
            raise SandboxError(f"{source} could not be copied to {place}")

    async def rule(self, script: str) -> tuple[int, str]:
        """Run a script as the sandbox's root, to whom its folders belong. Returns status and stdout."""
        return await self._line(f"( {script} ) >/out/now 2>/dev/null; echo $? $(base64 -w0 </out/now)")

    async def end_processes(self) -> None:
        """Kill all that the user's commands have left."""
        await self._line(f"{_as_user('bash -c')} 'kill -9 -1' >/dev/null 2>&1; echo 0 ''")

    async def close(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def _line(self, script: str) -> tuple[int, str]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = b""
        try:
            with suppress(ConnectionError):
                self._process.stdin.write(f"{script}\n".encode(errors="replace"))
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except BaseException:  # the next line would be the answer to this one
            await self.close()
            raise
        if not line:
            raise SandboxError("the shell has ended, or did not start")
        status, _, raw = line.decode().strip().partition(" ")
        return int(status), base64.b64decode(raw).decode(errors="replace")

    def _words(self) -> list[str]:
        words = ["--die-with-parent", "--new-session", "--unshare-cgroup-try"]
        words += [f"--unshare-{kind}" for kind in ("pid", "net", "ipc", "uts")]
        words += [
            "--clearenv",
            "--setenv",
            "PATH",
            "/usr/local/bin:/usr/bin:/usr/sbin",
            "--setenv",
            "HOME",
            "/root",
        ]
        words += ["--proc", "/proc", "--dev", "/dev", "--ro-bind", "/usr", "/usr"]
        for name in ("bin", "sbin", "lib", "lib64"):
            words += ["--symlink", f"usr/{name}", f"/{name}"]
        for folder in ("/etc/alternatives", "/etc/ssl"):
            words += ["--ro-bind-try", folder, folder]
        of_root, of_all = ("/out", "/tests", "/logs/verifier"), ("/tmp", "/root", *self._folders)
        for folder in (*of_root, *of_all):
            perms = "0755" if folder in of_root else "0777"
            words += ["--perms", perms, "--size", str(self._folder_mb << 20), "--tmpfs", folder]
        return [*words, "--remount-ro", "/", "--chdir", "/"]


def _as_user(command: str) -> str:
    """The command as the policy's user, where root made the sandbox. Elsewhere all of the sandbox belongs to the
    caller's user."""
    return f"{USER} {command}" if os.geteuid() == 0 else command
