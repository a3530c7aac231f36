"""A task that is leased for long is leased to a second worker too, and the first group counts."""

from __future__ import annotations

import zlib
from dataclasses import asdict, replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import LEASE_S, Run, comparable, play, schedules
from ledger_driver import DrivenLedger as Ledger
from ledger_driver import ordinals

from asyncrl.errors import RefusedError
from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.state.ledger_state import LedgerState
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.queue.storage.records import SCHEMA, StreamState, decode_record, encode_record

HEDGE_S = 100.0
LEARNER = 1


def opened(groups: int = 2, staleness: int = 0, hedge_s: float | None = HEDGE_S, **more: Any) -> Ledger:
    """Ten tasks, one worker 'slow' that has leased all that may be leased at second 0."""
    stream = StreamSettings(groups, staleness, 1, 8, 1 << 20, lease_s=1e6, hedge_s=hedge_s, **more)
    ledger = Ledger()
    ledger.open(stream, None)
    ledger.submit(0, 10)
    ledger.lease("slow", 0, 0, 10, 0.0)
    return ledger


def epochs(ledger: Ledger, ordinal: int) -> list[int]:
    return sorted(lease.epoch for lease in ledger.state.leases if lease.ordinal == ordinal)


def test_the_oldest_task_goes_to_a_second_worker_when_nothing_else_may_be_leased() -> None:
    """B = 2 and η = 0: of ten tasks two may be leased, and the learner waits for both."""
    ledger = opened()
    assert ledger.lease("idle", 0, 0, 4, HEDGE_S) == []
    (hedge,) = ledger.lease("idle", 0, 0, 4, HEDGE_S + 1)
    assert hedge.ordinal == 0
    assert len(epochs(ledger, 0)) == 2
    assert (ledger.counts(0.0)["leased"], ledger.counts(0.0)["hedged"]) == (2, 1)
    assert ledger.lease("third", 0, 0, 4, 10 * HEDGE_S) == []  # the lowest has two leases, which are the most


@pytest.mark.parametrize("winner", [0, 1])
def test_the_first_commit_counts_and_the_other_is_refused(winner: int) -> None:
    ledger = opened()
    ledger.lease("idle", 0, 0, 1, HEDGE_S + 1)
    both = epochs(ledger, 0)
    loser = both[1 - winner]
    assert ledger.commit(0, both[winner], 3, 10, 0, digest=7)
    assert not ledger.commit(0, both[winner], 3, 10, 0, digest=7)  # a repetition
    with pytest.raises(RefusedError, match="fenced"):
        ledger.commit(0, loser, 3, 10, 0, digest=8)
    with pytest.raises(RefusedError, match="fenced"):
        ledger.drop(0, loser, "late")
    assert ledger.renew([(0, loser)], now=HEDGE_S) == [(0, loser)]
    assert (ledger.state.tasks.ready, epochs(ledger, 0)) == ([0], [])
    assert ledger.counts(0.0)["bytes"] == 10


def test_a_lease_that_ends_leaves_the_other_one_standing() -> None:
    for gone in (0, 1):
        ledger = opened()
        ledger.lease("idle", 0, 0, 1, HEDGE_S + 1)
        both = epochs(ledger, 0)
        ledger.give_back([(0, both[gone])])
        assert epochs(ledger, 0) == [both[1 - gone]]
        assert 0 in ledger.state.tasks.leased
        ledger.progress(0, both[1 - gone], 5)
        ledger.give_back([(0, both[1 - gone])])
        assert ledger.state.tasks.pending[0] == 0
        assert ledger.state.leases.hedged == {}


def test_both_expire_at_once_and_the_task_is_pending_once() -> None:
    ledger = opened()
    ledger.lease("idle", 0, 0, 1, HEDGE_S + 1)
    ledger.expire(1e7)
    assert sorted(ledger.state.tasks.pending) == list(range(10))
    assert ordinals(ledger.lease("third", 0, 0, 4, 1e7)) == [0, 1]


def test_a_drop_by_one_worker_ends_both_leases() -> None:
    ledger = opened()
    ledger.lease("idle", 0, 0, 1, HEDGE_S + 1)
    ledger.drop(0, epochs(ledger, 0)[0], "reward")
    assert epochs(ledger, 0) == []
    assert 0 not in ledger.state.tasks.records


def test_no_worker_races_with_itself() -> None:
    assert opened().lease("slow", 0, 0, 4, 10 * HEDGE_S) == []


def test_what_may_be_leased_comes_first() -> None:
    ledger = opened()
    ledger.give_back([(1, epochs(ledger, 1)[0])])
    assert ordinals(ledger.lease("idle", 0, 0, 4, 10 * HEDGE_S)) == [1]
    assert ordinals(ledger.lease("idle", 0, 0, 4, 10 * HEDGE_S)) == [0]


def test_without_the_setting_no_task_has_two_leases() -> None:
    assert opened(hedge_s=None).lease("idle", 0, 0, 4, 1e5) == []


def test_a_task_for_which_the_learner_does_not_wait_yet_has_one_lease() -> None:
    """B = 1, η = 3, W = 1: the learner waits for the lowest alone."""
    ledger = opened(groups=1, staleness=3)
    (first,) = epochs(ledger, 0)
    ledger.commit(0, first, 1, 10, 0, 7)
    assert ledger.lease("idle", 0, 0, 4, 10 * HEDGE_S) == []
    ledger.claim(LEARNER, 0, 0, 0, 100, False)
    assert ordinals(ledger.lease("idle", 0, 0, 4, 10 * HEDGE_S)) == [1]


def test_a_worker_whose_version_is_too_old_for_the_task_does_not_get_it() -> None:
    """η = 0: a task that was leased under version 1 is for version 1."""
    ledger = opened()
    for ordinal in (0, 1):
        ledger.commit(ordinal, epochs(ledger, ordinal)[0], 1, 10, 0, ordinal)
    ledger.claim(LEARNER, 0, 0, 0, 100, True)
    ledger.trained(LEARNER, 0)
    assert ordinals(ledger.lease("slow", 1, 0, 4, 0.0)) == [2, 3]
    assert ledger.lease("laggard", 0, 0, 4, 10 * HEDGE_S) == []
    assert ordinals(ledger.lease("idle", 1, 0, 4, 10 * HEDGE_S)) == [2]


def test_tokens_may_be_as_old_as_the_older_of_both_leases_allows() -> None:
    """η = 2, B = 1: leased under version 1, then by a worker that still holds version 0, for which it is admitted."""
    ledger = opened(groups=1, staleness=2)
    (first,) = epochs(ledger, 0)
    ledger.commit(0, first, 1, 10, 0, 7)
    ledger.claim(LEARNER, 0, 0, 0, 100, False)
    ledger.trained(LEARNER, 0)
    ledger.give_back([(1, epochs(ledger, 1)[0])])
    assert 1 in ordinals(ledger.lease("slow", 1, 0, 4, 0.0))
    (hedge,) = ledger.lease("laggard", 0, 0, 4, HEDGE_S + 1)
    assert hedge.ordinal == 1
    assert ledger.commit(1, hedge.epoch, 1, 10, 0, 7)


def test_a_rewind_ends_both_leases() -> None:
    ledger = opened()
    checkpoint = ledger.frontier(LEARNER)
    ledger.lease("idle", 0, 0, 1, HEDGE_S + 1)
    both = epochs(ledger, 0)
    settings_ = ledger.state.settings
    assert settings_ is not None
    ledger.open(settings_, checkpoint)
    assert ledger.renew([(0, epoch) for epoch in both], 0.0) == [(0, epoch) for epoch in both]
    assert (len(ledger.state.leases.by_epoch), ledger.state.leases.hedged) == (0, {})


STREAM = StreamSettings(2, 1, 2, 6, 1 << 20, LEASE_S, hedge_s=0.1)


@given(schedules(("snapshot", "rewind", "recover")), st.sampled_from([(2, 1, 2), (1, 0, 1), (3, 2, 4)]))
@settings(max_examples=100, deadline=None)
def test_leases_are_counted_whatever_happens(
    schedule: list[tuple[str, int]], shape: tuple[int, int, int]
) -> None:
    groups, staleness, window = shape
    run = Run(replace(STREAM, groups_per_version=groups, max_staleness=staleness, window=window))
    for action in schedule:
        run.now += 0.1
        play(run, [action])
        state = run.ledger.state
        assert set(state.leases.hedged) <= state.tasks.leased
        assert len(run.leases()) == len(state.tasks.leased) + len(state.leases.hedged)
    replayed = Ledger()
    for event in run.log:
        replayed.apply(event)
    assert comparable(replayed.state) == comparable(run.ledger.state)
    run.complete_step()


def test_schedules_have_such_leases() -> None:
    """The test above would prove nothing without."""
    run = Run(replace(STREAM, max_staleness=0, window=1))
    run.submit(9)
    run.lease(3)
    run.now += 1.0
    run.lease(1)
    assert [event.ordinal for event in run.log if isinstance(event, ev.Hedged)] == [0]


def test_a_state_of_a_journal_without_such_leases_is_read() -> None:
    """Its schema is that of now, which does not count what older journals may lack."""
    assert zlib.crc32(SCHEMA.encode()) == 2691686431
    state = opened().state
    name, stream, (_, fields) = msgpack.unpackb(
        encode_record(StreamState("train", state)), strict_map_key=False
    )
    del fields["leases"]["hedged"], fields["settings"]["hedge_s"]
    again = decode_record(msgpack.packb([name, stream, ["train", fields]]))
    assert isinstance(again, StreamState)
    expected = LedgerState(**{f: getattr(state, f) for f in LedgerState.__slots__})
    assert expected.settings is not None
    expected.settings = replace(expected.settings, hedge_s=None)
    assert asdict(again.state) == asdict(expected)
