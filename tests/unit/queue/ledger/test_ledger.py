"""The life of a task, the counter-examples to weaker admission rules, and claims; all worked by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from ledger_cases import holding
from ledger_driver import DrivenLedger as Ledger
from ledger_driver import ordinals

from asyncrl.errors import RefusedError, RunClosedError
from asyncrl.queue.ledger.generator_commands import Grant
from asyncrl.queue.ledger.learner_commands import Claimed
from asyncrl.queue.ledger.ledger import MAX_PENDING
from asyncrl.queue.ledger.state.tasks import OrdinalIndex
from asyncrl.queue.protocol.settings import Frontier, StreamSettings

LEARNER = 1


def opened(
    groups: int = 2,
    staleness: int | None = 1,
    window: int | None = 1,
    depth: int = 100,
    max_bytes: int = 1 << 30,
    learners: int = 1,
    tasks: int = 50,
    **settings_: Any,
) -> Ledger:
    ledger = Ledger()
    settings = StreamSettings(groups, staleness, window, depth, max_bytes, 10.0, learners, **settings_)
    ledger.open(settings, None)
    ledger.submit(0, tasks)
    return ledger


def lease(ledger: Ledger, held: int, most: int = 100, now: float = 0.0) -> list[Grant]:
    return ledger.lease("w", held, ledger.state.lineage, most, now)


def commit(ledger: Ledger, *grants: Grant, tokens: int = 1, version: int | None = None) -> None:
    for grant in grants:
        held = ledger.state.tasks.records[grant.ordinal].held
        ledger.commit(grant.ordinal, grant.epoch, tokens, 10, held if version is None else version, 7)


def claim(ledger: Ledger, step: int, index: int = 0, rank: int = 0, whole: bool = False) -> Claimed | None:
    return ledger.claim(LEARNER, step, index, rank, 100, whole)


def refused(reason: str) -> object:
    return pytest.raises(RefusedError, match=f"^{reason}")


def train(ledger: Ledger, step: int) -> tuple[int, ...]:
    """One claim of the whole step, then trained."""
    claimed = claim(ledger, step)
    assert claimed is not None
    ledger.trained(LEARNER, step)
    return claimed.ordinals


# ---------------------------------------------------------------------- claims ahead


def ahead(ledger: Ledger, step: int, rank: int = 0, attempt: int | None = None) -> Any:
    return ledger.claim(LEARNER, step, 0, rank, 100, False, attempt, ahead=True)


def with_ready(count: int, **options: Any) -> Ledger:
    """B = 2, all groups of version 0."""
    ledger = opened(staleness=4, tasks=count, **options)
    commit(ledger, *lease(ledger, held=0, most=count))
    return ledger


def test_a_claim_comes_ahead_once_the_running_step_has_all_its_groups() -> None:
    ledger = with_ready(4)
    assert ahead(ledger, 1) is None
    claim(ledger, 0)
    assert ahead(ledger, 2) is None
    early = ahead(ledger, 1)
    assert (early.ordinals, early.last, early.so_far, early.ahead) == ((2, 3), True, 2, True)
    assert ahead(ledger, 1) == early
    counts = ledger.counts(0.0)
    assert (counts["ready"], counts["claimed"], counts["recorded"]) == (0, 4, 0)
    ledger.trained(LEARNER, 0)
    assert ledger.claim(LEARNER, 1, 0, 0, 100, False, early.attempt) == early._replace(ahead=False)
    ledger.trained(LEARNER, 1)
    assert ledger.counts(0.0)["trained"] == 4


def test_no_claim_comes_ahead_while_a_group_could_be_added_or_the_stream_ends() -> None:
    for count, exhausted in ((3, False), (4, True)):
        ledger = with_ready(count)
        if exhausted:
            ledger.exhaust(count)
        claim(ledger, 0)
        assert ahead(ledger, 1) is None


def test_no_claim_comes_ahead_whose_groups_the_window_keeps_back() -> None:
    """B = 4, W = 3: groups 5 to 8 are ready, and 5 and 6 may be taken before 4. A claim of these two could grow."""
    ledger = opened(groups=4, staleness=4, window=3, tasks=9)
    grants = lease(ledger, held=0)
    commit(ledger, *(grant for grant in grants if grant.ordinal != 4))
    claim(ledger, 0)
    assert ahead(ledger, 1) is None
    commit(ledger, grants[4])
    assert ahead(ledger, 1).ordinals == (4, 5, 6, 7)


def test_rank_0_fixes_the_shares_of_a_claim_ahead() -> None:
    ledger = with_ready(8, groups=4, learners=2)
    for rank in (0, 1):
        claim(ledger, 0, rank=rank)
    assert ahead(ledger, 1, rank=1) is None
    first = ahead(ledger, 1).ordinals
    second = ahead(ledger, 1, rank=1).ordinals
    assert sorted((*first, *second)) == [4, 5, 6, 7]
    assert len(first) == 2


def test_what_was_claimed_ahead_comes_back_where_the_running_step_begins_anew() -> None:
    ledger = with_ready(5)
    claim(ledger, 0)
    early = ahead(ledger, 1)
    ledger.abandon(LEARNER, 0, 0, [0], "corrupt")
    with refused("abandoned"):
        ahead(ledger, 1, attempt=early.attempt)
    assert claim(ledger, 0).ordinals == (1, 2)
    ledger.trained(LEARNER, 0)
    with refused("abandoned"):
        ledger.claim(LEARNER, 1, 0, 0, 100, False, early.attempt)
    assert claim(ledger, 1).ordinals == (3, 4)


def test_a_claim_ahead_stands_without_its_bytes_for_a_rank_that_has_them() -> None:
    """The broker comes back without the bytes of group 2, which is rank 0's. It has received them; rank 1 asks for its
    own, which are there. A rank that asks for lost ones waits, and begins the step anew once that runs."""
    for received in (1, 0):
        ledger = with_ready(4, learners=2)
        for rank in (0, 1):
            claim(ledger, 0, rank=rank)
        early = ahead(ledger, 1)
        assert early.ordinals == (2,)
        ledger.recover(0.0, [2])
        assert (ahead(ledger, 1) is None, ahead(ledger, 1, rank=1).ordinals) == (True, (3,))
        ledger.trained(LEARNER, 0)
        again = (LEARNER, 1, 0, 0, 100, False, early.attempt)
        if received:
            assert ledger.claim(*again, received=1) == early._replace(ahead=False)
            ledger.trained(LEARNER, 1)
        else:
            with refused("abandoned"):
                ledger.claim(*again)
            assert ledger.counts(0.0)["pending"] == 1


def test_groups_that_are_claimed_ahead_keep_their_bytes_in_the_limit() -> None:
    """Ten bytes a group: of 60 allowed, 40 are there, and so are those of two that are leased."""
    ledger = opened(staleness=4, max_bytes=60, tasks=8)
    commit(ledger, *lease(ledger, held=0, most=4))
    claim(ledger, 0)
    before = ledger.counts(0.0)["bytes"]
    assert ahead(ledger, 1) is not None
    assert (ledger.counts(0.0)["bytes"], ledger.counts(0.0)["retained_bytes"]) == (before, 0)


def test_a_learner_that_comes_back_makes_a_claim_ahead_as_it_was() -> None:
    ledger = with_ready(6)
    start = ledger.frontier(LEARNER)
    claim(ledger, 0)
    early = ahead(ledger, 1)
    assert ledger.state.settings is not None
    ledger.open(ledger.state.settings, start)
    assert ledger.counts(0.0)["recorded"] == 4
    at = (LEARNER + 1, 0, 0, 0, 100, False)
    assert ledger.claim(*at).ordinals == (0, 1)
    assert ledger.claim(LEARNER + 1, 1, 0, 0, 100, False, ahead=True) is None  # it is recorded
    ledger.trained(LEARNER + 1, 0)
    assert ledger.claim(LEARNER + 1, 1, 0, 0, 100, False).ordinals == early.ordinals


def test_a_step_that_began_with_a_claim_ahead_moves_the_lead_as_any() -> None:
    ledger = with_ready(6, wait_share=0.1)
    claim(ledger, 0)
    assert ahead(ledger, 1) is not None
    ledger.trained(LEARNER, 0, 0.0)
    claim(ledger, 1)
    before = ledger.counts(0.0)["lead"]
    ledger.trained(LEARNER, 1, 0.9)
    assert ledger.counts(0.0)["lead"] > before


def test_groups_that_are_claimed_ahead_keep_their_room() -> None:
    """B = 2, W = 3, depth 4: two are claimed ahead, and two more may be leased. The learner waits for none of them."""
    ledger = opened(staleness=4, window=3, depth=4, tasks=8)
    commit(ledger, *lease(ledger, held=0, most=4))
    claim(ledger, 0)
    assert ahead(ledger, 1) is not None
    assert ordinals(lease(ledger, held=0, most=8)) == [4, 5]


# ---------------------------------------------------------------------- admission


def test_a_worker_gets_what_the_bound_allows() -> None:
    """B = 2, η = 1, W = 1: S = 1, so version 0 may start ranks below 4 and version 1 ranks below 6."""
    ledger = opened()
    grants = lease(ledger, held=0)
    assert ordinals(grants) == [0, 1, 2, 3]
    assert lease(ledger, held=0) == []
    commit(ledger, *grants)
    assert train(ledger, 0) == (0, 1)
    assert lease(ledger, held=0) == []  # published is not applied
    assert ordinals(lease(ledger, held=1)) == [4, 5]


def test_a_laggard_cannot_start_what_only_the_new_version_may_make() -> None:
    """B = 1, η = 0: after version 1 is published, version 0 is too old for rank 1."""
    ledger = opened(groups=1, staleness=0)
    commit(ledger, *lease(ledger, held=0))
    train(ledger, 0)
    assert lease(ledger, held=0) == []
    assert ordinals(lease(ledger, held=1)) == [1]


def test_a_worker_ahead_of_the_ledger_counts_as_being_level() -> None:
    ledger = opened(groups=1, staleness=0)
    assert ordinals(lease(ledger, held=9)) == [0]


def test_the_window_hangs_on_the_head() -> None:
    """B = 1, W = 2, η = 2: S = 1. With 0 still out 1 may be trained, but not 2, or 0 would train at age 3."""
    ledger = opened(groups=1, staleness=2, window=2)
    head, *others = lease(ledger, held=0)
    assert ordinals(others) == [1]
    commit(ledger, *others)
    assert train(ledger, 0) == (1,)
    commit(ledger, *lease(ledger, held=1, most=1))  # ordinal 2: rank 2 < F(1 + 2) = 3
    assert claim(ledger, 1) is None
    commit(ledger, head)
    assert train(ledger, 1) == (0,)
    assert train(ledger, 2) == (2,)


def test_a_requeued_task_goes_before_younger_ones() -> None:
    """B = 2, η = 1: with 3 given back, nobody may start 4 in its place."""
    ledger = opened()
    grants = lease(ledger, held=0)
    commit(ledger, *grants[:3])
    train(ledger, 0)
    ledger.give_back([(3, grants[3].epoch)])
    assert ordinals(lease(ledger, held=1, most=1)) == [3]
    assert ordinals(lease(ledger, held=1, most=1)) == [4]


def test_a_short_version_after_a_drain_moves_the_bound_by_what_it_trained() -> None:
    """B = 4, η = 0: version 1 was made of 2 groups, so rank 2 opens step 1 and version 0 is too old."""
    ledger = opened(groups=4, staleness=0, tasks=2)
    commit(ledger, *lease(ledger, held=0))
    assert train(ledger, 0) == (0, 1)
    ledger.submit(2, 8)
    assert lease(ledger, held=0) == []
    assert ordinals(lease(ledger, held=1)) == [2, 3, 4, 5]


def test_a_short_version_needs_a_drain() -> None:
    ledger = opened(groups=4, staleness=0, tasks=5)
    commit(ledger, *lease(ledger, held=0, most=2))
    claim(ledger, 0)
    with refused("incomplete"):
        ledger.trained(LEARNER, 0)


def test_a_rejected_batch_counts_as_dropped_and_admission_goes_on() -> None:
    """B = 2, η = 0: the step's two groups are refused; the next two take their ranks and the step goes on."""
    ledger = opened(staleness=0)
    commit(ledger, *lease(ledger, held=0))
    assert claim(ledger, 0) == Claimed((0, 1), True, 2)
    assert lease(ledger, held=0) == []
    assert ledger.reject(LEARNER, 0, "loss") == 2
    commit(ledger, *lease(ledger, held=0))
    assert train(ledger, 0) == (2, 3)
    counts = ledger.counts(0.0)
    assert (counts["trained"], counts["dropped_by_reason"]) == (2, {"loss": 2})


def test_a_dropped_task_gives_its_rank_to_the_next() -> None:
    ledger = opened(staleness=0)
    first, _ = lease(ledger, held=0)
    ledger.drop(first.ordinal, first.epoch, "reward")
    assert ordinals(lease(ledger, held=0)) == [2]


def test_a_group_older_than_its_lease_promised_is_refused() -> None:
    ledger = opened(groups=1, staleness=0)
    commit(ledger, *lease(ledger, held=0))
    train(ledger, 0)
    (grant,) = lease(ledger, held=1)
    with refused("stale"):
        commit(ledger, grant, version=0)
    assert ordinals(lease(ledger, held=1)) == [1]


# ---------------------------------------------------------------------- backpressure


def test_a_refused_group_takes_the_unfinished_turns_of_its_task_with_it() -> None:
    """They are of the same tokens, too old for whoever leases the task next."""
    ledger = opened()
    commit(ledger, *lease(ledger, held=0, most=2))
    train(ledger, 0)
    (one,) = lease(ledger, held=1, most=1)
    ledger.progress(one.ordinal, one.epoch, 5)
    with refused("stale"):
        ledger.commit(one.ordinal, one.epoch, 1, 10, 0, 7)
    assert ledger.state.usage.unmade == [one.ordinal]
    assert (ledger.state.tasks.records[one.ordinal].progress, ledger.state.usage.live) == (False, 0)


def test_depth_bounds_what_is_leased_or_ready() -> None:
    ledger = opened(groups=2, staleness=3, depth=3)
    commit(ledger, *lease(ledger, held=0, most=2))
    assert ordinals(lease(ledger, held=0)) == [2]
    assert lease(ledger, held=0) == []
    claim(ledger, 0)
    assert ordinals(lease(ledger, held=0)) == [3, 4]


def test_a_synchronous_learner_gets_its_whole_batch_however_little_room_there_is() -> None:
    """It may claim all groups of a step at once: with fewer of them under way it would wait for ever."""
    ledger = opened(groups=4, staleness=0, max_bytes=15)
    for step in range(2):  # at the second one it is known that a group weighs 10
        grants = lease(ledger, held=step)
        assert ordinals(grants) == list(range(4 * step, 4 * step + 4))
        commit(ledger, *grants)
        assert train(ledger, step) == tuple(ordinals(grants))


def test_a_dead_head_finds_its_room_again() -> None:
    """Ordinal 0's worker dies while the queue is full: the room it leaves goes to nobody but 0."""
    ledger = opened(groups=2, staleness=3, depth=3)
    head, *others = lease(ledger, held=0)
    commit(ledger, *others)
    assert lease(ledger, held=0) == []
    ledger.give_back([(head.ordinal, head.epoch)])
    commit(ledger, *lease(ledger, held=0))
    assert train(ledger, 0) == (0, 1)


def test_bytes_stop_new_leases_but_not_what_the_learner_waits_for() -> None:
    """Each group weighs 10 of 15 bytes: with two held only the head may start."""
    ledger = opened(groups=2, staleness=3, max_bytes=15)
    first, second, third = lease(ledger, held=0, most=3)
    commit(ledger, second, third)
    assert lease(ledger, held=0) == []
    ledger.give_back([(first.ordinal, first.epoch)])
    assert ordinals(lease(ledger, held=0)) == [0]


def test_room_for_what_is_leased_is_kept_free() -> None:
    """Groups weigh 10 of 35 bytes: one ready and two leased leave no room for a fourth, which comes with the step."""
    ledger = opened(groups=2, staleness=3, max_bytes=35)
    commit(ledger, *lease(ledger, held=0, most=1))
    assert ordinals(lease(ledger, held=0)) == [1, 2]
    assert ledger.counts(0.0)["reserved_bytes"] == 20
    commit(ledger, *[Grant(o, ledger.state.tasks.records[o].epoch) for o in (1, 2)])
    assert lease(ledger, held=0) == []
    train(ledger, 0)
    counts = ledger.counts(0.0)
    assert (counts["bytes"], counts["retained_bytes"], counts["retained_steps"]) == (10, 20, 1)
    assert ordinals(lease(ledger, held=0)) == [3, 4]  # what is kept for a rewind does not count
    ledger.checkpointed(LEARNER, 1)
    ledger.checkpointed(LEARNER, 1)
    assert ledger.counts(0.0)["retained_bytes"] == 0
    with refused("step"):
        ledger.checkpointed(LEARNER, 2)


def test_a_stream_that_retains_nothing_forgets_at_once() -> None:
    ledger = opened(groups=1, retain=False)
    commit(ledger, *lease(ledger, held=0))
    train(ledger, 0)
    assert ledger.state.usage.gone == [0]
    assert (ledger.counts(0.0)["retained_steps"], ledger.state.steps.retained.floor) == (0, 1)


def test_the_feeder_is_asked_in_batches_and_refused_beyond_reason() -> None:
    ledger = opened(depth=8, staleness=3, tasks=8)
    assert ledger.room() == 0
    lease(ledger, held=0, most=3)
    assert ledger.room() == 0
    lease(ledger, held=0, most=1)
    assert ledger.room() == 4
    with refused("gap"):
        ledger.submit(9, 1)
    assert ledger.submit(0, 10) == 2  # 0 to 7 are known
    with refused("full"):
        ledger.submit(10, 1 << 20)


def test_more_depth_than_may_be_pending_wants_no_more_tasks_than_are_taken() -> None:
    ledger = opened(depth=4 * MAX_PENDING, staleness=None, window=None, tasks=0)
    assert ledger.room() == MAX_PENDING
    assert ledger.submit(0, ledger.room()) == MAX_PENDING


# ---------------------------------------------------------------------- leases


def test_an_expired_lease_is_fenced_and_its_task_leased_again() -> None:
    ledger = opened()
    (grant,) = lease(ledger, held=0, most=1, now=0.0)
    assert ledger.renew([(0, grant.epoch), (1, 5)], now=5.0) == [(1, 5)]
    assert ledger.expire(now=14.9) == []
    assert ledger.expire(now=15.1) == [0]
    with refused("fenced"):
        ledger.commit(0, grant.epoch, 1, 1, 0, 0)
    (again,) = lease(ledger, held=0, most=1, now=16.0)
    assert again.ordinal == 0
    assert again.epoch > grant.epoch
    with refused("fenced"):
        ledger.drop(0, grant.epoch, "late")
    ledger.give_back([(0, grant.epoch)])
    assert ledger.leases_of("w") == [(0, again.epoch)]
    assert ledger.counts(20.0)["oldest_lease_s"] == 4.0


def test_a_lease_of_the_queue_before_is_fenced_by_the_one_that_begins_at_its_checkpoint() -> None:
    """Both count their grants from where the checkpoint stood; only the lineage tells their leases apart."""
    before = opened()
    checkpoint = before.frontier(LEARNER)
    settings = before.state.settings
    assert settings is not None
    (old,) = lease(before, held=0, most=1)
    ledger = Ledger()
    ledger.open(settings, checkpoint)
    ledger.submit(0, 50)
    (new,) = lease(ledger, held=0, most=1)
    assert old.ordinal == new.ordinal
    with refused("fenced"):
        ledger.commit(old.ordinal, old.epoch, 1, 10, 0, 7)
    assert ledger.commit(new.ordinal, new.epoch, 1, 10, 0, 7)


def test_the_lease_of_one_task_is_worth_nothing_for_another() -> None:
    ledger = opened()
    one, other = lease(ledger, held=0, most=2)
    wrong = (other.ordinal, one.epoch)
    with refused("fenced"):
        ledger.drop(*wrong, "by mistake")
    with refused("fenced"):
        ledger.progress(*wrong, 3)
    with refused("fenced"):
        ledger.commit(*wrong, 1, 10, 0, 7)
    ledger.give_back([wrong])
    assert ledger.renew([wrong, (one.ordinal, one.epoch)], now=1.0) == [wrong]
    assert sorted(ledger.state.tasks.leased) == [0, 1]


def test_committing_twice_is_once_and_other_content_is_refused() -> None:
    ledger = opened()
    (grant,) = lease(ledger, held=0, most=1)
    assert ledger.commit(0, grant.epoch, 3, 10, 0, digest=7)
    assert not ledger.commit(0, grant.epoch, 3, 10, 0, digest=7)
    with refused("fenced"):
        ledger.commit(0, grant.epoch, 3, 10, 0, digest=8)
    assert ledger.counts(0.0)["bytes"] == 10


def test_what_is_reused_of_a_lost_lease_keeps_its_age() -> None:
    """B = 1, η = 2: ordinal 1 was begun under version 0 and is finished under 1; a token of version 0 is allowed."""
    ledger = opened(groups=1, staleness=2)
    first, lost, *_ = lease(ledger, held=0)
    ledger.progress(lost.ordinal, lost.epoch, 7)
    assert ledger.counts(0.0)["bytes"] == 7
    commit(ledger, first)
    train(ledger, 0)
    ledger.give_back([(lost.ordinal, lost.epoch)])
    with refused("fenced"):
        ledger.progress(lost.ordinal, lost.epoch, 8)
    (again,) = lease(ledger, held=1, most=1)
    assert (again.ordinal, ledger.state.tasks.records[1].held, ledger.state.tasks.records[1].progress) == (
        1,
        0,
        True,
    )
    with refused("full"):
        ledger.progress(again.ordinal, again.epoch, 1 << 40)
    commit(ledger, again, version=0)
    assert ledger.counts(0.0)["bytes"] == 10
    assert train(ledger, 1) == (1,)


def test_a_lease_without_progress_keeps_nothing_of_the_one_before() -> None:
    ledger = opened(groups=1, staleness=2)
    first, lost, *_ = lease(ledger, held=0)
    ledger.progress(lost.ordinal, lost.epoch, 7)
    ledger.progress(lost.ordinal, lost.epoch, 0)
    commit(ledger, first)
    train(ledger, 0)
    ledger.give_back([(lost.ordinal, lost.epoch)])
    (again,) = lease(ledger, held=1, most=1)
    with refused("stale"):
        commit(ledger, again, version=0)


def test_an_unbounded_stream_leases_by_version_alone_and_is_collected() -> None:
    ledger = opened(staleness=None, window=None, depth=4, tasks=0)
    ledger.submit(0, 3, min_version=2)
    assert lease(ledger, held=1) == []
    first, second, third = lease(ledger, held=2)
    commit(ledger, second, first)
    assert ledger.collect(LEARNER) == (0, 1)
    assert ledger.collect(LEARNER, got=[]) == (0, 1)  # nobody has said that they arrived
    commit(ledger, third, version=0)
    assert ledger.collect(LEARNER, got=[0, 1, 7]) == (2,)
    assert ledger.collect(LEARNER, got=[0, 1, 2]) == ()
    assert ledger.counts(0.0)["trained"] == 3
    with refused("bounded"):
        opened().collect(LEARNER)


# ---------------------------------------------------------------------- claims


def test_a_claim_is_the_same_for_all_ranks_and_when_asked_again() -> None:
    ledger = opened(groups=3, learners=2)
    grants = lease(ledger, held=0)
    commit(ledger, grants[0], grants[1])
    assert claim(ledger, 0, rank=1) == Claimed((1,), False, 2)
    commit(ledger, grants[2])
    assert claim(ledger, 0, rank=0) == Claimed((0,), False, 2)
    assert claim(ledger, 0, index=1, rank=1) == Claimed((), True, 3)
    assert claim(ledger, 0, index=1, rank=0) == Claimed((2,), True, 3)
    with refused("complete"):
        claim(ledger, 0, index=2)
    assert claim(ledger, 1) is None  # a rank that is ahead waits for trained
    assert ledger.trained(LEARNER, 0) == 1
    assert ledger.trained(LEARNER, 0) == 1
    with refused("trained"):
        claim(ledger, 0)
    with refused("malformed"):
        claim(ledger, 1, rank=2)


def test_a_whole_claim_waits_until_it_cannot_grow() -> None:
    """Groups of 40 tokens under 100: 2 does not fit, which fixes [0, 1]; [2] completes the step."""
    ledger = opened(groups=3)
    first, second, third = lease(ledger, held=0, most=3)
    commit(ledger, second, tokens=40)
    assert claim(ledger, 0, whole=True) is None
    commit(ledger, first, tokens=40)
    assert claim(ledger, 0, whole=True) is None
    commit(ledger, third, tokens=40)
    assert claim(ledger, 0, index=0, whole=True) == Claimed((0, 1), False, 2)
    assert claim(ledger, 0, index=1, whole=True) == Claimed((2,), True, 3)


@pytest.mark.parametrize("whole", [False, True])
def test_the_last_step_of_an_exhausted_stream_is_short(whole: bool) -> None:
    """B = 4 and 6 tasks: the second step has 2 groups, and there is no third."""
    ledger = opened(groups=4, staleness=1, tasks=6)
    commit(ledger, *lease(ledger, held=0))
    assert claim(ledger, 0, whole=whole) == Claimed((0, 1, 2, 3), True, 4)
    ledger.trained(LEARNER, 0)
    assert whole == (claim(ledger, 1, whole=whole) is None)  # the feeder may still bring more
    with refused("gap"):
        ledger.exhaust(5)
    ledger.exhaust(6)
    assert ledger.room() == 0
    index = 0 if whole else 1
    assert claim(ledger, 1, index, whole=whole) == Claimed((4, 5) if whole else (), True, 2)
    assert ledger.trained(LEARNER, 1) == 2
    with refused("exhausted"):
        claim(ledger, 2)


def test_an_empty_claim_ends_a_step_whose_last_task_was_dropped() -> None:
    ledger = opened(groups=4, tasks=2, learners=2)
    ledger.exhaust(2)
    first, second = lease(ledger, held=0)
    commit(ledger, first)
    assert claim(ledger, 0, rank=0) == Claimed((0,), False, 1)
    ledger.drop(second.ordinal, second.epoch, "reward")
    assert claim(ledger, 0, rank=1) == Claimed((), False, 1)  # as rank 0 was told
    assert claim(ledger, 0, index=1, rank=1) == claim(ledger, 0, index=1, rank=0) == Claimed((), True, 1)


def test_a_whole_claim_passes_over_dropped_tasks() -> None:
    ledger = opened(groups=2, staleness=1)
    first, second, third = lease(ledger, held=0, most=3)
    ledger.drop(second.ordinal, second.epoch, "reward")
    commit(ledger, first, third)
    assert claim(ledger, 0, whole=True) == Claimed((0, 2), True, 2)


def test_a_step_begun_anew_leaves_some_groups_out_and_takes_others() -> None:
    """B = 2: ordinal 1 cannot be read; it is dropped, 0 comes again, and 2 takes the free place."""
    ledger = opened(groups=2, staleness=1)
    commit(ledger, *lease(ledger, held=0))
    claimed = claim(ledger, 0)
    assert claimed == Claimed((0, 1), True, 2, attempt=0)
    with refused("unknown"):
        ledger.abandon(LEARNER, 0, 0, [2], "corrupt")
    assert ledger.abandon(LEARNER, 0, 0, [1], "corrupt") == 1
    assert ledger.abandon(LEARNER, 0, 0, [1], "corrupt") == 1
    with refused("abandoned"):
        ledger.claim(LEARNER, 0, 0, 0, 100, False, attempt=0)
    with refused("abandoned"):
        claim(ledger, 0, index=1)
    assert claim(ledger, 0) == Claimed((0, 2), True, 2, attempt=1)
    counts = ledger.counts(0.0)
    assert (counts["dropped_by_reason"], counts["ready"]) == ({"corrupt": 1}, 1)


# ---------------------------------------------------------------------- opening, rewinding, ending


def test_a_drain_lets_nothing_begin() -> None:
    """Of 50 tasks one is claimed, one ready, two leased: one of these is finished, the other lost."""
    ledger = opened(groups=1, staleness=3)
    first, second, third, fourth = lease(ledger, held=0)
    commit(ledger, first, second)
    claim(ledger, 0)
    assert ledger.drain() == 46
    assert ledger.drain() == 0
    assert (ledger.room(), ledger.submit(50, 4)) == (0, 0)
    ledger.give_back([(third.ordinal, third.epoch)])
    assert lease(ledger, held=0) == []
    commit(ledger, fourth)
    ledger.trained(LEARNER, 0)
    assert (train(ledger, 1), train(ledger, 2)) == ((1,), (3,))
    with refused("exhausted"):
        claim(ledger, 3)
    assert ledger.counts(0.0)["dropped_by_reason"] == {"drained": 47}


def test_a_task_whose_worker_dies_is_finished_though_the_stream_drains() -> None:
    """Two tasks are leased when the drain begins. One worker never renews: another one finishes its task."""
    ledger = opened(groups=2, staleness=1)
    first, second = lease(ledger, held=0, most=2)
    assert ledger.drain() == 48
    commit(ledger, first)
    assert ledger.expire(1e9) == [second.ordinal]
    assert ledger.drain() == 0
    (again,) = lease(ledger, held=0, most=9)
    assert again.ordinal == second.ordinal
    with refused("fenced"):
        commit(ledger, second)
    commit(ledger, again)
    assert train(ledger, 0) == (0, 1)
    counts = ledger.counts(0.0)
    assert counts["dropped_by_reason"] == {"drained": 48}
    assert counts["bias"]["no_length"] == 0
    with refused("exhausted"):
        claim(ledger, 1)


@pytest.mark.parametrize("epoch", [-1, 0])
def test_a_task_that_nobody_has_leased_cannot_be_committed(epoch: int) -> None:
    """Neither before its first lease nor after one that is over, with whatever digest."""
    ledger = opened(groups=2, staleness=1)
    for _ in range(2):
        for digest in (0, 1):
            with refused("fenced"):
                ledger.commit(0, epoch, 1, 10, 0, digest)
        ledger.give_back((grant.ordinal, grant.epoch) for grant in lease(ledger, held=0, most=1))
    assert ledger.counts(0.0)["ready"] == 0


def test_a_used_stream_is_occupied_and_a_rewind_fences_the_learner_before() -> None:
    ledger = opened(groups=1)
    settings = ledger.state.settings
    assert settings is not None
    ledger.open(settings, None)  # nothing was leased yet
    with refused("fenced"):
        ledger.frontier(1)
    commit(ledger, *lease(ledger, held=0, most=1))
    with refused("occupied"):
        ledger.open(settings, None)
    ledger.open(settings, ledger.frontier(2))
    assert (ledger.state.learner_epoch, ledger.state.lineage) == (3, 1)
    with refused("lineage"):
        ledger.lease("w", 0, 0, 1, 0.0)


def test_a_rewind_goes_back_to_the_last_trained_step() -> None:
    """B = 2, W = 3: 1 and 2 are trained, 3 was dropped; only 0 and 4 onward are wanted again."""
    ledger = opened(groups=2, staleness=2, window=3)
    _, one, two, three, *_ = lease(ledger, held=0)
    commit(ledger, one, two)
    assert train(ledger, 0) == (1, 2)
    ledger.drop(three.ordinal, three.epoch, "reward")
    frontier = Frontier.from_wire(ledger.frontier(LEARNER).to_wire())
    assert (frontier.frontier, frontier.kept, frontier.trained, frontier.dropped_ordinals) == (
        0,
        0,
        (1, 2),
        (3,),
    )
    settings = ledger.state.settings
    assert settings is not None

    fresh = Ledger()
    fresh.open(settings, frontier)
    assert (fresh.state.steps.version, fresh.state.tasks.next) == (1, 0)
    fresh.submit(0, 6)
    assert ordinals(lease(fresh, held=1)) == [0, 4, 5]
    assert fresh.counts(0.0)["dropped_by_reason"] == {"reward": 1}
    with pytest.raises(ValueError, match="format"):
        Frontier.from_wire({**frontier.to_wire(), "format": 99})
    with pytest.raises(ValueError, match="kept"):
        Frontier.from_wire(dataclasses.replace(frontier, kept=-1).to_wire())


def test_a_fork_takes_the_leases_of_the_abandoned_lineage_back() -> None:
    ledger = opened(staleness=None, window=None)
    (grant,) = lease(ledger, held=0, most=1)
    ledger.fork(2)
    with refused("fenced"):
        ledger.commit(0, grant.epoch, 1, 1, 0, 0)
    assert ordinals(lease(ledger, held=0, most=1)) == [0]


def test_the_end_drops_what_is_left_and_closes() -> None:
    ledger = opened(groups=1, tasks=4)
    commit(ledger, *lease(ledger, held=0, most=1))
    train(ledger, 0)
    lease(ledger, held=1, most=1)
    ledger.finish("done")
    ledger.finish("again")
    counts = ledger.counts(0.0)
    assert (counts["trained"], counts["dropped_by_reason"], counts["pending"]) == (1, {"end": 3}, 0)
    for request in (lambda: lease(ledger, held=1), lambda: claim(ledger, 1), ledger.room):
        with pytest.raises(RunClosedError, match="done"):
            request()


def test_finished_ordinals_are_forgotten() -> None:
    ledger = opened(groups=2, staleness=1, depth=4, tasks=0)
    for step in range(500):
        ledger.submit(ledger.state.tasks.next, 2)
        grants = lease(ledger, held=step, most=2)
        commit(ledger, *grants)
        train(ledger, step)
        ledger.checkpointed(LEARNER, step + 1)
    tasks, steps = ledger.state.tasks, ledger.state.steps
    kept = (
        tasks.records,
        tasks.ranks.trained,
        tasks.ranks.dropped,
        steps.retained.steps,
        len(steps.published),
    )
    assert kept == ({}, set(), [], {}, 1)
    assert (list(ledger.state.leases), holding(ledger.state)) == ([], set())
    assert ledger.counts(0.0)["trained"] == 1000


def test_the_bias_meter_compares_what_was_finished_with_what_was_trained() -> None:
    """Groups of 4, 5 and 64 tokens are finished and one is given up; only the short ones have been trained."""
    ledger = opened(groups=2, staleness=1)
    one, two, three, four = lease(ledger, held=0)
    for grant, tokens in ((one, 4), (two, 5), (three, 64)):
        commit(ledger, grant, tokens=tokens)
    ledger.drop(four.ordinal, four.epoch, "reward")
    train(ledger, 0)
    assert ledger.counts(0.0)["bias"] == {
        "distance": 0.5,
        "finished": {4: 2, 64: 1},
        "trained": {4: 2},
        "no_length": 1,
    }


def test_ranks_leave_the_dropped_out() -> None:
    ranks = OrdinalIndex()
    ranks.drop(2)
    assert [ranks.rank(o) for o in range(5)] == [0, 1, 2, 2, 3]
    ranks.train(0)
    ranks.train(3)
    assert (ranks.frontier, ranks.rank(1), ranks.rank(4)) == (1, 1, 3)
    ranks.train(1)
    assert (ranks.frontier, ranks.kept, ranks.rank(4), ranks.dropped) == (4, 3, 3, [])
    assert ranks.ended(2)
    assert not ranks.ended(4)
