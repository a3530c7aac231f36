"""Columns and stages in the ledger, worked by hand."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict

import msgspec
import pytest
from ledger_driver import DrivenLedger as Ledger
from ledger_driver import ordinals

from asyncrl.errors import RefusedError
from asyncrl.queue.ledger.generator_commands import Grant
from asyncrl.queue.ledger.learner_commands import Claimed
from asyncrl.queue.protocol.settings import StageSettings, StreamSettings

REWARD, CRITIC = (
    StageSettings("reward", adds=("rewards",)),
    StageSettings("critic", needs=("rewards",), adds=("values",)),
)
STREAM = StreamSettings(
    groups_per_version=2,
    max_staleness=1,
    window=1,
    depth=4,
    max_bytes=1 << 30,
    lease_s=10.0,
    columns=("values",),
    stages=(REWARD, CRITIC),
)


def made(stream: StreamSettings = STREAM, groups: int = 2, columns: tuple[str, ...] = ()) -> Ledger:
    """Ordinals 0, 1, … are committed; there are tasks up to 8."""
    ledger = Ledger()
    ledger.open(stream, None)
    ledger.submit(0, 8)
    for grant in ledger.lease("w", 0, 0, groups, 0.0):
        ledger.commit(grant.ordinal, grant.epoch, 5, 10, 0, 7, columns)
    return ledger


def staged(ledger: Ledger, stage: str, most: int = 9, now: float = 0.0) -> list[Grant]:
    return ledger.stage_lease(stage, "s", most, now)


def finish(ledger: Ledger, stage: str, *grants: Grant, nbytes: int = 4) -> None:
    for grant in grants:
        assert ledger.stage_commit(stage, grant.ordinal, grant.epoch, nbytes, 3, digest=grant.ordinal)


def claim(ledger: Ledger, index: int = 0) -> Claimed | None:
    return ledger.claim(ledger.state.learner_epoch, ledger.state.steps.version, index, 0, 100, False)


def fenced() -> object:
    return pytest.raises(RefusedError, match=r"^fenced")


def test_a_claim_waits_for_the_columns_that_it_needs() -> None:
    ledger = made()
    assert (claim(ledger), staged(ledger, "critic")) == (None, [])
    first, second = staged(ledger, "reward")
    finish(ledger, "reward", second)
    (valued,) = staged(ledger, "critic")
    finish(ledger, "critic", valued)
    counts = ledger.counts(0.0)
    assert (counts["ready"], counts["lacking_columns"], counts["bytes"]) == (1, 1, 28)
    assert claim(ledger) is None  # strict order: 0 is the head
    finish(ledger, "reward", first)
    finish(ledger, "critic", *staged(ledger, "critic"))
    assert claim(ledger) == Claimed((0, 1), True, 2)
    assert ledger.state.tasks.records[0].added["critic"].version == 3


def test_committing_a_column_twice_is_once() -> None:
    ledger = made()
    one, two = staged(ledger, "reward")
    finish(ledger, "reward", one)
    assert not ledger.stage_commit("reward", one.ordinal, one.epoch, 4, 3, digest=one.ordinal)
    for wrong in ({"digest": 9}, {"epoch": two.epoch}, {"stage": "critic"}):
        right = {"stage": "reward", "ordinal": 0, "epoch": one.epoch, "nbytes": 4, "version": 3, "digest": 0}
        with fenced():
            ledger.stage_commit(**{**right, **wrong})
    assert ledger.counts(0.0)["bytes"] == 24


def test_stage_leases_expire_and_are_renewed_with_the_others() -> None:
    ledger = made()
    one, two = staged(ledger, "reward")
    assert ledger.renew([(0, one.epoch), (1, two.epoch + 1)], now=5.0) == [(1, two.epoch + 1)]
    assert ledger.expire(now=11.0) == [1]
    assert ordinals(staged(ledger, "reward", now=11.0)) == [1]
    ledger.give_back([(0, one.epoch)])
    assert ordinals(staged(ledger, "reward", now=11.0)) == [0]
    with fenced():
        ledger.stage_commit("reward", 0, one.epoch, 1, 0, 0)
    assert ledger.leases_of("s") == [(0, ledger.state.tasks.records[0].staging["reward"]), (1, two.epoch + 1)]


def test_a_stage_may_give_a_group_up() -> None:
    ledger = made()
    one, _ = staged(ledger, "reward")
    with fenced():
        ledger.drop(one.ordinal, one.epoch, "unscored")  # not the lease of the task
    ledger.stage_drop("reward", one.ordinal, one.epoch, "unscored")
    with fenced():
        ledger.stage_drop("reward", one.ordinal, one.epoch, "unscored")
    counts = ledger.counts(0.0)
    assert (counts["dropped_by_reason"], counts["bytes"], ledger.state.usage.gone) == (
        {"unscored": 1},
        10,
        [0],
    )


def test_a_generator_may_bring_the_columns_itself() -> None:
    ledger = made(columns=("rewards",))
    assert staged(ledger, "reward") == []
    assert ordinals(staged(ledger, "critic")) == [0, 1]


def test_a_group_that_is_claimed_before_a_stage_that_nobody_needs_leaves_it() -> None:
    """The critic is slow, and values are not asked for: its lease is over with the claim."""
    ledger = made(dataclasses.replace(STREAM, columns=("rewards",)), columns=("rewards",))
    one, two = staged(ledger, "critic")
    assert claim(ledger) == Claimed((0, 1), True, 2)
    assert ledger.renew([(0, one.epoch), (1, two.epoch)], now=1.0) == [(0, one.epoch), (1, two.epoch)]
    with fenced():
        finish(ledger, "critic", one)
    assert ledger.counts(0.0)["stages"]["critic"] == {"waiting": 0, "leased": 0}


def test_a_rewind_voids_stage_leases_and_keeps_columns() -> None:
    ledger = made()
    start = ledger.frontier(1)
    one, two = staged(ledger, "reward")
    finish(ledger, "reward", one)
    ledger.open(STREAM, start)
    with fenced():
        finish(ledger, "reward", two)
    assert (ordinals(staged(ledger, "reward")), ordinals(staged(ledger, "critic"))) == ([1], [0])


def test_room_is_kept_for_columns_to_come() -> None:
    """Groups weigh 10 and columns 20: one ready that lacks its columns counts as 30, and a fourth does not fit."""
    stream = dataclasses.replace(
        STREAM, groups_per_version=1, max_staleness=3, max_bytes=95, stages=(REWARD,), columns=("rewards",)
    )
    ledger = made(stream, groups=1)
    finish(ledger, "reward", *staged(ledger, "reward"), nbytes=20)
    (second,) = ledger.lease("w", 0, 0, 1, 0.0)
    ledger.commit(second.ordinal, second.epoch, 5, 10, 0, 7)
    counts = ledger.counts(0.0)
    assert (counts["bytes"], counts["reserved_bytes"]) == (40, 20)
    assert ordinals(ledger.lease("w", 0, 0, 9, 0.0)) == [2]
    assert ledger.counts(0.0)["reserved_bytes"] == 50


def test_a_stage_that_is_not_there_is_named() -> None:
    with pytest.raises(RefusedError, match="unknown_stage: 'judge'; this stream has: reward, critic"):
        staged(made(), "judge")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"stages": (REWARD, StageSettings("reward", adds=("x",)))}, "none twice"),
        ({"stages": (REWARD, StageSettings("judge", adds=("rewards",)))}, "columns added by stages"),
        ({"columns": ("",)}, "no name"),
        ({"wait_share": 1.0}, "between 0 and 1"),
        ({"wait_share": 0.1, "max_staleness": None, "window": None}, "bounded stream"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        dataclasses.replace(STREAM, **changes)
    with pytest.raises(ValueError, match="adds nothing"):
        StageSettings("idle")


def test_settings_travel_and_bad_ones_are_found() -> None:
    wire = {**asdict(STREAM), "wait_share": None}
    as_lists = {**wire, "columns": list(wire["columns"]), "stages": list(wire["stages"])}
    assert msgspec.convert(as_lists, StreamSettings) == STREAM
    bad = [{"stages": [{"name": "x"}]}, {"stages": [1]}, {"columns": [1]}, {"retain": 1}]
    bad += [{"stages": [{"name": "x", "needs": [], "adds": [[]]}]}, {"columns": "ab"}]
    for change in bad:
        with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
            msgspec.convert({**wire, **change}, StreamSettings)
