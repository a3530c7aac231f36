"""Groups and weights between the parties of a replay: kept as often as they are wanted, and no longer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from decided_groups import group

from asyncrl.learner.reporting.version_decisions import mark_of
from asyncrl.replay.stores import GroupStore, Published, WeightStore
from asyncrl.sync.tensors.shards import Shards, layout_of
from asyncrl.telemetry.decisions import ClaimedGroup
from asyncrl.types import Group


def claimed(one: Group) -> ClaimedGroup:
    return ClaimedGroup(one.task.ordinal, mark_of(one))


def test_a_group_is_known_by_each_of_its_numbers() -> None:
    others = group(reward=0.25), group(logprob=-0.125), group(version=1)
    assert len({mark_of(one) for one in (group(), *others)}) == 4
    wide = replace(
        group(), token_ids=group().token_ids.astype(np.int32), rewards=group().rewards.astype(float)
    )
    assert mark_of(wide) == mark_of(group())  # as the queue carries it, or as it was made


def test_a_group_is_there_as_often_as_it_is_wanted() -> None:
    wanted, other = group(), group(reward=0.25)
    store = GroupStore([claimed(wanted), claimed(wanted)])
    store.put(other)
    assert (store.has(claimed(wanted)), store.others(3)) == (False, 1)
    store.put(wanted)
    for _ in range(2):
        assert store.has(claimed(wanted))
        taken = store.take(claimed(wanted))
        assert mark_of(taken) == mark_of(wanted)
    assert not store.has(claimed(wanted))


def test_groups_of_tasks_that_no_version_has_are_not_kept() -> None:
    store = GroupStore([claimed(group())])
    store.put(group(ordinal=4))
    assert store.others(4) == 0


def test_a_version_is_a_copy_until_the_last_flip_to_it() -> None:
    live = {"w": torch.ones(2, 2), "b": torch.zeros(3)}
    store = WeightStore([Published(1, 2), Published(1, 2), Published(2, 2)])
    store.put(Published(1, 2), Shards(layout_of(live), live))
    store.put(Published(1, 3), Shards(layout_of(live), live))
    live["w"].add_(1)
    assert not store.has(Published(1, 3))  # no generator flips to it
    assert not store.has(Published(2, 2))  # another lineage
    for _ in range(2):
        assert store.has(Published(1, 2))
        assert torch.equal(store.take(Published(1, 2))["w"], torch.ones(2, 2))
    assert not store.has(Published(1, 2))
