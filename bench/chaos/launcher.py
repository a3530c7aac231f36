"""python -m bench.chaos.launcher PORT CONFIG key=value…: `asyncrl train` whose generators and learner take the detour
through the proxy at PORT to the queue, and to each other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.cli import main as run
from asyncrl.launch import local_run
from asyncrl.launch.supervise import Supervisor

DETOURED = ("generator", "learner", "pool")


class DetouringSupervisor(Supervisor):
    """Starts children on the detour, but for the queue.

    port: the proxy's
    """

    def __init__(self, logs: Path, port: int) -> None:
        super().__init__(logs)
        self._port = port

    def start(self, name: str, command: Sequence[str], *args: Any, **more: Any) -> None:
        super().start(name, detoured(command, self._port), *args, **more)


def detoured(command: Sequence[str], port: int) -> list[str]:
    """
    >>> detoured(["python", "-m", "asyncrl", "learner", "config.yaml"], 7)
    ['python', '-m', 'bench.chaos.detour', '7', 'asyncrl', 'learner', 'config.yaml']
    """
    python, option, package, verb, *words = command
    if verb not in DETOURED:
        return list(command)
    return [python, option, "bench.chaos.detour", str(port), package, verb, *words]


def main() -> int:
    port, *words = sys.argv[1:]
    of = partial(DetouringSupervisor, port=int(port))
    local_run.train = partial(local_run.train, supervisor_of=of)
    return run(["train", *words])


if __name__ == "__main__":
    sys.exit(main())
