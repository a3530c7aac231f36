"""The page of keys, against the code that makes them; tests/e2e/conftest.py compares it with the rows of real runs."""

from __future__ import annotations

import re
from pathlib import Path

from metrics_page import listed, migrating_tables, summary_keys, unlisted
from stream_cases import SMALL, Learner

import asyncrl.learner
import asyncrl.offline
from asyncrl.config.schema import SyncConfig
from asyncrl.learner.reporting.report import publish_values, run_summary, step_row
from asyncrl.queue.ledger.ledger import Ledger
from asyncrl.sync.factory import open_publisher
from asyncrl.sync.stream.snapshot import PublishReport
from asyncrl.sync.tensors.shards import Shards
from asyncrl.telemetry.spans import WAIT

SPAN = re.compile(r'"((?:compute|wait)/[a-z_]+)"')
OF_MEMBERS = {"sync/held", "sync/lag"}
"""There only once a generator has a version."""

OF_GENERATORS = {"sync/flips", "sync/pause_ms_p50", "sync/pause_floor_ms", "sync/fetch_ms_p50"}


def test_families_take_their_keys_and_no_others() -> None:
    known = ["version", "rollout/reward/part/right", "queue/dropped/reward", "eval/hard/pass@8"]
    assert unlisted([*known, "train/critic/loss"]) == []
    others = ["reward/mean", "version/of", "loss", "part/right", "heldout", "sync/any", "perf/time/any"]
    assert unlisted(others) == sorted(others)


def test_every_key_is_in_a_section() -> None:
    sections = ("train/", "rollout/", "eval/", "perf/", "sync/", "queue/")
    others = [key for key in sorted(listed("")) if not key.startswith(sections)]
    assert others == ["time", "version", "what_if"]


def test_other_trainers_names_lead_to_listed_ones() -> None:
    tables = migrating_tables()
    assert {"actor/pg_loss", "val-core/…", "reward_std", "num_tokens"} <= tables.keys()
    assert unlisted(ours for row in tables.values() for ours in row) == []


def test_every_key_of_the_summary_is_listed() -> None:
    assert summary_keys() == run_summary([], max_staleness=1, wall_s=1.0, ended="done").keys()


def test_every_span_of_the_learner_is_listed() -> None:
    rooms = (Path(room.__file__).parent for room in (asyncrl.learner, asyncrl.offline))
    sources = (source for room in rooms for source in room.rglob("*.py"))
    spans = {name for source in sources for name in SPAN.findall(source.read_text("utf-8"))} | {"other"}
    assert listed("perf/time/") == {f"perf/time/{name}" for name in spans}
    waits = {name.removeprefix(WAIT) for name in spans if name.startswith(WAIT)}
    assert listed("perf/wait_fraction/") == {f"perf/wait_fraction/{name}" for name in waits}


def test_every_count_of_the_queue_is_listed() -> None:
    # null without queue.wait_share; absent without a group that is ready
    counts = {**Ledger().counts(0.0), "lead": 3, "age/oldest": 1, "age/mean": 0.5}
    row = step_row(1, {}, {"other": 1.0}, counts, {})
    assert {key for key in row if key.startswith("queue/")} == listed("queue/") - {
        "queue/dropped/<reason>",
        "queue/held_min",
        "queue/report_ms",
    }


def test_every_figure_of_the_weight_stream_is_listed(tmp_path: Path) -> None:
    learner = Learner(SMALL, 1, SyncConfig(bucket_mb=0.0005))
    config = SyncConfig(backend="file", folder=str(tmp_path))
    stored = open_publisher("it", 0, 1, Shards(learner.layouts[0], learner.live[0]), config, 1, None)
    try:
        stats = {**learner.publishers[0].stats(), **stored.stats()}
    finally:
        learner.close()
        stored.close()
    keys = publish_values(PublishReport(0.0, 0, 0.0), stats).keys()
    assert listed("sync/") == keys | OF_MEMBERS | OF_GENERATORS
