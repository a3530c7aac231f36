"""Rewinds and restarts: recorded steps come again as they were, and nothing else than the bound allows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from ledger_cases import RETURNS, Run, holding, play, schedules, streams
from ledger_driver import DrivenLedger as Ledger

from asyncrl.errors import RefusedError
from asyncrl.queue.ledger import events as ev
from asyncrl.queue.ledger.admission import trained_by
from asyncrl.queue.ledger.events import Event
from asyncrl.queue.ledger.learner_commands import Claimed
from asyncrl.queue.ledger.state.leases import TASK
from asyncrl.queue.ledger.state.steps import RetainedStep, RetainedSteps
from asyncrl.queue.protocol.settings import Frontier, StreamSettings


def check_books(run: Run) -> None:
    """What the ledger counts is what the observer knows."""
    counts = run.ledger.counts(run.now)
    ends = Counter(run.ends.values())
    assert (counts["trained"], counts["dropped"]) == (ends["trained"], ends["dropped"])
    states = ("pending", "leased", "ready", "lacking_columns", "claimed", "recorded")
    assert sum(counts[state] for state in states) + len(run.ends) == run.known
    state = run.ledger.state
    kept = sum(item.nbytes for step in state.steps.retained.steps.values() for item in step.records.values())
    recorded = [item.nbytes for item in state.tasks.records.values() if item.state.value == "recorded"]
    assert (counts["retained_bytes"], counts["recorded"]) == (kept + sum(recorded), len(recorded))
    assert counts["bytes"] == sum(item.nbytes for item in state.tasks.records.values()) - sum(recorded)


@given(streams(), schedules(RETURNS))
@settings(max_examples=400, deadline=None)
def test_no_rewind_breaks_the_bound_loses_an_ordinal_or_starves_the_learner(
    stream: StreamSettings, schedule: list[tuple[str, int]]
) -> None:
    """`Observer` compares every claim with the record, or with the bound under min(v, version rewound to)."""
    run = Run(stream)
    play(run, schedule)
    check_books(run)
    for _ in range(len(run.record) + 2):
        run.complete_step()
    check_books(run)
    run.ledger.finish("done")
    counts = run.ledger.counts(run.now)
    assert counts["trained"] + counts["dropped"] == run.known
    assert (counts["bytes"], counts["retained_bytes"], counts["reserved_bytes"]) == (0, 0, 0)


@given(streams(), schedules(), schedules())
@settings(max_examples=50, deadline=None)
def test_a_broker_that_knows_nothing_goes_on_from_a_snapshot(
    stream: StreamSettings, before: list[tuple[str, int]], after: list[tuple[str, int]]
) -> None:
    lost = Run(stream)
    play(lost, before)
    frontier = lost.ledger.frontier(1)
    run = Run(stream)
    run.ledger.open(stream, frontier)
    # The surviving history is that of the snapshot.
    run.ends, run.known = dict(lost.ends), run.ledger.state.tasks.next
    assert (run.ledger.state.lineage, run.step) == (1, frontier.version)
    for worker in run.workers:
        worker.held = run.step
    run.complete_step()
    play(run, after)
    run.complete_step()
    for ordinal, epoch in lost.leases():
        with pytest.raises(RefusedError, match="fenced"):
            run.ledger.commit(ordinal, epoch, 1, 1, 0, 0)


# ---------------------------------------------------------------------- by hand


def test_a_lease_of_an_abandoned_lineage_is_never_one_of_the_new() -> None:
    """Both are the first lease after the same snapshot, of the same task."""
    before = Hand(settings_of())
    frontier = before.ledger.frontier(1)
    (old,) = before.ledger.lease("w", 0, 0, 1, 0.0)
    after = Ledger(lambda event: None)
    after.open(before.stream, frontier)
    after.submit(0, 20)
    (new,) = after.lease("w", 0, after.state.lineage, 1, 0.0)
    assert (new.ordinal, new.epoch == old.epoch) == (old.ordinal, False)
    with pytest.raises(RefusedError, match="fenced"):
        after.commit(old.ordinal, old.epoch, 1, 1, 0, 0)
    assert after.renew([old], 0.0) == [old]


def settings_of(groups: int = 1, staleness: int = 1, depth: int = 20, learners: int = 1) -> StreamSettings:
    return StreamSettings(groups, staleness, 1, depth, 1 << 30, 10.0, learners)


class Hand:
    """A ledger that one worker and one learner use in turn; events of the learner are kept."""

    def __init__(self, stream: StreamSettings, tasks: int = 20) -> None:
        self.stream = stream
        self.steps: list[Event] = []
        self.ledger = Ledger(self.note)
        self.ledger.open(stream, None)
        self.ledger.submit(0, tasks)

    def note(self, event: Event) -> None:
        if isinstance(event, ev.StepClaimed | ev.StepTrained):
            self.steps.append(event)

    def make(self, most: int = 100) -> list[int]:
        """Lease with the newest version and commit at once."""
        state = self.ledger.state
        grants = self.ledger.lease("w", state.steps.version, state.lineage, most, 0.0)
        for grant in grants:
            self.ledger.commit(grant.ordinal, grant.epoch, 1, 10, state.steps.version, grant.ordinal)
        return [grant.ordinal for grant in grants]

    def claim(self, index: int = 0, rank: int = 0) -> Claimed | None:
        state = self.ledger.state
        return self.ledger.claim(state.learner_epoch, state.steps.version, index, rank, 100, False)

    def train(self) -> tuple[int, ...]:
        claimed = self.claim()
        assert claimed is not None
        state = self.ledger.state
        self.ledger.trained(state.learner_epoch, state.steps.version)
        return claimed.ordinals

    def frontier(self) -> Frontier:
        return self.ledger.frontier(self.ledger.state.learner_epoch)

    def states(self) -> dict[int, str]:
        return {
            ordinal: item.state.value for ordinal, item in sorted(self.ledger.state.tasks.records.items())
        }


def test_a_learner_that_comes_back_repeats_its_steps_event_by_event() -> None:
    """B = 2, η = 1, checkpoint at 1: steps 1, 2 and the half of step 3 come again, then new ones."""
    hand = Hand(settings_of(groups=2))
    frontier = None
    for step in range(3):
        hand.make(2)
        assert hand.train() == (2 * step, 2 * step + 1)
        frontier = hand.frontier() if step == 0 else frontier
    hand.make(1)
    assert hand.claim() == Claimed((6,), False, 1)
    before, hand.steps = hand.steps, []

    hand.ledger.open(hand.stream, frontier)
    counts = hand.ledger.counts(0.0)
    assert (counts["recorded"], counts["trained"], counts["bytes"], counts["retained_bytes"]) == (5, 2, 0, 70)
    assert (hand.train(), hand.train()) == ((2, 3), (4, 5))
    assert hand.claim() == Claimed((6,), False, 1)
    assert hand.steps == before[2:]
    hand.make()
    assert hand.claim(1) == Claimed((7,), True, 2)


def test_groups_too_old_for_the_branch_are_made_again() -> None:
    """B = 1, η = 1: ordinal 3 was made by version 2 and 4 by version 3.

    Back at 2, both count as made by 2, which may start ranks below F(4) = 4: 4 is done again. Back at 1 both are.
    """
    for back, ready in ((2, [3]), (1, [])):
        hand = Hand(settings_of(), tasks=6)
        frontiers = []
        for _ in range(3):
            hand.make()
            hand.train()
            frontiers.append(hand.frontier())
        assert hand.make() == [4]
        hand.ledger.open(hand.stream, frontiers[back - 1])
        assert hand.ledger.state.tasks.ready == ready
        assert hand.ledger.state.usage.unmade == [o for o in (3, 4) if o not in ready]
        assert {hand.train() for _ in range(back, 3)} == {(o,) for o in range(back, 3)}
        hand.make()
        assert hand.train() == (3,)


@pytest.mark.parametrize(("back", "kept"), [(3, True), (2, False)])
def test_finished_turns_too_new_for_the_branch_are_forgotten(back: int, kept: bool) -> None:
    """B = 1, η = 1: ordinal 4 is under way with version 3. Back at 2 its turns count as made by 2, which may start
    ranks below F(4) = 4 alone."""
    hand = Hand(settings_of(), tasks=6)
    frontiers = []
    for _ in range(3):
        hand.make()
        hand.train()
        frontiers.append(hand.frontier())
    (lease,) = hand.ledger.lease("w", 3, hand.ledger.state.lineage, 1, 0.0)
    assert lease.ordinal == 4
    hand.ledger.progress(4, lease.epoch, 7)
    hand.ledger.open(hand.stream, frontiers[back - 1])
    assert hand.ledger.state.tasks.records[4].progress == kept
    assert hand.ledger.state.tasks.records[4].held == back


def test_a_lease_after_a_rewind_is_new_though_its_number_comes_again() -> None:
    """The steps since the frontier are lost, so the stream begins anew there: lease numbers too."""
    hand = Hand(settings_of())
    frontier = hand.frontier()
    (old,) = hand.ledger.lease("w", 0, 0, 1, 0.0)
    hand.ledger.open(replace(hand.stream, depth=hand.stream.depth + 1), frontier)
    hand.ledger.submit(0, 20)
    (new,) = hand.ledger.lease("w", 0, hand.ledger.state.lineage, 1, 0.0)
    assert new.ordinal == old.ordinal
    with pytest.raises(RefusedError, match="fenced"):
        hand.ledger.commit(old.ordinal, old.epoch, 1, 1, 0, 0)
    assert hand.ledger.commit(new.ordinal, new.epoch, 1, 1, 0, 0)


def test_a_step_that_is_refused_when_repeated_ends_the_record() -> None:
    """Back at 0 of 3 steps, step 0 gives a NaN now: 0 is dropped, and 1 takes its place if the bound allows."""
    hand = Hand(settings_of(groups=1, staleness=1))
    start = hand.frontier()
    for _ in range(3):
        hand.make()
        hand.train()
    hand.ledger.open(hand.stream, start)
    assert hand.claim() == Claimed((0,), True, 1)
    hand.ledger.reject(2, 0, "loss")
    # All count as made by version 0, which may start ranks below F(2) = 2: that is 1 and 2, now that 0 is dropped.
    assert (hand.ledger.state.tasks.ready, hand.ledger.state.tasks.pending[0]) == ([1, 2], 3)
    assert (hand.train(), hand.train()) == ((1,), (2,))
    assert hand.make() == [3, 4]


def test_a_short_step_is_repeated_as_short_and_counts_as_such() -> None:
    """B = 4, η = 0: step 0 had 2 groups. Back at 0, version 1 may start ranks below F(2) = 2 + 4."""
    hand = Hand(settings_of(groups=4, staleness=0), tasks=2)
    start = hand.frontier()
    hand.make()
    assert hand.train() == (0, 1)
    hand.ledger.submit(2, 8)
    hand.ledger.open(hand.stream, start)
    assert trained_by(hand.ledger.state, 1) == 2
    assert hand.make() == []  # version 0 could only start ranks below 2
    assert hand.train() == (0, 1)
    assert hand.make() == [2, 3, 4, 5]


def test_a_repeated_step_is_not_over_before_all_of_it_was_claimed() -> None:
    """Two groups in two claims, and nothing else to come."""
    hand = Hand(settings_of(groups=2), tasks=2)
    hand.ledger.exhaust(2)
    start = hand.frontier()
    hand.make(1)
    hand.claim()
    hand.make(1)
    assert hand.claim(1) == Claimed((1,), True, 2)
    hand.ledger.trained(1, 0)
    hand.ledger.open(hand.stream, start)
    hand.claim()
    with pytest.raises(RefusedError, match="incomplete"):
        hand.ledger.trained(2, 0)
    assert hand.claim(1) == Claimed((1,), True, 2)
    with pytest.raises(RefusedError, match="complete"):
        hand.claim(2)
    assert hand.ledger.trained(2, 0) == 1


def test_what_was_dropped_stays_dropped() -> None:
    """B = 1, W = 1: 1 and 2 are dropped after the snapshot, below and above what is trained after it."""
    hand = Hand(settings_of(groups=1, staleness=3))
    start = hand.frontier()
    zero, one, two, three = hand.ledger.lease("w", 0, 0, 4, 0.0)
    for grant in (zero, three):
        hand.ledger.commit(grant.ordinal, grant.epoch, 1, 10, 0, 7)
    for grant in (one, two):
        hand.ledger.drop(grant.ordinal, grant.epoch, "reward")
    assert (hand.train(), hand.train()) == ((0,), (3,))
    hand.ledger.open(hand.stream, start)
    assert hand.frontier().dropped_ordinals == (1, 2)
    assert (hand.train(), hand.train()) == ((0,), (3,))
    assert hand.ledger.counts(0.0)["dropped_by_reason"] == {"reward": 2}
    assert hand.frontier().frontier == 4


def test_the_record_is_kept_only_for_the_same_history_and_the_same_steps() -> None:
    def trained(steps: int = 3) -> tuple[Hand, list[Frontier]]:
        hand, frontiers = Hand(settings_of()), []
        for _ in range(steps):
            frontiers.append(hand.frontier())
            hand.make()
            hand.train()
        return hand, frontiers

    def recorded(hand: Hand) -> int:
        return hand.ledger.counts(0.0)["recorded"]

    hand, frontiers = trained()
    hand.ledger.checkpointed(1, 2)
    hand.ledger.open(hand.stream, frontiers[1])  # a checkpoint of 2 was committed: step 1 is not kept
    assert (recorded(hand), hand.ledger.state.tasks.next) == (0, 1)

    hand, frontiers = trained()
    hand.ledger.open(settings_of(learners=2), frontiers[1])  # shares were for one rank
    assert recorded(hand) == 0

    hand, frontiers = trained()
    hand.ledger.open(hand.stream, frontiers[1])
    assert recorded(hand) == 2
    hand.ledger.open(hand.stream, frontiers[2])  # of the branch that was left at 1
    assert (recorded(hand), hand.ledger.state.tasks.next) == (0, 2)

    hand, frontiers = trained()
    hand.ledger.open(hand.stream, frontiers[2])
    hand.ledger.open(hand.stream, frontiers[1])  # both branches have it
    assert recorded(hand) == 2


def lossy() -> tuple[Hand, Frontier]:
    """B = 2: 0 and 1 are trained, 2 and 3 claimed, 4 and 5 ready, 6 begun; then 3, 5 and all of 6 are lost."""
    hand = Hand(settings_of(groups=2, staleness=3))
    start = hand.frontier()
    hand.make(6)
    (leased,) = hand.ledger.lease("w", 0, 0, 1, 0.0)
    hand.ledger.progress(leased.ordinal, leased.epoch, 5)
    hand.train()
    hand.claim()
    assert holding(hand.ledger.state) == set(range(7))
    hand.ledger.recover(100.0, lost=[3, 5, 6])
    assert (sorted(hand.ledger.state.usage.unmade), hand.ledger.state.tasks.records[6].progress) == (
        [5, 6],
        False,
    )
    return hand, start


def test_a_step_that_is_repeated_tells_nothing_of_how_far_ahead_to_work() -> None:
    """Its groups were there already, however long the learner took to come back."""
    stream = replace(settings_of(groups=2, staleness=3), wait_share=0.1)
    hand = Hand(stream)
    start, state = hand.frontier(), hand.ledger.state
    hand.make(2)
    hand.train()
    hand.ledger.open(stream, start)
    before = state.lead
    for step, moved in enumerate((False, True)):
        if moved:
            hand.make(2)
        assert hand.claim() is not None
        hand.ledger.trained(state.learner_epoch, step, waited=0.9)
        assert (state.lead != before) == moved


def retained(versions: range, retention: RetainedSteps) -> None:
    """Steps of two groups each."""
    for version in versions:
        retention.steps[version] = RetainedStep([], whole=True, before=2 * version)


def test_a_frontier_of_a_branch_that_was_left_is_not_of_this_history() -> None:
    """Version 2 of lineage 0 was trained on other groups than version 2 of lineage 1, which left it at version 1."""
    retention = RetainedSteps()
    retained(range(3), retention)
    assert sorted(retention.fork(1, 1)) == [1, 2]
    retained(range(1, 3), retention)

    def covers(lineage: int, version: int, kept: int) -> bool:
        return retention.covers(Frontier(lineage, version, kept=kept), lineage=1, version=3, trained_total=6)

    assert covers(0, 0, kept=0)
    assert covers(0, 1, kept=2), "both lineages have it"
    assert not covers(0, 2, kept=4)
    assert covers(1, 2, kept=4)
    assert not covers(2, 2, kept=4), "of a lineage that is not known here"


def test_a_frontier_that_counts_other_groups_is_not_of_this_history() -> None:
    retention = RetainedSteps()
    retained(range(3), retention)
    for version, kept, known in ((1, 2, True), (1, 3, False), (3, 6, True), (3, 5, False), (4, 8, False)):
        frontier = Frontier(0, version, kept=kept)
        assert retention.covers(frontier, lineage=0, version=3, trained_total=6) == known
    list(retention.release(2))
    assert not retention.covers(Frontier(0, 1, kept=2), lineage=0, version=3, trained_total=6)
    assert retention.covers(Frontier(0, 2, kept=4), lineage=0, version=3, trained_total=6)


def test_a_broker_that_has_lost_bytes_lets_them_be_made_again() -> None:
    """The learner had not got 3 yet: with its question the step begins anew."""
    hand, start = lossy()
    with pytest.raises(RefusedError, match="abandoned: groups of step 1 are lost"):
        hand.claim(0)
    assert hand.states() == {
        2: "ready",
        3: "pending",
        4: "ready",
        5: "pending",
        6: "leased",
        **dict.fromkeys(range(7, 20), "pending"),
    }
    assert hand.ledger.state.usage.unmade == [3]
    with pytest.raises(RefusedError, match="abandoned"):
        hand.claim(1)
    assert hand.ledger.expire(109.0) == []  # the new clock
    assert [lease.stage for lease in hand.ledger.state.leases] == [TASK]
    assert hand.make(2) == [3, 5]
    assert hand.train() == (2, 3)
    hand.ledger.recover(0.0, lost=[0])  # of a trained step: nobody can go back to before it
    hand.ledger.open(hand.stream, start)
    assert hand.ledger.counts(0.0)["recorded"] == 0


def test_what_a_broker_loses_of_a_stream_that_drains_is_not_made_again() -> None:
    """0 is ready and its bytes are lost; 1 is under way, and is finished."""
    hand = Hand(settings_of(groups=2, staleness=1))
    hand.make(1)
    (leased,) = hand.ledger.lease("w", 0, 0, 1, 0.0)
    hand.ledger.drain()
    hand.ledger.recover(100.0, lost=[0])
    assert hand.states() == {1: "leased"}
    assert hand.ledger.counts(100.0)["dropped_by_reason"] == {"drained": 19}
    hand.ledger.commit(1, leased.epoch, 1, 10, 0, 1)
    assert hand.train() == (1,)


def test_a_learner_that_has_got_its_groups_goes_on_without_their_bytes() -> None:
    hand, start = lossy()
    assert hand.ledger.trained(hand.ledger.state.learner_epoch, 1) == 2
    assert hand.ledger.counts(0.0)["retained_steps"] == 0  # not all of step 1 could be handed out again
    hand.ledger.open(hand.stream, start)
    assert hand.ledger.counts(0.0)["recorded"] == 0


def test_a_rewind_hands_out_what_is_left_of_a_step_whose_bytes_are_lost() -> None:
    hand, _ = lossy()
    hand.ledger.open(hand.stream, hand.frontier())
    assert hand.states()[2] == "ready"
    assert hand.states()[3] == "pending"


def test_the_same_call_opens_a_stream_once() -> None:
    hand = Hand(settings_of())
    start = hand.frontier()
    state = hand.ledger.state
    hand.ledger.open(hand.stream, start, opener="learner 1")
    epoch, lineage = state.learner_epoch, state.lineage
    hand.ledger.submit(0, 2)
    hand.ledger.lease("w", 0, lineage, 1, 0.0)
    hand.ledger.open(hand.stream, start, opener="learner 1")
    assert (state.learner_epoch, state.lineage, len(state.tasks.leased)) == (epoch, lineage, 1)
    hand.ledger.open(hand.stream, start, opener="learner 2")
    assert (state.learner_epoch, state.lineage, len(state.tasks.leased)) == (epoch + 1, lineage + 1, 0)


def test_the_bias_meter_follows_a_rewind() -> None:
    hand = Hand(settings_of())
    start = hand.frontier()
    hand.make()
    hand.train()
    hand.train()
    assert hand.ledger.counts(0.0)["bias"]["trained"] == {1: 2}
    hand.ledger.open(hand.stream, start)
    assert hand.ledger.counts(0.0)["bias"]["trained"] == {}
    hand.train()
    assert hand.ledger.counts(0.0)["bias"]["trained"] == {1: 1}
