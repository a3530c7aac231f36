"""Sharing a claim's groups out over ranks: within the tokens that fit, level in cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from ledger_driver import DrivenLedger as Ledger

from asyncrl.queue.ledger.claims import GroupCost, dearest, share_out
from asyncrl.queue.protocol.settings import StreamSettings

GROUPS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), max_size=24)


def even(*tokens: int) -> list[GroupCost]:
    return [GroupCost(n, n) for n in tokens]


def loads_of(groups: list[tuple[int, int]]) -> list[GroupCost]:
    return [GroupCost(tokens, tokens + extra) for tokens, extra in groups]


def test_shares_go_to_the_lightest_rank() -> None:
    assert share_out(even(50, 10, 10, 10), ranks=2, max_tokens=100) == [0, 1, 1, 1]
    assert share_out(even(4, 4, 4), ranks=2, max_tokens=7) == [0, 1]
    assert share_out(even(9, 1), ranks=1, max_tokens=5) == [0]  # too large for anyone: alone
    assert share_out(even(1, 9), ranks=1, max_tokens=5) == [0]
    assert share_out([], ranks=2, max_tokens=5) == []


def test_one_long_rollout_weighs_more_than_many_short_ones_of_as_many_tokens() -> None:
    settings = StreamSettings(4, 1, 1, 8, 1 << 20, 1.0, even_tokens=50)
    long, short = GroupCost(100, settings.cost(100, 100**2)), GroupCost(100, settings.cost(100, 10 * 10**2))
    assert (long.cost, short.cost) == (300, 120)
    assert share_out([long, short, long, short], 2, 1000) == [0, 1, 1, 0]
    assert share_out([long, short, short], 2, 1000) == [0, 1, 1]


@given(GROUPS, st.integers(1, 4), st.integers(1, 120))
def test_a_prefix_is_shared_out_and_no_rank_gets_more_than_fits(
    groups: list[tuple[int, int]], ranks: int, most: int
) -> None:
    loads = loads_of(groups)
    homes = share_out(loads, ranks, most)
    assert len(homes) <= len(loads)
    assert bool(homes) == bool(loads)
    for rank in range(ranks):
        mine = [load.tokens for load, home in zip(loads, homes, strict=False) if home == rank]
        assert sum(mine) <= most or len(mine) == 1


@given(GROUPS, st.integers(1, 4))
def test_where_all_fits_no_rank_is_much_dearer_than_another(
    groups: list[tuple[int, int]], ranks: int
) -> None:
    """Graham 1966: a rank has at most the mean and the largest item that it could not have avoided."""
    loads = loads_of(groups)
    homes = share_out(loads, ranks, max_tokens=1 << 20)
    assert len(homes) == len(loads)
    costs = [load.cost for load in loads]
    bound = sum(costs) / ranks + (1 - 1 / ranks) * max(costs, default=0)
    assert dearest(loads, homes, ranks) <= bound + 1e-9


@given(GROUPS, st.integers(1, 60))
def test_one_rank_takes_the_prefix_by_tokens_alone(groups: list[tuple[int, int]], most: int) -> None:
    """What a claim holds at `max_staleness: 0` does not hang on what things cost."""
    by_cost = share_out(loads_of(groups), 1, most)
    assert by_cost == share_out(even(*(tokens for tokens, _ in groups)), 1, most)


def test_a_ledger_shares_by_the_squares_that_commits_tell() -> None:
    ledger, learner = Ledger(), 1
    ledger.open(StreamSettings(4, 0, 1, 8, 1 << 20, 1.0, learners=2, even_tokens=50), None)
    ledger.submit(0, 4)
    grants = ledger.lease("w", 0, 0, 4, 0.0)
    for grant, squares in zip(grants, (100**2, 1000, 1000, 1000), strict=True):
        ledger.commit(grant.ordinal, grant.epoch, 100, 10, 0, grant.ordinal, squares=squares)
    shares = [ledger.claim(learner, 0, 0, rank, 1000, True) for rank in (0, 1)]
    assert [share and share.ordinals for share in shares] == [(0,), (1, 2, 3)]
    assert [ledger.claim(learner, 0, 0, rank, 1000, True) for rank in (0, 1)] == shares
