"""The bench of overlap: its bounds by hand, its engine's slots and versions, and one small round of each kind."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.types import Sampling
from bench.overlap import __main__ as overlap
from bench.overlap import crowd
from bench.overlap.engine import TimedEngine
from bench.overlap.times import Times, overlapping_s, synchronous_s

UNIT = Times(token_s=1.0, train_token_s=0.5, step_s=2.0)


def test_a_synchronous_version_ends_when_its_last_group_is_trained() -> None:
    # Two slots: the first group's samples end at 1 and 3, the second one's at 3 and 5; training takes 2 s each.
    assert synchronous_s(UNIT, [[1, 3], [2, 2]], slots=2) == 3 + 2 + 2 + 2
    # One slot: ends at 4 and 8, so the learner waits for the second group.
    assert synchronous_s(UNIT, [[1, 3], [2, 2]], slots=1) == 8 + 2 + 2


def test_claims_of_groups_in_order_end_with_the_group_after_them() -> None:
    # Four slots, groups of two samples with prompts of 2 tokens: the first group ends at 9, the second at 1, the third,
    # which waits for slots, at 3. Claims of 20 tokens have two groups: 10 + 2 and 4 of prompts each.
    groups = [[9, 1], [1, 1], [2, 1]]
    assert synchronous_s(UNIT, groups, slots=4) == 9 + 10 / 2 + 2  # the first group is the last to end
    assert synchronous_s(UNIT, groups, slots=4, claim_tokens=20) == 9 + 12 / 2 + 3 / 2 + 2
    # In a claim of its own each group is taken once the next one has ended.
    late = [[1, 1], [5, 5]]
    assert synchronous_s(UNIT, late, slots=4, claim_tokens=6) == 5 + 2 / 2 + 10 / 2 + 2
    assert synchronous_s(UNIT, late, slots=4) == 5 + 10 / 2 + 2


def test_pools_that_overlap_take_as_long_as_the_slower_one() -> None:
    assert overlapping_s(UNIT, tokens=100, versions=3, slots=2) == 100 * 0.5 + 3 * 2
    assert overlapping_s(UNIT, tokens=100, versions=3, slots=1) == 100


def test_lengths_are_those_of_the_task_and_of_the_distribution() -> None:
    times = Times()
    assert times.length(5, 1) == times.length(5, 1)
    lengths = np.array(times.lengths(range(1000), 4))
    assert abs(np.median(lengths) - times.median) < 2
    assert (lengths.min(), lengths.max()) >= (1, times.longest)
    assert (lengths.std(axis=1) > 0).all()


def test_a_token_has_the_version_of_its_time() -> None:
    """Two slots, 10 tokens a sample: a third sample begins when the first one ends."""
    times = replace(Times(), spread=0.0, median=10, token_s=0.03)

    async def run() -> list[np.ndarray]:
        engine = TimedEngine(times, slots=2, max_length=100, targets={"w": torch.zeros(1)})
        await engine.flip({"w": torch.ones(1)}, 4)
        request = SampleRequest("a", np.array([1]), Sampling(max_tokens=20), ordinal=0, n=2)
        first = asyncio.create_task(engine.sample(request))
        third = asyncio.create_task(engine.sample(replace(request, request_id="b", n=1, ordinal=1)))
        await first
        assert (engine.stats()["tokens"], engine.stats()["running"]) == (20, 1)
        await engine.flip({"w": torch.ones(1)}, 5)
        return [turn.versions for turn in [*(await first), *(await third)]]

    *early, late = asyncio.run(run())
    assert [versions.tolist() for versions in early] == [[4] * 10] * 2
    assert (len(late), late[-1], sorted(late)) == (10, 5, late.tolist())


@pytest.mark.slow
def test_every_figure_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"GENERATORS": 4, "GROUPS": 8, "VERSIONS": 2, "TIMES": Times(token_s=0.005)}.items():
        monkeypatch.setattr(crowd, name, value)
    monkeypatch.setattr(overlap, "BUSY_S", 0.4)
    words = [
        "--repetitions",
        "1",
        "--versions",
        "8",  # generators that are a little ahead when these begin leave the first ones the learner's time alone
        "--dir",
        str(tmp_path),
        "--json",
        str(tmp_path / "out.json"),
    ]
    monkeypatch.setattr(sys, "argv", ["bench", *words])
    overlap.main()
    found = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert found.keys() == overlap.NAMES.keys()
    assert all(0 < found[name] < 1.1 for name in ("generation_bound", "synchronous", "crowd"))
