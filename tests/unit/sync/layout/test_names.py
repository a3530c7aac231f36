from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from sharding import grid

from asyncrl.sync.layout.layout import Box, Layout, ParamLayout
from asyncrl.sync.layout.names import Fused, Names, checkpoint_layout

QWEN = Names(
    (
        Fused("mlp.experts.gate_up_proj", ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight")),
        Fused("mlp.experts.down_proj", ("mlp.experts.*.down_proj.weight",)),
    )
)
MIXTRAL = Names(
    (Fused(".experts.gate_up_proj", (".experts.*.w1.weight", ".experts.*.w3.weight")),),
    ((".mlp.", ".block_sparse_moe."),),
)


def fused(boxes: tuple[Box, ...]) -> Layout:
    return {"model.layers.0.mlp.experts.gate_up_proj": ParamLayout((4, 6, 2), "float32", boxes)}


@given(st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 2)), st.data())
def test_each_view_is_its_box_of_the_expert(parts: tuple[int, int, int], data: st.DataObject) -> None:
    full = torch.arange(48.0).view(4, 6, 2)
    boxes = tuple(data.draw(st.lists(st.sampled_from(grid((4, 6, 2), parts)), unique=True)))
    layout, views = checkpoint_layout(fused(boxes), QWEN)
    assert sum(param.elements for param in layout.values()) == sum(box.elements for box in boxes)
    for name, param in layout.items():
        *_, expert, kind, _ = name.split(".")
        there = full[int(expert)].chunk(2)[["gate_proj", "up_proj"].index(kind)]
        for box, (inside, view) in zip(param.boxes, views[name], strict=True):
            assert inside == "model.layers.0.mlp.experts.gate_up_proj"
            local = full[boxes[view.part].slices()]
            assert torch.equal(local[view.index], there[box.slices()])


def test_families_by_hand() -> None:
    whole, _ = checkpoint_layout(fused((Box.whole((4, 6, 2)),)), MIXTRAL)
    assert list(whole)[:3] == [
        "model.layers.0.block_sparse_moe.experts.0.w1.weight",
        "model.layers.0.block_sparse_moe.experts.0.w3.weight",
        "model.layers.0.block_sparse_moe.experts.1.w1.weight",
    ]
    assert whole["model.layers.0.block_sparse_moe.experts.3.w3.weight"].shape == (3, 2)


def test_other_parameters_stay_as_they_are() -> None:
    layout = {
        "a.b": ParamLayout((4, 2), "float32", (Box((1, 0), (2, 2)),)),
        "c": ParamLayout((1,), "float32", ()),
    }
    renamed, views = checkpoint_layout(layout, QWEN)
    assert renamed == {"a.b": layout["a.b"]}, "nothing is held of c"
    assert views["a.b"][0][1].index == ()
