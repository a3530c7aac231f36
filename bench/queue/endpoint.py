"""One process of a measurement: python -m bench.queue.endpoint ROLE MODULE, and what else it must know on stdin.

    serve      options ──▸             ◂── address           … until stdin ends
    produce    address ──▸  ◂── ready   go ──▸   ◂── {group: when it was begun}
    consume    address ──▸  ◂── ready   go ──▸   ◂── {group: when it was there}

Lines of JSON on stdin and stdout; whatever a system prints goes to stderr. Runs in the peers' environment too:
nothing here but numpy and the standard library.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

from bench.process import Talk
from bench.queue.load import Arrays, Columns, Load, Source, check


class Run:
    """What a producer or consumer is given. Times are of the machine's monotonic clock, which processes share."""

    def __init__(self, load: Load, talk: Talk) -> None:
        self.load = load
        self.times: dict[int, float] = {}
        self._talk, self._source = talk, Source(load)

    def start(self) -> None:
        """Connected: wait until the other side is too."""
        self._talk.tell("ready")
        self._talk.hears()
        self._started = time.monotonic()

    def columns(self, i: int) -> Arrays:
        return self._source.columns(i)

    def pause_s(self, i: int) -> float:
        """Seconds until group `i` is due."""
        if not self.load.pace_s:
            return 0.0
        return max(0.0, self._started + (i + 1) * self.load.pace_s - time.monotonic())

    def pause(self, i: int) -> None:
        if pause_s := self.pause_s(i):
            time.sleep(pause_s)

    def sends(self, i: int) -> None:
        self.times[i] = time.monotonic()

    def got(self, i: int, columns: Columns, at: float | None = None) -> None:
        """at: when they were there, if something else was done since."""
        assert i not in self.times, f"group {i} came twice"
        self.times[i] = at or time.monotonic()
        check(self.load, i, columns)


def main(role: str, module: str) -> None:
    talk = Talk()
    system = importlib.import_module(f"bench.queue.{module}")
    said = talk.hears()
    load = Load(**said["load"])
    if role == "serve":
        with system.serve(Path(said["folder"]), said["options"], load) as address:
            talk.tell(address)
            sys.stdin.read()
        return
    run = Run(load, talk)
    (system.produce if role == "produce" else system.consume)(said["address"], run)
    talk.tell(run.times)
    sys.stdin.read()  # what was sent may belong to this process until it has arrived


if __name__ == "__main__":
    main(*sys.argv[1:])
