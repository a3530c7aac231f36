"""The page of keys, against the code that makes them; tests/e2e/conftest.py compares it with the rows of real runs."""

from __future__ import annotations

import re
from pathlib import Path

from metrics_page import listed, summary_keys, unlisted
from stream_cases import SMALL, Learner

import asyncrl.learner
from asyncrl.config.schema import SyncConfig
from asyncrl.learner.reporting.report import publish_values, run_summary, step_row
from asyncrl.queue.ledger.ledger import Ledger
from asyncrl.sync.factory import open_publisher
from asyncrl.sync.stream.snapshot import PublishReport
from asyncrl.sync.tensors.shards import Shards

SPAN = re.compile(r'"((?:compute|wait)/[a-z_]+)"')
OF_MEMBERS = {"sync/held", "sync/lag"}
"""There only once a generator has a version."""


def test_families_take_their_keys_and_no_others() -> None:
    known = ["version", "reward/part/right", "queue/dropped/reward", "heldout/hard/pass@8", "critic/loss"]
    assert unlisted(known) == []
    others = ["reward/right", "version/of", "loss/policy", "part/right", "heldout", "sync/any", "time/any"]
    assert unlisted(others) == sorted(others)


def test_every_key_of_the_summary_is_listed() -> None:
    assert summary_keys() == run_summary([], max_staleness=1, wall_s=1.0, ended="done").keys()


def test_every_span_of_the_learner_is_listed() -> None:
    sources = Path(asyncrl.learner.__file__).parent.rglob("*.py")
    spans = {name for source in sources for name in SPAN.findall(source.read_text("utf-8"))} | {"other"}
    assert listed("time/") == {f"time/{name}" for name in spans}
    assert listed("share/wait/") == {f"share/{name}" for name in spans if name.startswith("wait/")}


def test_every_count_of_the_queue_is_listed() -> None:
    counts = {**Ledger().counts(0.0), "lead": 3}  # null without queue.wait_share
    row = step_row(1, {}, {"other": 1.0}, counts, {})
    assert {key for key in row if key.startswith("queue/")} == listed("queue/") - {"queue/dropped/<reason>"}


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
    assert listed("sync/") == keys | OF_MEMBERS
