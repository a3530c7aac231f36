"""The packages that the checks need, also on a machine without a network.

    make gpu-wheels FOR=3.12    here: build/wheels has them, but for torch, for that Python and this kind of machine
    make gpu-check              there: those that are missing are taken from build/wheels, into a temporary folder

Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from bench.process import ROOT

WHEELS = ROOT / "build" / "wheels"


def requirements() -> list[str]:
    """Of the package, as pyproject.toml has them."""
    found: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return found


def absent(required: Sequence[str]) -> list[str]:
    """Those of which this interpreter has no release, whichever it wants."""
    return [one for one in required if not _installed(re.split(r"[^\w.-]", one)[0])]


def provide(required: Sequence[str], wheels: Path, target: Path) -> None:
    """Let this process and those that it starts import all that is required: what is missing comes from a folder of
    wheels, into the folder `target`. Ends the process with the names of those that are in neither."""
    if (missing := absent(required)) and wheels.is_dir():
        words = ["install", "--quiet", "--disable-pip-version-check", "--no-index"]
        words += ["--find-links", str(wheels), "--target", str(target), *missing]
        subprocess.run([sys.executable, "-m", "pip", *words], stdout=sys.stderr)
        sys.path.insert(1, str(target))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")]))
        importlib.invalidate_caches()
    if missing := absent(required):
        sys.exit(
            f"python -m bench.gpu: {sys.executable} has no {', '.join(missing)}. With a network: pip install them. "
            f"Without: make gpu-wheels FOR={sys.version_info.major}.{sys.version_info.minor} in a checkout that has "
            f"one, and copy its build/wheels to {wheels}"
        )


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.packages", description="Fill build/wheels.")
    parser.add_argument("python", help="of the machine with the GPU, as 3.12")
    python = parser.parse_args().python
    # Their own requirements too, and torch, which is gigabytes, comes from none of them.
    wanted = [one for one in requirements() if not one.startswith("torch")]
    words = ["download", "--disable-pip-version-check", "--only-binary=:all:", "--python-version", python]
    return subprocess.run([sys.executable, "-m", "pip", *words, "-d", str(WHEELS), *wanted]).returncode


if __name__ == "__main__":
    sys.exit(main())
