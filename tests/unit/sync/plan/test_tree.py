from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.sync.plan.tree import (
    FANOUTS,
    MOST_ROOTS,
    ForestShape,
    Links,
    Member,
    assign,
    depths,
    leave,
    predict,
)

MB = 10**6
SLOW = Links(learner=100 * MB, member=100 * MB, local=1000 * MB, hop_s=0.0)
"""A learner with the uplink of one member."""


def alone(count: int, layout: str = "whole") -> list[Member]:
    """Each on a host of its own."""
    return [Member(f"g{i}", f"host{i}", layout) for i in range(count)]


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[Member], dict[str, int], int, Links]:
    hosts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=20))
    layouts = st.sampled_from(["a", "b"])
    members = [
        Member(f"g{host}.{i}", f"host{host}", draw(layouts)) for host, n in enumerate(hosts) for i in range(n)
    ]
    members = draw(st.permutations(members))
    sizes = {"a": draw(st.integers(0, 10**9)), "b": draw(st.integers(0, 10**7))}
    speed = st.sampled_from([10 * MB, 100 * MB, 10_000 * MB])
    links = Links(draw(speed), draw(speed), draw(speed))
    return members, sizes, draw(st.sampled_from([MB, 64 * MB])), links


@given(pools())
def test_every_member_hangs_below_the_learner_among_its_replicas(pool: tuple) -> None:
    members, sizes, bucket_bytes, links = pool
    parents = assign(*pool)
    assert parents == assign(*pool)
    assert parents.keys() == {member.who for member in members} == depths(parents).keys()
    layout = {member.who: member.layout for member in members}
    assert all(above is None or layout[above] == layout[who] for who, above in parents.items())
    children = Counter(above for above in parents.values() if above is not None)
    assert max(children.values(), default=0) <= max(FANOUTS) + MOST_ROOTS
    assert all(seconds >= 0 for seconds in predict(members, parents, sizes, bucket_bytes, links).values())


@given(pools())
def test_the_wire_to_a_host_is_crossed_once_for_each_layout(pool: tuple) -> None:
    members = pool[0]
    of = {member.who: member for member in members}
    came = Counter(
        (of[who].host, of[who].layout)
        for who, above in assign(*pool).items()
        if above is None or of[above].host != of[who].host
    )
    assert all(count == 1 for count in came.values())


@given(pools(), st.data(), st.integers(1, 3))
def test_who_leaves_moves_its_children_and_one_heir_with_its_own(
    pool: tuple, data: st.DataObject, fanout: int
) -> None:
    members = pool[0]
    gone = data.draw(st.sampled_from(members)).who
    before, left = assign(*pool, fanout), leave(members, gone)
    assert {member.who for member in left} == {member.who for member in members} - {gone}
    after = assign(left, *pool[1:], fanout)
    moved = sum(before[who] != above for who, above in after.items())
    assert moved <= 4 * fanout + 1
    assert max(depths(after).values(), default=0) <= max(depths(before).values())


@given(pools())
def test_who_joins_moves_nobody_while_the_shape_holds(pool: tuple) -> None:
    members = pool[0]
    before = assign(*pool, 2)
    after = assign([*members, Member("late", "late", "a")], *pool[1:], 2)
    assert {who: above for who, above in after.items() if who != "late"} == before


def test_the_shape_changes_only_with_the_order_of_magnitude() -> None:
    forests = [assign(alone(count), {"whole": 10**9}, MB, SLOW) for count in range(1, 129)]
    grew = [before.items() <= after.items() for before, after in pairwise(forests)]
    assert grew.count(False) <= 7


def test_places_of_a_forest_by_hand() -> None:
    shape = ForestShape(roots=2, fanout=3)
    assert [shape.parent(place) for place in range(10)] == [None, None, 0, 0, 0, 1, 1, 1, 2, 2]
    assert [shape.depth(count) for count in (0, 1, 2, 3, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_large_models_go_down_a_chain_and_small_ones_directly() -> None:
    eight = alone(8)
    chain = assign(eight, {"whole": 1000 * MB}, MB, SLOW)
    assert max(depths(chain).values()) == 8, "each edge carries the bytes once, at full speed"
    seconds = predict(eight, chain, {"whole": 1000 * MB}, MB, SLOW)
    assert seconds["g0"] == pytest.approx(10.0)
    assert seconds["g7"] == pytest.approx(10.0 + 7 * 0.01)
    star = dict.fromkeys(chain)
    assert predict(eight, star, {"whole": 1000 * MB}, MB, SLOW)["g7"] == pytest.approx(80.0)
    strong = Links(learner=800 * MB, member=100 * MB, local=1000 * MB)
    assert assign(eight, {"whole": 1000 * MB}, MB, strong) == star, (
        "the learner feeds all eight at full speed"
    )
    slow_hops = Links(learner=100 * MB, member=100 * MB, local=1000 * MB, hop_s=1.0)
    assert assign(eight, {"whole": MB}, MB, slow_hops) == star


def test_one_bucket_for_many_goes_down_a_tree() -> None:
    parents = assign(alone(64), {"whole": 10 * MB}, 10 * MB, SLOW)
    hops = max(depths(parents).values())
    assert 2 <= hops <= 6
    assert max(predict(alone(64), parents, {"whole": 10 * MB}, 10 * MB, SLOW).values()) < 64 * 0.1 / 4


def test_members_on_one_host_take_from_each_other() -> None:
    members = [Member(f"g{i}", f"host{i // 2}", "whole") for i in range(4)]
    parents = assign(members, {"whole": 1000 * MB}, MB, SLOW)
    assert parents == {"g0": None, "g1": "g0", "g2": "g0", "g3": "g2"}


def test_a_forced_fanout_is_kept() -> None:
    parents = assign(alone(7), {"whole": 1}, MB, SLOW, fanout=2)
    assert parents == {"g0": None, "g1": None, "g2": "g0", "g3": "g0", "g4": "g1", "g5": "g1", "g6": "g2"}


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="of one name"):
        assign([*alone(1), *alone(1)], {"whole": 1}, MB, SLOW)
    with pytest.raises(ValueError, match="above 0"):
        Links(0, 1, 1)
