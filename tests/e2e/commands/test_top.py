"""asyncrl top on a terminal of its own: it follows a run, fits the terminal, and ends on Ctrl-C."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from processes import ENV
from terminal import CONTROL, CTRL_C, in_terminal

WIDTHS = (60, 300)


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def version(at: int, now: float) -> dict[str, Any]:
    return {
        "version": at,
        "time": now + at - 30,
        "perf/step_s": 1.0,
        "perf/busy/generator": 0.75,
        "rollout/reward/mean": 0.5,
        "rollout/length/truncated": 0.5,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """One that seems to be alive for a minute."""
    folder, now = tmp_path / "first", time.time()
    write(folder / "metrics.jsonl", *(version(at, now) for at in range(1, 21)))
    (folder / "config.yaml").write_text("run: {versions: 100}\n")
    write(
        folder / "trace" / "generator-0.jsonl",
        {"t": now - 30, "process": "generator-0", "role": "generator", "host": "a", "pid": 1},
        {"t": now - 20, "lane": "engine", "do": "wait/tasks"},
        {"t": now, "values": {"sync/held": 18, "perf/generator/tokens_per_s": 1234.5}},
        {"t": now + 60},
    )
    write(
        folder / "trace" / "queue.jsonl",
        {"t": now - 30, "process": "queue", "role": "queue", "host": "a", "pid": 2},
        {"t": now, "values": {"queue/ready": 7, "queue/pending": 30}},
        {"t": now, "event": "silent", "process": "generator-1\x1b[2J", "since_s": 16.0},
    )
    return folder


def test_it_follows_a_run_until_ctrl_c(run: Path) -> None:
    with in_terminal("top", str(run)) as top:
        top.shows(
            "first: running, version 20 of 100, 1.00 versions/s", "A limit cuts off 50 % of the rollouts"
        )
        top.shows("wait/tasks", "1,234", "tasks pending", "queue: silent process generator-1")
        write(run / "metrics.jsonl", version(21, time.time()))
        top.shows("version 21 of 100")
        top.press(CTRL_C)
        assert top.ends() == 0, top.screen[-2000:]
        assert "Traceback" not in top.screen


@pytest.mark.parametrize("width", WIDTHS)
def test_one_screen_fits_its_terminal_without_colours(
    run: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENV, "NO_COLOR", "1")
    with in_terminal("top", str(run), "--once", columns=width) as top:
        assert top.ends() == 0
    lines = CONTROL.sub("", top.written).splitlines()
    assert max(map(len, lines)) <= width
    assert any("wait/tasks" in line for line in lines)
    assert "\x1b[3" not in top.written  # no colour
    assert "\x1b[2J" not in top.written  # nor what a name holds
