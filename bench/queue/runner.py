"""One measurement: start the three processes of a system, let them go, and take their times."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

from bench.process import ROOT, Process
from bench.queue.load import ROWS, Load

PEERS_PYTHON = ROOT / "bench" / "peers" / ".venv" / "bin" / "python"

WARM_UP = 0.2
"""Share of the groups that come before the rate is taken."""


class AbsentError(Exception):
    """What the system needs is not installed."""


@dataclass(frozen=True, slots=True)
class System:
    """module: of bench.queue. options: for its `serve`. peer: lives in the peers' environment.

    groups: tokens of a row -> how many groups take a few seconds.
    """

    name: str
    module: str
    groups: Mapping[int, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    peer: bool = False


def rates(system: System, load: Load, folder: Path) -> dict[str, float]:
    """{"rows_per_s", "mb_per_s"} of a streaming load, as the consumer sees it."""
    _, got = _times(system, load, folder)
    times = sorted(got.values())
    first = int(WARM_UP * len(times))
    rows_per_s = ROWS * (len(times) - 1 - first) / (times[-1] - times[first])
    return {"rows_per_s": rows_per_s, "mb_per_s": rows_per_s * load.group_bytes / ROWS / 1e6}


def hops(system: System, load: Load, folder: Path) -> dict[str, float]:
    """{"hop_ms_p50", "hop_ms_p99"} of a paced load: from the producer's call to the consumer's arrays."""
    sent, got = _times(system, load, folder)
    waits = [1e3 * (got[i] - sent[i]) for i in sent if int(i) >= WARM_UP * len(sent)]
    centiles = quantiles(waits, n=100, method="inclusive")
    return {"hop_ms_p50": centiles[49], "hop_ms_p99": centiles[98]}


def absent(system: System) -> str | None:
    """Why a system cannot be measured here, if so."""
    if not system.peer:
        return None
    if not PEERS_PYTHON.exists():
        return "not installed; `make bench-peers` does it"
    words = [str(PEERS_PYTHON), "-c", f"import {PEER_IMPORTS[system.module]}"]
    return None if subprocess.run(words, capture_output=True).returncode == 0 else "cannot be imported"


PEER_IMPORTS = {"transferqueue": "transfer_queue", "ray_queue": "ray", "redis_list": "redis"}


def _times(system: System, load: Load, folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """When each group was sent, and when it was there. RuntimeError if a process fails."""
    place = Path(tempfile.mkdtemp(prefix=f"{system.name}-", dir=folder))
    said = {"load": asdict(load), "folder": str(place), "options": dict(system.options)}
    with _process(system, "serve", said, place) as server:
        said["address"] = server.hears()
        with (
            _process(system, "consume", said, place) as consumer,
            _process(system, "produce", said, place) as producer,
        ):
            for side in (consumer, producer):
                side.hears()
            for side in (consumer, producer):
                side.tell("go")
            sent, got = producer.hears(), consumer.hears()
    assert len(sent) == len(got) == load.groups, (system.name, len(sent), len(got))
    return sent, got


def _process(system: System, role: str, said: Mapping[str, Any], place: Path) -> Process:
    python = str(PEERS_PYTHON) if system.peer else sys.executable
    return Process(["bench.queue.endpoint", role, system.module], place / f"{role}.log", said, python)
