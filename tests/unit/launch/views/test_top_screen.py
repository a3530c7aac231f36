"""The screen of asyncrl top, of a run that is over: its last sign of life is now, so that all figures are known."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl.launch.views.top import TALL, TopScreen

T = 1e9
HOSTILE = "\x1b[2J\u202e"


def write(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def trace(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    head = {"t": T, "process": name, "role": name.partition("-")[0], "host": "a", "pid": 1}
    write(folder / "trace" / f"{name}.jsonl", head, *rows)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of 20 versions; the learner had 15 s of work in the last minute, and generator-0 ended 40 s before it."""
    folder = tmp_path / f"first{HOSTILE}"
    truncated = {"perf/step_s": 5.0, "rollout/length/truncated": 0.5}
    write(folder / "metrics.jsonl", *({"version": v, "time": T + 5 * v, **truncated} for v in range(1, 21)))
    trace(
        folder,
        "learner",
        {"t": T, "lane": "learner", "do": "compute"},
        {"t": T + 55, "lane": "learner", "do": f"wait/groups{HOSTILE}"},
        {"t": T + 100},
    )
    trace(
        folder,
        "generator-0",
        {"t": T + 50, "values": {"sync/held": 3, "perf/generator/tokens_per_s": 900.0}},
        {"t": T + 60, "values": {"sync/held": 7, "perf/generator/tokens_per_s": 1234.5}},
    )
    trace(folder, "queue", *({"t": T + at, "values": {"queue/pending": at}} for at in (5, 30)))
    return folder


def shown(folder: Path, height: int = TALL) -> str:
    screen, out = TopScreen(folder), StringIO()
    screen.read()
    Console(file=out, width=120).print(screen.drawn(120, height))
    return out.getvalue()


def line(text: str, begin: str) -> list[str]:
    (found,) = [each for each in text.splitlines() if each.startswith(begin)]
    return found.split()


def test_each_process_has_what_it_does_since_when_its_share_of_work_and_its_version(run: Path) -> None:
    text = shown(run)
    assert line(text, "learner")[-3:] == ["45", "s", "25%"]
    assert line(text, "generator-0") == ["generator-0", "silent", "40", "s", "7", "13", "1,234"]
    pending = text.partition("tasks pending")[2].split()[0]
    assert pending == "30"


def test_no_text_of_a_run_can_steer_the_terminal(run: Path) -> None:
    text = shown(run)
    assert "wait/groups[2J" in text
    assert "first[2J" in text
    assert not {*HOSTILE} & {*text} - {*"[2J"}


def test_findings_have_their_sentence_alone_on_a_low_terminal(run: Path) -> None:
    tall, low = shown(run), shown(run, TALL - 1)
    sentence, remedy = "A limit cuts off 50 % of the rollouts.", "generator.max_tokens"
    assert sentence in tall
    assert remedy in tall
    assert sentence in low
    assert remedy not in low
