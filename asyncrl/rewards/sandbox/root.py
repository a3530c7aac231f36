"""The files that a sandbox has: Python, its packages, and the libraries of the system that they need."""

from __future__ import annotations

import compileall
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from asyncrl.rewards.sandbox.sandbox import SandboxError

OWN = "/box"
"""The program's folder."""
INSIDE = Path(__file__).with_name("inside")
SEEN_AT = "/sandbox"
"""Where `INSIDE` lies in the sandbox."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
LIBRARY = re.compile(r"(?:=>|^)\s*(/\S+) \(0x", re.MULTILINE)
SYSTEM = ("/lib", "/usr/lib")
"""Beginnings of folders that hold nothing but what the system's packages installed there."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": OWN, "TMPDIR": OWN, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
LDD_S = 60.0
LINKED = ("_bz2", "_ctypes", "_decimal", "_hashlib", "_lzma", "_sqlite3", "_ssl", "_uuid", "pyexpat", "zlib")
"""Modules of the standard library that are linked to libraries of others."""


@dataclass(frozen=True, slots=True)
class Root:
    """interpreter: its path; binds: (where it lies, where it is seen), parents first; packages: for sys.path."""

    interpreter: str
    binds: tuple[tuple[str, str], ...]
    packages: tuple[str, ...]

    def command(self, folder: str, call: str) -> list[str]:
        """Start Python with `inside` in `folder`, isolated: no environment variables, no .pth files, no `site`."""
        module = call.partition(".")[0]
        boot = (
            f"import json, sys; sys.path.insert(0, {folder!r}); from inside import {module}; sys.exit({call})"
        )
        return [self.interpreter, "-I", "-S", "-B", "-X", "utf8", "-c", boot]


@cache
def root() -> Root:
    """The root for this interpreter. Raises SandboxError if its libraries cannot be found."""
    compileall.compile_dir(INSIDE, quiet=2)  # nobody inside can write there
    interpreter = os.path.realpath(sys.executable)
    standard = {os.path.realpath(os.path.dirname(os.__file__))}
    if (extensions := sysconfig.get_config_var("DESTSHARED")) and os.path.isdir(extensions):
        standard.add(os.path.realpath(extensions))
    installed = {
        os.path.realpath(entry)
        for entry in sys.path
        if os.path.basename(entry) in ("site-packages", "dist-packages") and os.path.isdir(entry)
    }
    binds = {(folder, folder) for folder in (interpreter, *standard, *installed)}
    folders = (Path(one, below) for one in standard for below in ("", "lib-dynload"))
    modules = [str(path) for folder in folders for name in LINKED for path in folder.glob(f"{name}.*.so")]
    binds.update(_libraries([interpreter, *modules]))
    binds.add((os.path.realpath(INSIDE), f"{SEEN_AT}/{INSIDE.name}"))
    if os.path.isdir("/usr/share/zoneinfo"):
        binds.add((os.path.realpath("/usr/share/zoneinfo"), "/usr/share/zoneinfo"))
    return Root(interpreter, tuple(_without_inner(binds)), tuple(sorted(installed)))


def _libraries(programs: list[str]) -> Iterator[tuple[str, str]]:
    """The files that the dynamic loader needs: whole folders of the system's libraries, single files elsewhere."""
    try:
        done = subprocess.run(["ldd", *programs], capture_output=True, text=True, timeout=LDD_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"ldd, which finds Python's libraries: {error}") from None
    for path in {os.path.normpath(found) for found in LIBRARY.findall(done.stdout)}:
        folder = os.path.dirname(path)
        if folder.startswith(SYSTEM):
            yield (os.path.realpath(folder), folder)
            yield (os.path.realpath(folder), os.path.realpath(folder))
        else:
            yield (os.path.realpath(path), path)


def _without_inner(binds: set[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Without places below others, which are seen there already."""
    places: list[str] = []
    for source, place in sorted(binds, key=lambda bind: bind[1]):
        if not any(place == outer or place.startswith(f"{outer}/") for outer in places):
            places.append(place)
            yield source, place
