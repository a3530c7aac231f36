"""Memory that a frame has left is there for the next one."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource
from asyncrl.rpc import sockets

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

sockets.keep_freed_memory()
before = faults()
for _ in range(20):
    frames = [b"x" * 70_000 for _ in range(64)]
    del frames
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone gives memory back so soon")
def test_groups_do_not_get_fresh_pages_each() -> None:
    """1,280 groups of 17 pages, 64 of them at a time."""
    ran = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(ran.stdout) < 3 * 64 * 17
