"""Real ranks for tests: processes that meet over gloo on this machine, as `asyncrl learner` would start them. They are
forked from a process that has imported torch (`forked`), so that a world of four costs what its ranks compute."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import forked

from asyncrl.system.rank_process import FOLDER, MEETING

STUCK_S, SLACK_S = 40, 10
"""After STUCK_S for each of them, since they share the cores of this machine, a rank writes down where it stands, and
ends; SLACK_S later all of them are killed."""


def run_ranks(target: str, folder: Path, world: int = 2, stuck_s: float | None = None) -> None:
    """Call `target`, 'module:function' of this folder, with `folder` in each of `world` processes. It should end with
    `end_rank()`. Fails with the end of every rank's log unless all of them end well within stuck_s."""
    module, function = target.split(":")
    stuck_s = stuck_s or STUCK_S * world
    code = (
        "import faulthandler, pathlib, sys\n"
        "faulthandler.enable()\n"
        f"faulthandler.dump_traceback_later({stuck_s}, exit=True)\n"
        f"import {module}\n"
        f"{module}.{function}(pathlib.Path(sys.argv[1]))\n"
    )
    meeting = tempfile.mkdtemp(dir=folder)
    shared = os.environ | {
        "WORLD_SIZE": str(world),
        MEETING: f"{FOLDER}:{meeting}",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    logs = [folder / f"{function}_{rank}.log" for rank in range(world)]
    start = forked.ForkedProcess if forked.AVAILABLE else subprocess.Popen
    ranks = []
    for rank, path in enumerate(logs):
        with path.open("wb") as log:
            ranks.append(
                start(
                    [sys.executable, "-c", code, str(folder)],
                    env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=log,
                )
            )
    try:
        codes = [process.wait(stuck_s + SLACK_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0] * world, "\n".join(path.read_text(errors="replace")[-4000:] for path in logs)
