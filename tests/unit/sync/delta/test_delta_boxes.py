from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from sharding import grid, same_bits

from asyncrl.sync.delta.delta import Changes, add, cut, find_changes, in_order
from asyncrl.sync.layout.layout import Box


@st.composite
def parts(draw: st.DrawFn) -> tuple[list[Box], Box]:
    """(tiles of a parameter, a box of it)."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    lows = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - low)) for size, low in zip(shape, lows, strict=True)]
    tiles = draw(st.permutations(grid(shape, tuple(draw(st.integers(1, 3)) for _ in shape))))
    return tiles, Box(tuple(lows), tuple(sizes))


@given(parts(), st.sampled_from([0.0, 0.1, 0.4, 0.7, 1.0]), st.integers(0, 99))
def test_the_changes_of_a_part_are_those_of_the_tiles_it_lies_in(
    boxes: tuple[list[Box], Box], share: float, seed: int
) -> None:
    tiles, part = boxes
    shape = tuple(max(tile.stops[axis] for tile in tiles) for axis in range(len(part.shape)))
    random = torch.Generator().manual_seed(seed)
    old = torch.randint(0, 1000, shape, generator=random, dtype=torch.int16)
    new = old + (torch.rand(shape, generator=random) < share).to(torch.int16)
    changes = cut([(tile, find_changes(old[tile.slices()], new[tile.slices()])) for tile in tiles], part)
    staged = old[part.slices()].clone()
    add(staged, changes)
    assert same_bits(staged, new[part.slices()])
    assert (changes.positions is None) == (2 * len(changes.steps) >= part.elements)
    if changes.positions is not None:
        assert bool((changes.positions.diff() > 0).all())


def test_by_hand() -> None:
    """. a . .
    . . b c       the part has b and c of both tiles, in its own rows of two
    . . d .
    """
    steps = torch.tensor([1, 2, 3, 4], dtype=torch.int8)
    left = Box((0, 0), (3, 2)), Changes(torch.tensor([1]), steps[:1])
    right = Box((0, 2), (3, 2)), Changes(torch.tensor([2, 3, 4]), steps[1:])
    changes = cut([left, right], Box((1, 1), (2, 3)))
    assert changes.positions is None
    assert changes.steps.view(2, 3).tolist() == [[0, 2, 3], [0, 4, 0]]
    changes = cut([left, right], Box((0, 0), (2, 4)))
    assert changes.positions is not None
    assert (changes.positions.tolist(), changes.steps.tolist()) == ([1, 6, 7], [1, 2, 3])
    changes = cut([right, left], Box((0, 1), (3, 3)))  # with gaps in both tiles and in the part
    assert changes.positions is not None
    assert (changes.positions.tolist(), changes.steps.tolist()) == ([0, 4, 5, 7], [1, 2, 3, 4])


def test_rows_lie_one_after_another_and_columns_do_not() -> None:
    rows = [Box((0, 0), (1, 4)), Box((1, 0), (2, 4))]
    assert in_order(rows, Box((0, 0), (3, 4)))
    assert not in_order(rows[::-1], Box((0, 0), (3, 4)))
    assert not in_order(rows[:1], Box((0, 0), (3, 4)))
    assert not in_order([Box((0, 0), (3, 2)), Box((0, 2), (3, 2))], Box((0, 0), (3, 4)))
    assert in_order([Box((0, 1), (1, 2)), Box((1, 1), (2, 2))], Box((0, 1), (3, 2)))
