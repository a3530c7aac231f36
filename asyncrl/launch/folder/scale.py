"""Requests for more or fewer generators of a run on one machine.

asyncrl scale RUN N ──writes──▸ RUN/generators ──taken away by──▸ the launcher: starts generators, or has some leave
                    ◂─────────────── is gone: the launcher has taken it
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from asyncrl.config.rules import require
from asyncrl.errors import DeadlineError
from asyncrl.launch.folder.run_folder import config_of, find_run
from asyncrl.system.disk import replace_text

FILE = "generators"
DEADLINE_S = 15.0
"""Longest wait for the launcher, which looks each second."""

LOOK_S = 0.05


def scale(target: str, count: int, deadline_s: float = DEADLINE_S) -> Path:
    """Have the launcher of a run start generators, or let some leave, until there are `count`. Returns its folder.

    Raises:
        ConfigError: There is no such run, or its generators have GPUs of their own and are to become more.
        DeadlineError: No launcher of this run has taken the request.
    """
    folder = find_run(target)
    generator = config_of(folder).generator
    require(count >= 1, "N", count, "a run needs a generator", "give a number from 1 on")
    rule = f"generator.devices={generator.devices} has GPUs for generator.count={generator.count} generators"
    remedy = (
        f"give {generator.count} or less, or start others by hand: CUDA_VISIBLE_DEVICES=… asyncrl generator …"
    )
    require(generator.devices is None or count <= generator.count, "N", count, rule, remedy)
    path = folder / FILE
    replace_text(path, str(count))
    deadline = time.monotonic() + deadline_s
    while path.exists():
        if time.monotonic() > deadline:
            path.unlink(missing_ok=True)
            whom, remedy = f"the launcher of {folder}", "is the run still going on, under `asyncrl train`?"
            raise DeadlineError("asyncrl scale", whom, "a look at this request", deadline_s, remedy)
        time.sleep(LOOK_S)
    return folder


def take_request(folder: Path) -> int | None:
    """The number that was requested last, once; None without a request, or for one that is no number."""
    with suppress(OSError, ValueError):
        path = folder / FILE
        text = path.read_text(encoding="ascii", errors="replace")
        path.unlink()
        return int(text) if int(text) >= 1 else None
    return None
