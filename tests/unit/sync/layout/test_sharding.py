from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import WeightSyncError
from asyncrl.sync.layout.layout import Box, ParamLayout, are_disjoint, layout_bytes, whole_layout
from asyncrl.sync.layout.predicted_sharding import Heads, Plane, experts_of, mesh_layout, tensor_split
from asyncrl.sync.layout.sharding import Local, MeshLayout, RankMesh, Sharding, Split, chunk
from asyncrl.sync.plan.plan import Plans, plan

AXES = ("a", "b", "c")


@st.composite
def meshes(draw: st.DrawFn) -> MeshLayout:
    mesh = RankMesh(tuple((axis, draw(st.integers(1, 3))) for axis in AXES))
    params = {}
    for index in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
        axes = draw(st.permutations(AXES))[: draw(st.integers(0, 3))]
        at = tuple((axis, draw(st.integers(0, mesh.sizes[axis] - 1))) for axis in axes[:1]) * draw(
            st.booleans()
        )
        splits = []
        for axis in axes[len(at) :]:
            dim = draw(st.integers(0, len(shape) - 1))
            blocks = (
                (shape[dim] // 2, shape[dim] - shape[dim] // 2) if not splits and draw(st.booleans()) else ()
            )
            splits.append(Split((axis,), dim, blocks=blocks, parts=1 if draw(st.booleans()) else None))
        params[f"p{index}"] = Sharding(shape, "float32", tuple(splits), at)
    return MeshLayout(mesh, params)


@given(meshes())
def test_ranks_together_hold_every_element_equally_often(layout: MeshLayout) -> None:
    ranks = [layout.rank(rank) for rank in range(layout.mesh.ranks)]
    for name, sharding in layout.params.items():
        held = np.zeros(sharding.shape, int)
        for rank in ranks:
            for box in rank[name].boxes if name in rank else ():
                held[box.slices()] += 1
        assert held.min() == held.max() > 0
    assert layout.bytes_by_rank() == [layout_bytes(rank) for rank in ranks]


@given(meshes(), st.integers(16, 100))
def test_a_mesh_is_planned_like_the_layouts_of_its_ranks(layout: MeshLayout, bucket_bytes: int) -> None:
    ranks = [layout.rank(rank) for rank in range(layout.mesh.ranks)]
    needed = whole_layout({name: (s.shape, s.dtype) for name, s in layout.params.items()})
    assert plan(layout, needed, bucket_bytes) == plan(ranks, needed, bucket_bytes)


def test_a_mesh_counts_its_last_axis_first() -> None:
    mesh = RankMesh((("dp", 2), ("tp", 4)))
    assert mesh.ranks == 8
    assert mesh.coordinates(6) == {"dp": 1, "tp": 2}
    assert mesh.rank({"dp": 1, "tp": 2}) == 6
    assert mesh.unravel(("dp", "tp"), 6) == (("dp", 1), ("tp", 2))


@given(st.integers(0, 40), st.integers(1, 9))
def test_a_chunk_is_torchs(length: int, parts: int) -> None:
    pieces = [chunk(length, parts, index) for index in range(parts)]
    expected = [len(piece) for piece in torch.arange(length).chunk(parts)]
    assert [size for _, size in pieces if size] == [size for size in expected if size]
    assert sum(size for _, size in pieces) == length


def test_tensor_parallelism_comes_before_fsdp() -> None:
    rows = Sharding((10, 2), "float32", (Split(("tp",)), Split(("dp",))))
    mesh = RankMesh((("dp", 2), ("tp", 2)))
    layout = MeshLayout(mesh, {"w": rows})
    held = [layout.rank(rank)["w"].boxes for rank in range(4)]
    assert held == [
        (Box((0, 0), (3, 2)),),
        (Box((5, 0), (3, 2)),),
        (Box((3, 0), (2, 2)),),
        (Box((8, 0), (2, 2)),),
    ]


def test_packed_rows_are_cut_block_by_block_and_then_as_one() -> None:
    local = Local((Box.whole((8, 2)),)).chunk_blocks(0, (4, 4), parts=2, index=1)
    assert local.boxes == (Box((2, 0), (2, 2)), Box((6, 0), (2, 2)))
    assert local.chunk(0, 4, 1).boxes == (Box((3, 0), (1, 2)),)
    assert local.chunk(0, 2, 1).boxes == (Box((6, 0), (2, 2)),)
    assert local.chunk(1, 2, 1).boxes == (Box((2, 1), (2, 1)), Box((6, 1), (2, 1)))
    with pytest.raises(ValueError, match="add up"):
        local.chunk_blocks(0, (2, 2), 2, 0)


def test_few_key_heads_are_shared_by_neighbours() -> None:
    layout = MeshLayout(
        RankMesh((("tp", 4),)), {"k": Sharding((4, 2), "float32", (Split(("tp",), parts=2),))}
    )
    assert [layout.rank(rank)["k"].boxes[0].offsets[0] for rank in range(4)] == [0, 0, 2, 2]


def test_a_bad_mesh_names_the_parameter() -> None:
    mesh = RankMesh((("tp", 4),))
    for splits in ((Split(("dp",)),), (Split(("tp",)), Split(("tp",), 1)), (Split(("tp",), parts=3),)):
        with pytest.raises(ValueError, match="parameter w"):
            MeshLayout(mesh, {"w": Sharding((4, 4), "float32", splits)})


def test_shape_and_dtype_are_compared() -> None:
    layout = MeshLayout(RankMesh((("tp", 1),)), {"w": Sharding((4,), "float32")})
    for shape, dtype, what in (((5,), "float32", "shape"), ((4,), "bfloat16", "dtype")):
        with pytest.raises(WeightSyncError, match=f"parameter w: the generator needs {what}"):
            plan(layout, whole_layout({"w": (shape, dtype)}), 64)
    with pytest.raises(WeightSyncError, match="no learner rank holds"):
        plan(layout, whole_layout({"v": ((4,), "float32")}), 64)


def boxes(*numbers: tuple[int, int, int, int]) -> list[Box]:
    return [Box((a, b), (c, d)) for a, b, c, d in numbers]


def test_disjoint_boxes_by_hand() -> None:
    assert are_disjoint(boxes((0, 0, 2, 2), (0, 2, 2, 2), (2, 0, 9, 9)))
    assert not are_disjoint(boxes((0, 0, 2, 2), (1, 1, 1, 1)))
    assert not are_disjoint([Box((), ()), Box((), ())])


def test_overlapping_holders_share_what_they_both_have() -> None:
    whole = whole_layout({"w": ((100, 4), "float32")})
    half = {"w": ParamLayout((100, 4), "float32", (Box((0, 0), (50, 4)),))}
    made = plan([whole, half, half], whole, 160)
    assert [source.bytes for source in made.sources] == [800, 480, 320], "what only one has is counted first"


def test_a_plan_is_made_once_for_each_pair_of_layouts() -> None:
    plans = Plans(most=2)
    whole = whole_layout({"w": ((8, 2), "float32")})
    half = {"w": ParamLayout((8, 2), "float32", (Box((0, 0), (4, 2)),))}
    first = plans([half, whole], whole, 64)
    assert plans([dict(half), dict(whole)], dict(whole), 64) is first
    assert first == plan([half, whole], whole, 64)
    assert plans.made == 1
    plans([whole, half], whole, 64)
    assert plans([half, whole], whole, 64) is first
    plans([half, whole], half, 64)
    plans([whole, half], whole, 64)
    assert plans.made == 4, "the third pair drove the oldest out"


HEADS = Heads(query_rows=8, key_rows=4, key_heads=2)


@pytest.mark.parametrize(
    ("name", "shape", "split"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 6), Split(("tp",))),
        ("model.layers.0.self_attn.k_proj.bias", (4,), Split(("tp",), parts=2)),
        ("model.layers.0.self_attn.o_proj.weight", (6, 8), Split(("tp",), 1)),
        ("model.layers.0.self_attn.o_proj.bias", (6,), None),
        ("model.layers.0.self_attn.qkv_proj.weight", (16, 6), Split(("tp",), blocks=(8, 4, 4))),
        ("model.layers.0.mlp.gate_up_proj.weight", (8, 6), Split(("tp",), blocks=(4, 4))),
        ("model.layers.0.mlp.gate.weight", (4, 6), None),
        ("model.layers.0.input_layernorm.weight", (6,), None),
        ("transformer.h.0.attn.c_attn.weight", (6, 12), Split(("tp",), 1, blocks=(4, 4, 4))),
        ("transformer.h.0.attn.c_proj.weight", (4, 6), Split(("tp",), 0)),
        ("transformer.h.0.attn.c_proj.bias", (6,), None),
        ("transformer.h.0.mlp.c_fc.bias", (16,), Split(("tp",), 0)),
        ("lm_head.weight", (9, 6), Split(("tp",))),
        ("model.layers.1.block_sparse_moe.experts.3.w2.weight", (6, 8), Split(("tp",), 1)),
    ],
)
def test_how_names_are_cut(name: str, shape: tuple[int, ...], split: Split | None) -> None:
    assert tensor_split(name, shape, RankMesh((("tp", 4),)), ("tp",), HEADS) == split
    assert tensor_split(name, shape, RankMesh((("tp", 1),)), ("tp",), HEADS) is None


def test_experts_are_dealt_out_whole() -> None:
    shapes = {f"model.layers.0.mlp.experts.{e}.up_proj.weight": ((4, 2), "bfloat16") for e in range(4)}
    shapes["model.norm.weight"] = ((5,), "bfloat16")
    plane = Plane(fsdp=("dp", "ep"), ep=("ep",), expert_fsdp=("dp",))
    layout = mesh_layout(shapes, RankMesh((("dp", 2), ("ep", 2))), plane, HEADS)
    assert experts_of(shapes) == 4
    held = [{name: param.boxes[0] for name, param in layout.rank(rank).items()} for rank in range(4)]
    assert [len(rank) for rank in held] == [3, 3, 3, 2], (
        "five elements of the norm over four ranks: 2, 2, 1, 0"
    )
    assert held[3]["model.layers.0.mlp.experts.2.up_proj.weight"] == Box((2, 0), (2, 2))
    with pytest.raises(ValueError, match="4 experts cannot be dealt out evenly to 3"):
        mesh_layout(shapes, RankMesh((("ep", 3),)), Plane(ep=("ep",)), HEADS)


@pytest.mark.slow
def test_a_mixture_of_671_billion_from_512_ranks_to_8() -> None:
    """Shapes of DeepSeek V3 (arXiv 2412.19437, section 4.2), its experts alone: 58 layers of 256."""
    sizes = {"gate_proj": (2048, 7168), "up_proj": (2048, 7168), "down_proj": (7168, 2048)}
    shapes = {
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight": (size, "bfloat16")
        for layer in range(3, 61)
        for expert in range(256)
        for kind, size in sizes.items()
    }
    learner = mesh_layout(
        shapes,
        RankMesh((("replicate", 2), ("dp", 8), ("ep", 32))),
        Plane(fsdp=("dp", "ep"), ep=("ep",), expert_fsdp=("dp",)),
        HEADS,
    )
    generator = mesh_layout(shapes, RankMesh((("tp", 8),)), Plane(tp=("tp",), expert_tp=("tp",)), HEADS)
    sent = [0] * 512
    for rank in range(8):
        needed = generator.rank(rank)
        made = plan(learner, needed, 64 << 20)
        assert made.bytes == layout_bytes(needed)
        for source in made.sources:
            sent[source.rank] += source.bytes
    assert sum(sent) == sum(2 * math.prod(shape) for shape, _ in shapes.values())
    assert max(sent) <= 1.01 * sum(sent) / len(sent)
