from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.tasks import stream
from asyncrl.tasks.stream import Order, part_of, shuffled


@given(size=st.integers(1, 400), key=st.tuples(st.integers(0), st.integers(0)))
def test_an_order_has_every_place_once(size: int, key: tuple[int, int]) -> None:
    assert sorted(shuffled(place, size, key) for place in range(size)) == list(range(size))


@given(size=st.integers(1, 10**12), place=st.integers(0))
def test_any_place_of_any_size_is_known_at_once(size: int, place: int) -> None:
    assert 0 <= shuffled(place % size, size, (0, 0)) < size


@pytest.mark.parametrize("size", [2, 3, 5, 10])
def test_every_place_gets_every_row_equally_often(size: int) -> None:
    orders = 4000
    seen = Counter(
        (place, shuffled(place, size, (0, epoch))) for epoch in range(orders) for place in range(size)
    )
    mean = orders / size
    # χ² of size² counts with (size − 1)² degrees of freedom: 5 standard deviations above its mean.
    chi2 = sum((seen[place, row] - mean) ** 2 / mean for place in range(size) for row in range(size))
    freedom = (size - 1) ** 2
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


def test_neighbours_of_one_order_are_none_of_the_next() -> None:
    size = 1000
    follows = Counter(
        (shuffled(p + 1, size, (0, 1)) - shuffled(p, size, (0, 1))) % size for p in range(size - 1)
    )
    assert max(follows.values()) < 10


@pytest.mark.parametrize("listed", [100, 10])
def test_an_order_is_the_same_whenever_it_is_asked_for(listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LISTED", listed)
    one, other = Order(50, (3,)), Order(50, (3,))
    there = [one.at(epoch, place) for epoch in range(3) for place in range(50)]
    back = [other.at(epoch, place) for epoch in reversed(range(3)) for place in reversed(range(50))]
    assert there == back[::-1]
    epochs = [there[:50], there[50:100], there[100:]]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert there != [Order(50, (4,)).at(epoch, place) for epoch in range(3) for place in range(50)]


def test_an_epoch_of_very_many_rows_is_never_listed() -> None:
    assert 0 <= Order(10**15, (0,)).at(7, 10**14) < 10**15


shares = st.lists(st.integers(1, 50), min_size=1, max_size=6).map(
    lambda weights: [Fraction(weight, sum(weights)) for weight in weights]
)


@given(shares=shares, start=st.integers(0, 10**9))
def test_each_part_counts_its_own_tasks_and_keeps_its_share(shares: list[Fraction], start: int) -> None:
    firsts: dict[int, int] = {}
    counts: Counter[int] = Counter()
    for ordinal in range(start, start + 120):
        part, at = part_of(ordinal, shares)
        firsts.setdefault(part, at)
        assert at == firsts[part] + counts[part]
        counts[part] += 1
        assert abs(at - ordinal * shares[part]) <= len(shares)


def test_two_to_one() -> None:
    assert [part_of(t, [Fraction(2, 3), Fraction(1, 3)])[0] for t in range(6)] == [1, 0, 0, 1, 0, 0]
