"""Boxes of DTensors: by hand, and of four gloo processes against the whole tensors they were cut from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from asyncrl.config.schema import Config
from asyncrl.learner.backends.dtensor_layout import layout_of_dtensors, placed
from asyncrl.learner.ranks.process_group import join_process_group
from asyncrl.sync.layout.layout import Box, from_wire, to_wire
from asyncrl.sync.layout.names import Fused, Names
from asyncrl.sync.layout.sharding import Local
from asyncrl.sync.tensors.shards import Shards

NAMES = Names((Fused("experts.gate_up_proj", ("experts.*.gate_proj.weight", "experts.*.up_proj.weight")),))


class Network(nn.Module):
    """Every element its own number. Uneven for two and four ranks; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.column = nn.Linear(6, 10)
        self.row = nn.Linear(10, 6, bias=False)
        self.scale = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.experts = Experts()
        for number, (_, parameter) in enumerate(self.named_parameters()):
            count = torch.arange(parameter.numel(), dtype=torch.float32)
            parameter.data.copy_((1000 * number + count).view(parameter.shape))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(3, 8, 2))
        self.packed = nn.Parameter(torch.zeros(12, 2))


def cut(network: Network, mesh: DeviceMesh, way: str) -> None:
    if way != "fsdp":
        tp = mesh["tp"]
        parallelize_module(network, tp, {"column": ColwiseParallel(), "row": RowwiseParallel()})
        for name, dim in (("gate_up_proj", 1), ("packed", 0)):
            whole = getattr(network.experts, name).detach()
            packed = distribute_tensor(whole, tp, [_StridedShard(dim, split_factor=2)])
            setattr(network.experts, name, nn.Parameter(packed))
    if way != "tp":
        fully_shard(network, mesh=mesh["dp"] if way == "fsdp_tp" else mesh)


def rank_main(folder: Path) -> None:
    join_process_group(torch.device("cpu"), Config())
    says = {}
    for way, shape, axes in (
        ("fsdp", (4,), ("dp",)),
        ("hsdp", (2, 2), ("replicate", "dp")),
        ("fsdp_tp", (2, 2), ("dp", "tp")),
        ("tp", (2, 2), ("dp", "tp")),
    ):
        network = Network()
        whole = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
        cut(network, init_device_mesh("cpu", shape, mesh_dim_names=axes), "fsdp" if way == "hsdp" else way)
        layout, tensors = layout_of_dtensors(dict(network.named_parameters()), NAMES)
        expected = checkpoint(whole)
        for name, param in layout.items():
            held = tensors[name]
            for box, part in zip(param.boxes, [held] if isinstance(held, Tensor) else held, strict=True):
                assert torch.equal(part, expected[name][box.slices()]), (way, name, box)
        Shards(layout, tensors)
        says[way] = to_wire(layout)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(says))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's threads may abort the interpreter on its way out


def checkpoint(whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """In checkpoint names."""
    expected = dict(whole)
    fused = expected.pop("experts.gate_up_proj")
    for expert, rows in enumerate(fused):
        for kind, half in zip(("gate", "up"), rows.chunk(2), strict=True):
            expected[f"experts.{expert}.{kind}_proj.weight"] = half
    return expected


def test_four_ranks_hold_what_their_layouts_say_and_together_everything(tmp_path: Path) -> None:
    run_ranks("test_dtensor_layout:rank_main", tmp_path, world=4)
    said = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    whole = checkpoint({name: p.detach() for name, p in Network().named_parameters()})
    for way in said[0]:
        held = {name: torch.zeros(tensor.shape) for name, tensor in whole.items()}
        for rank in said:
            for name, param in from_wire(rank[way]).items():
                for box in param.boxes:
                    held[name][box.slices()] += 1
        for name, count in held.items():
            assert count.min() == count.max() > 0, (way, name)


ROWS = Local((Box.whole((8, 2)),))


def rows(local: Local) -> list[int]:
    return [row for box in local.boxes for row in range(box.offsets[0], box.stops[0])]


def test_placements_by_hand() -> None:
    after_tp = [_StridedShard(0, split_factor=2), Shard(0)]
    assert [rows(placed(ROWS, after_tp, (2, 2), (dp, tp))) for dp in (0, 1) for tp in (0, 1)] == [
        [0, 1],
        [4, 5],
        [2, 3],
        [6, 7],
    ]
    packed = [Replicate(), _StridedShard(0, split_factor=2)]
    assert rows(placed(ROWS, packed, (2, 2), (1, 1))) == [2, 3, 6, 7]
    both = [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2)]
    assert rows(placed(ROWS, both, (2, 2), (1, 0))) == [4, 5], "packed over tp, then halved over dp"
    left_to_right = [Shard(0), Shard(0)]
    assert rows(placed(ROWS, left_to_right, (2, 2), (1, 0))) == [4, 5]
    with pytest.raises(ValueError, match="neither"):
        placed(ROWS, [Partial()], (2,), (0,))


def test_plain_tensors_are_whole_and_fused_experts_come_one_by_one() -> None:
    fused = torch.arange(16.0).view(2, 4, 2)
    layout, tensors = layout_of_dtensors({"experts.gate_up_proj": fused, "scale": torch.ones(())}, NAMES)
    assert list(layout) == [f"experts.{e}.{kind}_proj.weight" for e in (0, 1) for kind in ("gate", "up")] + [
        "scale"
    ]
    up = tensors["experts.1.up_proj.weight"]
    assert isinstance(up, Tensor)
    assert up.tolist() == [[12, 13], [14, 15]]
    assert up.data_ptr() == fused[1, 2].data_ptr()
