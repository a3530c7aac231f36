"""The page of keys; rows of real runs are held against it by tests/e2e/conftest.py."""

from __future__ import annotations

from metrics_page import summary_keys, unlisted

from asyncrl.learner.reporting.report import summarise


def test_families_take_their_keys_and_no_others() -> None:
    listed = ["version", "reward/part/right", "queue/dropped/reward", "heldout/hard/pass@8", "critic/loss"]
    assert unlisted(listed) == []
    others = ["reward/right", "version/of", "loss/policy", "part/right", "heldout"]
    assert unlisted(others) == sorted(others)


def test_every_key_of_the_summary_is_listed() -> None:
    assert summary_keys() == summarise([], max_staleness=1, wall_s=1.0, ended="done").keys()
