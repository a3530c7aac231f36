from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharding import grid, sharded_models

from asyncrl.errors import WireError
from asyncrl.sync.layout.layout import Box, ParamLayout, from_wire, layout_bytes, to_wire, whole_layout

axis = st.tuples(st.integers(0, 5), st.integers(0, 5))


def mask(box: Box, size: int = 10) -> np.ndarray:
    cells = np.zeros((size,) * len(box.shape), bool)
    cells[box.slices()] = True
    return cells


def make_box(axes: list[tuple[int, int]]) -> Box:
    return Box(tuple(o for o, _ in axes), tuple(n for _, n in axes))


@given(st.lists(st.tuples(axis, axis), min_size=1, max_size=3))
def test_intersection_and_difference_are_those_of_sets(pairs: list) -> None:
    a, b = make_box([p for p, _ in pairs]), make_box([q for _, q in pairs])
    both = mask(a) & mask(b)
    common = a.intersection(b)
    assert np.array_equal(mask(common) if common else np.zeros_like(both), both)
    rest = sum(mask(part).astype(int) for part in a.minus(b)) + np.zeros_like(both, int)
    assert np.array_equal(rest, (mask(a) & ~mask(b)).astype(int)), "each left cell once"
    if b.elements:
        assert a.contains(b) == bool((mask(b) <= mask(a)).all())


def test_boxes_by_hand() -> None:
    box = Box((2, 1), (3, 4))
    assert (box.stops, box.elements) == ((5, 5), 12)
    assert box.intersection(Box((4, 0), (4, 3))) == Box((4, 1), (1, 2))
    assert box.intersection(Box((5, 0), (1, 9))) is None
    assert Box((3, 2), (1, 1)).within(box) == Box((1, 1), (1, 1))
    assert Box.whole(()).elements == 1
    assert grid((5, 2), (2, 1)) == [Box((0, 0), (2, 2)), Box((2, 0), (3, 2))]
    assert grid((1,), (3,)) == [Box((0,), (1,))], "no empty boxes"


@pytest.mark.parametrize(
    ("boxes", "dtype", "what"),
    [
        ((Box((0,), (5,)),), "float32", "no part"),
        ((Box((0, 0), (1, 1)),), "float32", "no part"),
        ((Box((0,), (2,)), Box((1,), (2,))), "float32", "overlap"),
        ((), "float33", "dtype"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(boxes: tuple[Box, ...], dtype: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        ParamLayout((4,), dtype, boxes)


def test_bytes_count_what_is_held() -> None:
    layout = {
        "a": ParamLayout((4, 2), "bfloat16", (Box((0, 0), (1, 2)), Box((3, 0), (1, 2)))),
        "b": ParamLayout((9,), "float32", ()),
    }
    assert layout_bytes(layout) == 4 * 2
    assert layout_bytes(whole_layout({"a": ((4, 2), "float32")})) == 32


@given(sharded_models())
def test_a_layout_survives_the_wire(model: tuple) -> None:
    for layout in (*model[0], model[1]):
        assert from_wire(to_wire(layout)) == layout


@pytest.mark.parametrize("value", [None, [], {"a": 1}, {"a": [[4], "float32", [[[0], ["4"]]]]}])
def test_what_is_no_layout_is_a_wire_error(value: object) -> None:
    if value == []:
        value = [1]
    with pytest.raises(WireError):
        from_wire(value)


def test_the_planner_imports_without_torch() -> None:
    imports = "asyncrl.sync.plan.cost_model, asyncrl.sync.layout.megatron"
    code = f"import sys; import {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
