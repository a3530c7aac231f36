"""A clock that is set anew must change no deadline and no lease: all of them are of the monotonic clock."""

from __future__ import annotations

import re
from pathlib import Path

import asyncrl

WALL = re.compile(r"\btime\.time(_ns)?\(\)|datetime\.(now|utcnow)\(|from time import time\b")
SHOWN = ("telemetry/", "observability/", "launch/views/")
"""Folders that write and show times of day."""

WRITTEN = {
    "cli/__init__.py": "the report of a rank that failed",
    "generator/gateway/gateway.py": "`created` of a reply",
    "learner/reporting/report.py": "`began` of a run, and `time` of a row",
    "queue/broker/trace_intake.py": "the moment from which a file of a trace goes on",
}
"""Other files that write such times, and into what."""


def test_only_times_that_are_written_or_shown_are_of_the_wall_clock() -> None:
    root = Path(asyncrl.__file__).parent
    found = {
        str(path.relative_to(root)) for path in root.rglob("*.py") if WALL.search(path.read_text("utf-8"))
    }
    assert {name for name in found if not name.startswith(SHOWN)} == WRITTEN.keys()
