"""Publishers and subscribers that exchange deltas, over real sockets and channels."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from delta_cases import DRIFTING, FORMS, DriftingLearner, links_have
from stream_cases import Generator, closing_all

import asyncrl.sync.delta.delta_chain as delta_chain
import asyncrl.sync.stream.link as link_module
from asyncrl.config.schema import Config, SyncConfig
from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.sync.delta.delta_chain import Messages
from asyncrl.sync.delta.records import HEADER_BYTES
from asyncrl.sync.layout.layout import Box, ParamLayout, layout_bytes
from asyncrl.sync.stream.snapshot import Pin, SnapshotMemory
from asyncrl.sync.stream.subscriber import StagedWeights

closing = pytest.fixture(closing_all)

ALWAYS = SyncConfig(bucket_mb=0.004, deadline_s=20.0, delta="always", delta_share=1.0, fanout=0)
COLUMNS = {
    name: ParamLayout(shape, dtype, (Box.whole((*shape[:-1], 48)),))
    for name, (shape, dtype) in DRIFTING.items()
}


def totals(learner: DriftingLearner) -> dict[str, float]:
    stats = [publisher.stats() for publisher in learner.publishers]
    return {key: sum(s[key] for s in stats) for key in ("bytes", "delta_bytes", "transfers", "failures")}


def follow(generator: Generator, learner: DriftingLearner, *versions: int) -> StagedWeights:
    """Publish each and take it; returns what came last."""
    staged = None
    for version in versions:
        learner.publish(version)
        staged = generator.fetch(version - 1, 10.0)
        generator.check(staged, version)
    assert staged is not None
    return staged


@pytest.mark.parametrize("world", [1, 2])
def test_after_the_first_version_only_changes_are_sent(world: int, closing: Callable) -> None:
    learner = closing(DriftingLearner(world, ALWAYS))
    generators = [
        closing(Generator("whole", learner, learner.whole, ALWAYS)),
        closing(Generator("columns", learner, COLUMNS, ALWAYS)),
    ]
    for version in range(4):
        learner.publish(version)
        for generator in generators:
            staged = generator.fetch(version - 1, 10.0)
            generator.check(staged, version)
            full = layout_bytes(generator.layout)
            assert staged.bytes == full if version == 0 else 0 < staged.bytes < 0.2 * full
    sent, full = totals(learner), sum(layout_bytes(g.layout) for g in generators)
    assert sent["bytes"] == full + sent["delta_bytes"]
    for publisher in learner.publishers:
        assert 0 < publisher.stats()["delta_bytes_ratio"] < 0.2


def test_a_laggard_replays_the_chain_and_a_late_joiner_takes_all(closing: Callable) -> None:
    learner = closing(DriftingLearner(2, ALWAYS))
    steady = closing(Generator("steady", learner, learner.whole, ALWAYS))
    laggard = closing(Generator("laggard", learner, learner.whole, ALWAYS))
    follow(steady, learner, 0, 3)
    laggard.check(laggard.fetch(-1, 10.0), 3)
    single = follow(steady, learner, 4).bytes
    follow(steady, learner, 5, 6, 7)
    replay = laggard.fetch(3, 10.0)
    laggard.check(replay, 7)
    assert 3 * single < replay.bytes < 5 * single
    joiner = closing(Generator("joiner", learner, learner.whole, ALWAYS))
    full = joiner.fetch(-1, 10.0)
    joiner.check(full, 7)
    assert full.bytes == layout_bytes(learner.whole)
    assert follow(joiner, learner, 8).bytes < 2 * single, "from now on it follows the chain too"


def test_a_chain_that_is_longer_than_the_full_stream_or_forgotten_is_not_used(closing: Callable) -> None:
    short = dataclasses.replace(ALWAYS, delta_share=0.2)
    for config, share in ((ALWAYS, 0.2), (short, 0.02)):
        learner = closing(DriftingLearner(1, config, share))
        steady = closing(Generator("steady", learner, learner.whole, config))
        laggard = closing(Generator("laggard", learner, learner.whole, config))
        follow(steady, learner, 0)
        laggard.check(laggard.fetch(-1, 10.0), 0)
        assert follow(steady, learner, 1, 2, 3, 4, 5, 6).bytes < layout_bytes(learner.whole)
        full = laggard.fetch(0, 10.0)
        laggard.check(full, 6)
        assert full.bytes == layout_bytes(learner.whole)


def test_a_staging_memory_that_was_written_to_is_found_by_the_hash(closing: Callable) -> None:
    learner = closing(DriftingLearner(2, ALWAYS))
    generator = closing(Generator("generator-0", learner, learner.whole, ALWAYS))
    follow(generator, learner, 0, 1)
    generator.staging["head"][0].view(torch.uint8)[90, 3] ^= 1
    assert follow(generator, learner, 2).bytes == layout_bytes(learner.whole)
    assert follow(generator, learner, 3).bytes < layout_bytes(learner.whole)


@pytest.mark.parametrize(("at", "found"), [(8, "cannot be read"), (HEADER_BYTES, "is not its version 2")])
def test_a_bit_flipped_in_a_delta_leads_to_the_full_stream(
    at: int, found: str, closing: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learner = closing(DriftingLearner(1, ALWAYS))
    generator = closing(Generator("generator-0", learner, learner.whole, ALWAYS))
    follow(generator, learner, 0, 1)
    real = delta_chain.route

    def flipped(*step: Any, **more: Any) -> Messages:
        messages = real(*step, **more)
        assert messages is not None
        messages[0][at] ^= 1
        return messages

    with monkeypatch.context() as patch:
        patch.setattr(delta_chain, "route", flipped)
        assert follow(generator, learner, 2).bytes == layout_bytes(learner.whole)
    assert found in caplog.text
    assert follow(generator, learner, 3).bytes < layout_bytes(learner.whole)


def test_a_transfer_that_breaks_leaves_no_base(closing: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = closing(DriftingLearner(1, ALWAYS))
    generator = closing(Generator("generator-0", learner, learner.whole, ALWAYS))
    follow(generator, learner, 0, 1)
    real = link_module.receive_deltas

    def torn(*what: object) -> None:
        monkeypatch.setattr(link_module, "receive_deltas", real)
        real(*what)  # type: ignore[arg-type]
        raise WeightSyncError("cut")

    monkeypatch.setattr(link_module, "receive_deltas", torn)
    assert follow(generator, learner, 2).bytes == layout_bytes(learner.whole)
    assert follow(generator, learner, 3).bytes < layout_bytes(learner.whole)


@pytest.mark.parametrize("form", FORMS)
def test_auto_sends_deltas_over_slow_links_alone(
    form: str, closing: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link's speed is that of its last full stream: here all are above any bound, or none is."""
    measured, begun = links_have(form, monkeypatch), time.monotonic()
    routed: list[bool] = []
    real = delta_chain.route

    def spied(*step: Any, deflated: bool, in_time: Callable[[], bool]) -> Messages | None:
        routed.append(deflated)
        with monkeypatch.context() as patch:
            moved: list[Pin] = []
            patch.setattr(SnapshotMemory, "moved", lambda _, pin: moved.append(pin))
            assert in_time()
            assert len(moved) == 1, "the transfer counts as alive while its messages are made"
        return real(*step, deflated=deflated, in_time=in_time)

    monkeypatch.setattr(delta_chain, "route", spied)
    auto = dataclasses.replace(ALWAYS, delta="auto")
    learner = closing(DriftingLearner(1, auto))
    generator = closing(Generator("generator-0", learner, learner.whole, auto))
    follow(generator, learner, 0, 1)
    assert (follow(generator, learner, 2).bytes < layout_bytes(learner.whole)) == (form != "whole")
    assert bool(totals(learner)["delta_bytes"]) == (form != "whole")
    assert set(routed) == {"whole": set(), "changes": {False}, "deflated": {True}}[form]
    sizes, seconds = zip(*measured, strict=True)
    assert set(sizes) == {layout_bytes(learner.whole)}
    assert len(sizes) == (3 if form == "whole" else 2), "the changes to 1 are not made before somebody asks"
    assert 0 < min(seconds) <= sum(seconds) < time.monotonic() - begun


def test_never_is_never_and_always_needs_two_snapshots(closing: Callable) -> None:
    never = dataclasses.replace(ALWAYS, delta="never")
    learner = closing(DriftingLearner(1, never))
    generator = closing(Generator("generator-0", learner, learner.whole, never))
    assert follow(generator, learner, 0, 1, 2).bytes == layout_bytes(learner.whole)
    with pytest.raises(ConfigError, match=r"sync\.delta = 'always'"):
        Config(sync=SyncConfig(delta="always", snapshots=1))
    one = dataclasses.replace(never, delta="auto", snapshots=1)
    learner = closing(DriftingLearner(1, one))
    generator = closing(Generator("generator-0", learner, learner.whole, one))
    assert follow(generator, learner, 0, 1).bytes == layout_bytes(learner.whole)
