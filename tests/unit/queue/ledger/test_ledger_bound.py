"""The ledger's guarantees over random schedules, checked by brute force on its event log.

No group trains too old, every ordinal ends once, room is kept, and the step can be completed: whatever happens.
"""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import RETURNS, Run, comparable, play, schedules, streams
from ledger_driver import DrivenLedger as Ledger

from asyncrl.queue.protocol.settings import StreamSettings


@given(streams(), schedules())
@settings(max_examples=400, deadline=None)
def test_no_schedule_breaks_the_bound_or_starves_the_learner(
    stream: StreamSettings, schedule: list[tuple[str, int]]
) -> None:
    run = Run(stream)
    play(run, schedule)
    run.complete_step()
    counts = run.ledger.counts(run.now)
    assert {"trained": counts["trained"], "dropped": counts["dropped"]} == {
        how: Counter(run.ends.values())[how] for how in ("trained", "dropped")
    }
    states = ("pending", "leased", "ready", "lacking_columns", "claimed", "recorded")
    assert sum(counts[state] for state in states) + len(run.ends) == run.known
    run.ledger.finish("done")
    counts = run.ledger.counts(run.now)
    assert counts["trained"] + counts["dropped"] == run.known
    assert (counts["bytes"], counts["retained_bytes"], counts["reserved_bytes"]) == (0, 0, 0)


@given(streams(), schedules(RETURNS))
@settings(max_examples=100, deadline=None)
def test_replaying_the_events_gives_the_same_ledger(
    stream: StreamSettings, schedule: list[tuple[str, int]]
) -> None:
    run = Run(stream)
    play(run, schedule)
    replayed = Ledger()
    for event in run.log:
        replayed.apply(event)
    assert comparable(replayed.state) == comparable(run.ledger.state)


@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 21))
def test_spare_versions_leave_room_for_the_window(groups: int, staleness: int, window: int) -> None:
    """η = S + the versions that the window can add, and a window that leaves no S is refused."""
    spare = staleness - math.ceil((window - 1) / groups)
    try:
        stream = StreamSettings(groups, staleness, window, groups + window, 1, 1.0)
        assert stream.spare_versions == spare >= 0
    except ValueError:
        assert spare < 0
