from __future__ import annotations

from collections import Counter

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharding import sharded_models

from asyncrl.errors import WeightSyncError, WireError
from asyncrl.sync.layout.layout import ITEM_BYTES, Box, ParamLayout, layout_bytes, whole_layout
from asyncrl.sync.plan.plan import ALIGN, plan, source_from_wire, source_to_wire, split_box

buckets = st.integers(ALIGN, 300)


@given(sharded_models(), buckets)
def test_every_needed_byte_comes_exactly_once(model: tuple, bucket_bytes: int) -> None:
    sources, destination = model
    made = plan(sources, destination, bucket_bytes)
    for name, param in destination.items():
        needed, sent = np.zeros(param.shape, int), np.zeros(param.shape, int)
        for box in param.boxes:
            needed[box.slices()] += 1
        for source in made.sources:
            for piece in source.pieces:
                if piece.name == name:
                    sent[piece.box.slices()] += 1
        assert np.array_equal(needed, sent)
    assert made.bytes == layout_bytes(destination)


@given(sharded_models(), buckets)
def test_pieces_lie_in_one_box_of_both_sides_and_fit_their_bucket(model: tuple, bucket_bytes: int) -> None:
    sources, destination = model
    for source in plan(sources, destination, bucket_bytes).sources:
        for bucket in source.buckets:
            assert 0 < bucket.length <= bucket_bytes
            end = 0
            for piece in bucket.pieces:
                held, needed = sources[source.rank][piece.name], destination[piece.name]
                assert any(box.contains(piece.box) for box in held.boxes)
                assert any(box.contains(piece.box) for box in needed.boxes)
                assert piece.at >= end
                assert piece.at % ALIGN == 0
                assert piece.bytes == piece.box.elements * ITEM_BYTES[needed.dtype]
                end = piece.at + piece.bytes


@given(sharded_models(), buckets)
def test_a_plan_is_deterministic_and_survives_the_wire(model: tuple, bucket_bytes: int) -> None:
    sources, destination = model
    made = plan(sources, destination, bucket_bytes)
    assert plan(sources, dict(reversed(destination.items())), bucket_bytes) == made
    for source in made.sources:
        wire = msgpack.unpackb(msgpack.packb(source_to_wire(source)))
        assert source_from_wire(wire, source.rank, sources[source.rank]) == source


@given(st.data(), buckets)
def test_holders_may_overlap_in_any_way(data: st.DataObject, bucket_bytes: int) -> None:
    cuts = st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 3), st.integers(1, 4))
    whole = whole_layout({"w": ((6, 4), "int16")})
    sources = [whole]
    for a, b, c, d in data.draw(st.lists(cuts, max_size=5)):
        box = Box((a, c), (6 - a, 4 - c)).intersection(Box((0, 0), (b, d)))
        sources.append({"w": ParamLayout((6, 4), "int16", (box,) if box else ())})
    made = plan(data.draw(st.permutations(sources)), whole, bucket_bytes)
    sent = np.zeros((6, 4), int)
    for source in made.sources:
        for piece in source.pieces:
            sent[piece.box.slices()] += 1
    assert (sent == 1).all()


def test_replicas_share_the_load_also_of_one_large_parameter() -> None:
    whole = whole_layout({"large": ((100, 10), "float32"), "small": ((40,), "float32")})
    made = plan([whole] * 4, whole, 400)
    by_rank = {source.rank: source.bytes for source in made.sources}
    assert sum(by_rank.values()) == 4160
    assert max(by_rank.values()) - min(by_rank.values()) <= 400, "within one bucket of each other"


def test_small_pieces_are_packed_and_large_ones_travel_alone() -> None:
    layout = whole_layout({f"norm{i}": ((4,), "float32") for i in range(8)} | {"w": ((50, 20), "float32")})
    (source,) = plan([layout], layout, 1024).sources
    sizes = Counter(len(bucket.pieces) for bucket in source.buckets)
    assert sizes == {8: 1, 1: 5}
    rows = [piece.box.shape for piece in source.pieces if piece.name == "w"]
    assert sorted(rows) == [(2, 20), *[(12, 20)] * 4]


def test_split_goes_down_to_the_axis_that_fits() -> None:
    assert list(split_box(Box((0, 0), (2, 4)), 3)) == [
        Box((0, 0), (1, 3)),
        Box((0, 3), (1, 1)),
        Box((1, 0), (1, 3)),
        Box((1, 3), (1, 1)),
    ]
    assert list(split_box(Box((0, 0), (0, 4)), 3)) == []
    assert list(split_box(Box.whole(()), 1)) == [Box.whole(())]


def test_errors_name_the_parameter() -> None:
    needed = whole_layout({"layer.weight": ((4, 4), "float32")})
    half = {"layer.weight": ParamLayout((4, 4), "float32", (Box((0, 0), (2, 4)),))}
    with pytest.raises(WeightSyncError, match=r"layer.weight: no learner rank holds offsets \(2, 0\)"):
        plan([half], needed, 64)
    with pytest.raises(WeightSyncError, match=r"layer.weight: no learner rank"):
        plan([{}], needed, 64)
    with pytest.raises(WeightSyncError, match=r"needs dtype float32, learner rank 1 has bfloat16"):
        plan([half, whole_layout({"layer.weight": ((4, 4), "bfloat16")})], needed, 64)
    with pytest.raises(WeightSyncError, match=r"needs shape \(4, 4\), learner rank 0 has \(4, 5\)"):
        plan([whole_layout({"layer.weight": ((4, 5), "float32")})], needed, 64)


@pytest.mark.parametrize(
    "wire",
    [
        None,
        [[]],
        [[["other", [0], [4], 0]]],
        [[["w", [2], [4], 0]]],
        [[["w", [0], [4], 3]]],
        [[["w", [0], [8], 0], ["w", [0], [4], 16]]],
        [[["w", [-1], [4], 0]]],
    ],
)
def test_a_rank_refuses_to_send_what_it_does_not_hold(wire: object) -> None:
    layout = {"w": ParamLayout((8,), "float32", (Box((0,), (4,)),))}
    with pytest.raises(WireError, match="learner rank 3"):
        source_from_wire(wire, 3, layout)
