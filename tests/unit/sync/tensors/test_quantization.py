"""Projections in 8 bits: by hand, within half a step, and the same however the learner is cut."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharding import grid, local_tensors, same_bits

from asyncrl.errors import ConfigError
from asyncrl.learner.ranks import process_group
from asyncrl.sync.layout.layout import Layout, ParamLayout, whole_layout
from asyncrl.sync.layout.quantized import is_quantized, quantized_layout
from asyncrl.sync.tensors import quantization
from asyncrl.sync.tensors.quantization import LARGEST, QuantizedShards, quantize, round_trip, scales
from asyncrl.sync.tensors.shards import Shards, TensorBuffer, layout_of

DOWN, UP = "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.up_proj.weight"
NORM = "model.norm.weight"
CPU = torch.device("cpu")


class Meeting:
    """Ranks in threads, each with `rank(n)` as its end of the collectives."""

    def __init__(self, world: int) -> None:
        self._given: list[Any] = [None] * world
        self._barrier = threading.Barrier(world, timeout=30)

    def rank(self, number: int) -> Rank:
        return Rank(self, number)

    def all_of(self, number: int, value: Any) -> list[Any]:
        self._given[number] = value
        self._barrier.wait()
        every = [*self._given]
        self._barrier.wait()
        return every


class Rank:
    def __init__(self, meeting: Meeting, number: int) -> None:
        self._meeting, self._number = meeting, number
        self.maxima = 0

    def exchange(self, value: Any) -> list[Any]:
        return self._meeting.all_of(self._number, value)

    def all_max(self, tensor: torch.Tensor) -> None:
        self.maxima += 1
        tensor.copy_(torch.stack(self._meeting.all_of(self._number, tensor.clone())).amax(0))


def snapshot(live: Shards, form: str, ranks: Any = process_group) -> Shards:
    source = QuantizedShards(live, form, ranks)
    buffer = TensorBuffer(source.layout, CPU)
    buffer.take(source)
    return buffer.shards


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {DOWN: (6, 9), NORM: (6,), UP: (9, 6)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def test_rows_by_hand() -> None:
    whole = {DOWN: torch.tensor([[12.7, -1.0, 0.04, 0.06], [0.0, 0.0, 0.0, 0.0]]), NORM: torch.ones(3)}
    taken = snapshot(Shards(layout_of(whole), whole), "int8")
    (q,), (s,) = taken.tensors[DOWN], taken.tensors[DOWN + "_scale"]
    assert (q.dtype, s.shape) == (torch.int8, (2, 1))
    assert q.tolist() == [[127, -10, 0, 1], [0, 0, 0, 0]]
    assert s[0].item() == pytest.approx(0.1)
    assert torch.equal(taken.tensors[NORM][0], whole[NORM])
    back = round_trip(whole, "int8")
    torch.testing.assert_close(back[DOWN], torch.tensor([[12.7, -1.0, 0.0, 0.1], [0.0] * 4]))
    assert back[NORM] is whole[NORM]


def test_fp8_by_hand() -> None:
    """Beside a row's largest, 448, there are three bits after the leading one: 300 lies between 288 and 320."""
    back = round_trip({DOWN: torch.tensor([[448.0, 300.0, -17.0, 0.001]])}, "fp8")
    assert back[DOWN].tolist() == [[448.0, 288.0, -16.0, pytest.approx(0.00195, abs=1e-5)]]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two or three rows at once."""
    monkeypatch.setattr(quantization, "CHUNK", 20)


@pytest.mark.usefixtures("small_chunks")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10**6), st.floats(1e-30, 1e30), st.sampled_from(sorted(LARGEST, key=str)))
def test_an_element_is_off_by_half_a_step_at_most(seed: int, size: float, dtype: torch.dtype) -> None:
    w = size * torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
    s = scales(w.abs().amax(1, keepdim=True), dtype)
    quantize(w, s, q := torch.empty(5, 7, dtype=dtype))
    off = (q.double() * s.double() - w.double()).abs()
    # Half of 1 in int8; of 2⁻³ of the leading bit in fp8, and of the smallest number 2⁻⁹.
    half_step = torch.full_like(off, 0.5)
    if dtype == torch.float8_e4m3fn:
        half_step = ((w / s).abs().double() / 2**4).clamp(min=2**-10)
    assert bool((off <= half_step * s.double() * (1 + 1e-5)).all())
    assert bool((q.float().abs().amax(1) == LARGEST[dtype]).all())


@given(
    st.integers(1, 4),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from(["int8", "fp8"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 3),
)
def test_the_cut_of_the_learner_changes_nothing(
    world: int, parts: tuple[int, int], form: str, dtype: torch.dtype, absent: int
) -> None:
    """absent: the rank whose layout does not even name one of the projections, as in another stage of a pipeline."""
    whole = weights(dtype=dtype)
    expected = snapshot(Shards(layout_of(whole), whole), form)
    layouts: list[dict[str, ParamLayout]] = [{} for _ in range(world)]
    for name, tensor in whole.items():
        boxes = grid(tuple(tensor.shape), parts[: tensor.dim()])
        holders = [rank for rank in range(world) if world == 1 or name != UP or rank != absent]
        for at, rank in enumerate(holders):
            held = tuple(boxes[at :: len(holders)])
            layouts[rank][name] = ParamLayout(tuple(tensor.shape), str(dtype)[6:], held)
    meeting = Meeting(world)
    ranks = [meeting.rank(number) for number in range(world)]

    def take(rank: int) -> Shards:
        live = Shards(layouts[rank], local_tensors(layouts[rank], whole, strided=True))
        return snapshot(live, form, ranks[rank])

    with ThreadPoolExecutor(world) as pool:
        taken = list(pool.map(take, range(world)))
    check_same(taken, expected)
    cut = any(len(box.shape) == 2 and box.shape[1] < param.shape[1] for _, param, box in boxes_of(layouts))
    assert {rank.maxima for rank in ranks} == {int(cut)}, "whole rows need no collective"


def boxes_of(layouts: Sequence[Layout]) -> list[tuple[str, ParamLayout, Any]]:
    return [(name, param, box) for one in layouts for name, param in one.items() for box in param.boxes]


def check_same(taken: Sequence[Shards], expected: Shards) -> None:
    seen = {name: torch.zeros(param.shape, dtype=torch.bool) for name, param in expected.layout.items()}
    for shards in taken:
        for name, parts in shards.tensors.items():
            for box, part in zip(shards.layout[name].boxes, parts, strict=True):
                assert same_bits(part, expected.view(name, box)), (name, box)
                seen[name][box.slices()] = True
    assert all(bool(mask.all()) for mask in seen.values())


@given(st.sampled_from(["int8", "fp8"]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_whole_round_trip_is_that_of_a_snapshot(form: str, dtype: torch.dtype) -> None:
    whole = weights(1, dtype)
    taken = snapshot(Shards(layout_of(whole), whole), form)
    back = round_trip(whole, form)
    for name in (DOWN, UP):
        by_hand = taken.tensors[name][0].float() * taken.tensors[name + "_scale"][0]
        assert same_bits(back[name], by_hand.to(dtype))
    assert round_trip(whole, None) is whole


@pytest.mark.parametrize("at", [0, 3])
def test_a_row_that_one_rank_has_broken_is_finite_on_none(at: int) -> None:
    """Cut between two ranks, of a maximum that loses NaN."""
    whole = {DOWN: torch.ones(2, 4)}
    whole[DOWN][0, at] = torch.nan
    meeting = Meeting(2)

    class Forgetful(Rank):
        def all_max(self, tensor: torch.Tensor) -> None:
            every = self._meeting.all_of(self._number, tensor.nan_to_num(nan=0.0, posinf=torch.inf))
            tensor.copy_(torch.stack(every).amax(0))

    def take(rank: int) -> torch.Tensor:
        layout = {DOWN: ParamLayout((2, 4), "float32", (grid((2, 4), (1, 2))[rank],))}
        taken = snapshot(Shards(layout, local_tensors(layout, whole)), "int8", Forgetful(meeting, rank))
        return taken.tensors[DOWN][0].float() * taken.tensors[DOWN + "_scale"][0]

    with ThreadPoolExecutor(2) as pool:
        for part in pool.map(take, range(2)):
            assert not part[0].isfinite().any()
            torch.testing.assert_close(part[1], torch.ones(2))


def test_a_row_that_is_not_finite_stays_so() -> None:
    w = torch.ones(3, 4)
    w[0, 1], w[1, 2] = torch.nan, torch.inf
    back = round_trip({DOWN: w}, "int8")[DOWN]
    assert not back[0].isfinite().any()
    assert not back[1].isfinite().all()
    torch.testing.assert_close(back[2], w[2])


@pytest.mark.parametrize(
    ("name", "quantizes"),
    [
        ("model.layers.11.self_attn.q_proj.weight", True),
        ("model.layers.0.self_attn.qkv_proj.weight", True),
        ("model.language_model.layers.0.mlp.gate_up_proj.weight", True),
        ("model.layers.0.mlp.shared_experts.down_proj.weight", True),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("model.layers.0.self_attn.kv_b_proj.weight", False),
        ("model.layers.0.mlp.experts.3.down_proj.weight", False),
        ("model.layers.0.mlp.gate.weight", False),
        ("model.layers.0.input_layernorm.weight", False),
        ("model.visual.blocks.0.mlp.up_proj.weight", False),
        ("model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight", False),
        ("mtp.layers.0.mlp.up_proj.weight", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_which_parameters(name: str, quantizes: bool) -> None:
    assert is_quantized(name, (4, 8)) == quantizes
    layout = quantized_layout(whole_layout({name: ((4, 8), "bfloat16")}), "fp8")
    assert (layout[name].dtype == "float8_e4m3fn") == (name + "_scale" in layout) == quantizes


def test_a_model_without_projections_is_refused() -> None:
    live = {"transformer.h.0.attn.c_attn.weight": torch.zeros(4, 4)}
    with pytest.raises(ConfigError, match="finds no projections"):
        QuantizedShards(Shards(layout_of(live), live), "int8", process_group)
