"""A rank's side of the supervisor that started it (launch/ranks.py): where ranks meet, signs of life, its end.

Variables of its environment, beside RANK, WORLD_SIZE and LOCAL_RANK:

ASYNCRL_MEETING   folder:PATH for ranks of one machine, queue:NAME for ranks that meet through the run's queue
ASYNCRL_PULSE_FD  the descriptor that gets a byte each second
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from asyncrl.errors import StoppedError

MEETING, PULSE_FD = "ASYNCRL_MEETING", "ASYNCRL_PULSE_FD"
LAUNCHED = "ASYNCRL_LAUNCHED"
"""Environment variable of processes that `asyncrl train` has started, and of their ranks."""

FOLDER, QUEUE = "folder", "queue"

PULSE_S = 1.0
"""Between two signs of life."""


def rank_and_world(env: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(this process, the number of processes) as the supervisor or torchrun sets them; (0, 1) if nobody does."""
    return int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))


def is_rank(env: Mapping[str, str] = os.environ) -> bool:
    """Whether somebody has started this process as one of several ranks. `asyncrl train` starts none itself: below it
    RANK alone is of the cluster's job that it runs in.

    >>> is_rank({"RANK": "0"}), is_rank({"RANK": "0", "ASYNCRL_LAUNCHED": "1"}), is_rank({})
    (True, False, False)
    >>> is_rank({"RANK": "0", "ASYNCRL_LAUNCHED": "1", "ASYNCRL_MEETING": "folder:/tmp/x"})
    True
    """
    return "RANK" in env and (MEETING in env or LAUNCHED not in env)


def meeting() -> tuple[str, str]:
    """(FOLDER or QUEUE, the path or the name); two empty words if the supervisor did not start this process."""
    kind, _, place = os.environ.get(MEETING, "").partition(":")
    return kind, place


def begin_signs_of_life() -> None:
    """Write a byte each second to the supervisor's pipe, if there is one. This process ends once nobody reads them."""
    if (descriptor := os.environ.pop(PULSE_FD, None)) is not None:
        os.set_inheritable(int(descriptor), False)
        threading.Thread(target=_beat, args=(int(descriptor),), name="signs of life", daemon=True).start()


def _beat(descriptor: int) -> None:
    try:
        while True:
            os.write(descriptor, b".")
            time.sleep(PULSE_S)
    except OSError:  # the supervisor is gone; Linux kills its ranks, other systems do not
        os.kill(os.getpid(), signal.SIGKILL)


def end_by(number: int) -> None:
    """End this process by the signal that ended a rank, so that whoever started it sees the same end."""
    sys.stdout.flush()
    sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left a core already, if it may
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


_leave: list[Callable[[], None]] = []


def before_leaving(act: Callable[[], None]) -> None:
    """Call `act` before this rank ends at the end of the run, or after a requested stop."""
    _leave.append(act)


def end_rank(code: int = 0) -> NoReturn:
    """End the process of one rank of several without unwinding it. Its work is done, or its error is reported.

    torch's caches of sharded operations keep the process group alive beyond `destroy_process_group`. Its threads then
    sometimes abort the interpreter while it exits, and a successful run would be reported as a crash.
    """
    for act in _leave if code in (0, StoppedError.exit_code) else ():
        act()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
