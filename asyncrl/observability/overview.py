"""The first line of a run's page: how far it is, how fast, and which of its sides the other waits for."""

from __future__ import annotations

from typing import Any

from asyncrl.observability.doctor.facts import RECENT, RunFacts
from asyncrl.observability.doctor.speed import who_waits
from asyncrl.observability.rows import Row, number
from asyncrl.observability.run_files import RUNNING, RunFiles


def overview(run: RunFiles) -> dict[str, Any]:
    """left_s: at the pace of the last versions, None where it is unknown."""
    rows, facts, state = run.metrics.versions, RunFacts.of(run, logs=False), run.run_state()
    bound = facts.key("queue.max_staleness", None)
    newest = rows[-1]["version"] if rows else 0
    pace, versions = _pace(rows[-RECENT:]), facts.key("run.versions", None)
    left = (versions - newest) / pace if pace and isinstance(versions, int) and state == RUNNING else None
    waits = who_waits(facts)
    return {
        "state": state,
        "last": run.last(),
        "version": newest,
        "versions": versions if isinstance(versions, int) else None,
        "pace": pace,
        "left_s": left,
        "bound": bound if isinstance(bound, int) else None,
        "bottleneck": waits.sentence if waits else "",
        "processes": {name: each.role for name, each in run.timeline.processes.items()},
    }


def _pace(rows: list[Row]) -> float | None:
    """Versions a second."""
    times = [number(row, "time") or 0.0 for row in rows]
    if len(rows) < 2 or times[-1] <= times[0]:
        return None
    return float((rows[-1]["version"] - rows[0]["version"]) / (times[-1] - times[0]))
