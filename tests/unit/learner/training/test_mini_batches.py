"""Which groups make up each optimizer step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.learner.training.version_step import mini_batches

ORDINALS = st.sets(st.integers(0, 1 << 40), min_size=1, max_size=30)


@given(ORDINALS, st.integers(1, 8), st.integers(1, 3), st.integers(0, 99), st.integers(0, 99))
def test_every_epoch_takes_each_group_once(
    ordinals: set[int], parts: int, epochs: int, seed: int, version: int
) -> None:
    steps = mini_batches(ordinals, parts, epochs, seed, version)
    a_pass = min(parts, len(ordinals))
    assert len(steps) == epochs * a_pass
    for epoch in range(epochs):
        slices = steps[epoch * a_pass : (epoch + 1) * a_pass]
        assert sorted(ordinal for each in slices for ordinal in each) == sorted(ordinals)
        sizes = [len(each) for each in slices]
        assert max(sizes) - min(sizes) <= 1


@given(ORDINALS, st.integers(2, 5), st.randoms())
def test_the_order_in_which_ranks_name_their_groups_does_not_matter(
    ordinals: set[int], parts: int, random: object
) -> None:
    shuffled = list(ordinals)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert mini_batches(shuffled, parts, 2, 0, 3) == mini_batches(sorted(ordinals), parts, 2, 0, 3)


def test_seed_version_and_epoch_make_orders_of_their_own() -> None:
    def order(seed: int, version: int, epoch: int) -> tuple[int, ...]:
        return tuple(mini_batches(range(20), 20, 2, seed, version)[20 * epoch + i][0] for i in range(20))

    orders = {order(seed, version, epoch) for seed in (0, 1) for version in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 8


def test_one_slice_keeps_the_order_of_the_ordinals() -> None:
    assert mini_batches([7, 5, 6], 1, 2, 0, 0) == [[5, 6, 7], [5, 6, 7]]
