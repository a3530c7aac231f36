"""The soak finds what grows."""

from __future__ import annotations

from pathlib import Path

from bench.bars import figures, verdicts
from bench.soak import BARS, PROCESSES, _folders, measured, table


def samples(growing: str = "") -> list[dict[str, float]]:
    """A hundred looks, of which one figure grows from 100 to 200."""
    level = {f"{kind}.{name}": 100.0 for kind in ("rss", "fds", "threads") for name in PROCESSES}
    level |= {f"mb.{part}": 100.0 for part in ("queue", "checkpoints", "trace", "metrics.jsonl")}
    return [{"s": float(at), **level, **({growing: 100.0 + at} if growing else {})} for at in range(100)]


def failed(growing: str = "") -> list[str]:
    found = figures([measured(samples(growing), 1000)], BARS)
    return [bar for bar, verdict in verdicts(found, BARS) if not verdict.startswith("pass")]


def test_what_stays_passes() -> None:
    assert failed() == []


def test_what_grows_is_named() -> None:
    assert failed("rss.queue") == ["growth.rss.queue ≤ 1.05"]
    assert failed("fds.learner") == ["growth.fds.learner ≤ 1"]
    assert failed("threads.generator-1") == ["growth.threads.generator-1 ≤ 1"]


def test_rows_of_each_version_may_grow() -> None:
    assert failed("mb.metrics.jsonl") == []
    found = measured(samples("mb.metrics.jsonl"), 1000)
    assert "| metrics.jsonl | 137.00 | 187.00 | 100,000 |" in table(found, 1000)


def test_a_process_that_was_never_seen_is_no_pass() -> None:
    seen = [{name: value for name, value in one.items() if "queue" not in name} for one in samples()]
    found = figures([measured(seen, 1000)], BARS)
    assert dict(verdicts(found, BARS))["growth.rss.queue ≤ 1.05"] == "absent: not measured"


def test_parts_of_the_folder_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "one").write_bytes(bytes(1_000_000))
    (tmp_path / "queue" / "two").write_bytes(bytes(500_000))
    (tmp_path / "lock").touch()
    assert _folders(tmp_path) == {"mb.queue": 1.5, "mb.lock": 0.0}
