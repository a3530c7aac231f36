from __future__ import annotations

import pytest
from waiting import Clock

from asyncrl.errors import WeightSyncError
from asyncrl.sync.stream.snapshot import STALLED_S, Pin, SnapshotEvictedError, Snapshots


def publish(snapshots: Snapshots, version: int) -> int:
    slot = snapshots.begin(version)
    snapshots.commit(slot)
    return slot


def pinned(snapshots: Snapshots, version: int, who: str = "g") -> Pin:
    pin = snapshots.pin(version, who)
    assert pin is not None
    return pin


def test_slots_alternate_while_nobody_reads() -> None:
    snapshots = Snapshots()
    assert snapshots.newest is None
    assert [publish(snapshots, v) for v in range(4)] == [0, 1, 0, 1]
    assert snapshots.newest == 3
    assert snapshots.pin(1, "g") is None, "overwritten"
    with pytest.raises(LookupError):
        snapshots.pin(4, "g")
    with pytest.raises(WeightSyncError, match="version 3 published after version 3"):
        snapshots.begin(3)


def test_a_version_being_written_cannot_be_pinned_yet() -> None:
    snapshots = Snapshots()
    slot = snapshots.begin(0)
    assert snapshots.newest is None
    with pytest.raises(LookupError):
        snapshots.pin(0, "g")
    snapshots.commit(slot)
    assert pinned(snapshots, 0).slot == slot


def test_a_version_that_is_being_overwritten_cannot_be_pinned_any_more() -> None:
    """Its bytes are torn until the new version is whole."""
    snapshots = Snapshots()
    publish(snapshots, 0)
    publish(snapshots, 1)
    slot = snapshots.begin(2)
    assert snapshots.pin(0, "g") is None
    assert snapshots.slot_of(0) is None
    assert snapshots.newest == 1
    snapshots.commit(slot)
    assert pinned(snapshots, 2).slot == slot


def test_a_reader_keeps_its_slot_and_the_other_is_reused() -> None:
    snapshots = Snapshots()
    publish(snapshots, 0)
    slow = pinned(snapshots, 0)
    assert [publish(snapshots, v) for v in (1, 2, 3)] == [1, 1, 1]
    snapshots.moved(slow)
    snapshots.release(slow)
    assert publish(snapshots, 4) == 0


def test_with_both_read_the_younger_transfers_are_cancelled() -> None:
    snapshots = Snapshots()
    publish(snapshots, 0)
    slow = pinned(snapshots, 0, "slow")
    publish(snapshots, 1)
    fast = pinned(snapshots, 1, "fast")
    publish(snapshots, 2)
    snapshots.moved(slow)
    with pytest.raises(SnapshotEvictedError, match="version 1 was taken back from fast"):
        snapshots.moved(fast)
    assert snapshots.newest == 2


def test_but_an_older_transfer_that_stalled_gives_way() -> None:
    clock = Clock()
    snapshots = Snapshots(clock=clock)
    publish(snapshots, 0)
    stopped = pinned(snapshots, 0, "stopped")
    publish(snapshots, 1)
    clock.now = STALLED_S + 1
    alive = pinned(snapshots, 1, "alive")
    publish(snapshots, 2)
    snapshots.moved(alive)
    with pytest.raises(SnapshotEvictedError):
        snapshots.moved(stopped)


def test_with_one_slot_every_version_takes_it_back_and_the_newest_is_always_there() -> None:
    snapshots = Snapshots(slots=1)
    assert publish(snapshots, 0) == 0
    slow = pinned(snapshots, 0, "slow")
    assert publish(snapshots, 1) == 0
    with pytest.raises(SnapshotEvictedError, match="version 0 was taken back from slow"):
        snapshots.moved(slow)
    assert snapshots.pin(0, "slow") is None
    assert pinned(snapshots, 1).slot == 0
    assert snapshots.newest == 1


def test_a_released_pin_is_no_good_any_more() -> None:
    snapshots = Snapshots()
    publish(snapshots, 0)
    pin = pinned(snapshots, 0)
    assert not snapshots.wait_idle(0.0)
    snapshots.release(pin)
    snapshots.release(pin)
    assert snapshots.wait_idle(0.0)
    with pytest.raises(SnapshotEvictedError):
        snapshots.moved(pin)
