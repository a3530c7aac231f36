"""What of the Megatron backend needs no Megatron: ranks and axes, architectures, flat ranges as boxes."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from megatron_cases import write_model
from transformers import AutoConfig, DeepseekV3Config, Gemma2Config, LlamaConfig, Qwen2Config

from asyncrl.config.sections.learner import ParallelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.megatron.architecture import Router, architecture
from asyncrl.learner.backends.megatron.boxes import cuts, rectangles
from asyncrl.learner.backends.megatron.grid import check_model, make_grid
from asyncrl.learner.backends.storage import Boxes
from asyncrl.learner.parallel.mesh import AXES, coordinates, is_data_leader
from asyncrl.sync.layout.layout import Box
from asyncrl.sync.layout.megatron import DEEPSEEK, MIXTRAL, Gpt, Latent, MegatronPart, Mixture

MODEL = Gpt(layers=4, hidden=8, heads=4, key_heads=2, head_dim=2, ffn=12, vocab=9, padded_vocab=9)


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_a_flat_range_is_its_rectangles_in_order(rows: int, width: int, data: st.DataObject) -> None:
    start, stop = sorted(data.draw(st.tuples(st.integers(0, rows * width), st.integers(0, rows * width))))
    matrix = np.arange(rows * width).reshape(rows, width)
    found = [matrix[box.slices()].ravel() for box in rectangles((rows, width), start, stop)]
    assert np.concatenate([*found, []]).tolist() == list(range(start, stop))
    assert len(found) <= 3


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(1, 4), st.data())
def test_cuts_say_where_each_element_lies_in_the_checkpoint(
    heights: list[int], width: int, data: st.DataObject
) -> None:
    """A shard of parts of two checkpoint parameters, by turns, and a padded row at its end."""
    whole = {name: np.random.default_rng(n).normal(size=(9, width + 2)) for n, name in enumerate("ab")}
    parts, low = [], 0
    for n, height in enumerate(heights):
        parts.append(MegatronPart("ab"[n % 2], (9, width + 2), Box((low, 1), (height, width))))
        low += height
    shard = np.concatenate([*(whole[p.name][p.box.slices()] for p in parts), np.full((1, width), np.nan)])
    size = shard.size
    start, stop = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    seen: list[int] = []
    for cut in cuts(parts, shard.shape, start, stop):
        there = whole[cut.name][cut.box.slices()]
        assert np.array_equal(shard.ravel()[cut.start : cut.stop].reshape(cut.box.shape), there)
        seen += range(cut.start, cut.stop)
    assert seen == list(range(start, min(stop, size - width)))


def test_boxes_are_saved_and_loaded_in_place(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    held = [(Box((0, 0), (1, 4)), whole[:1].clone()), (Box((1, 0), (2, 4)), whole[1:].clone())]
    dcp.save({"x": Boxes((3, 4), held)}, checkpoint_id=str(tmp_path), no_dist=True)
    left, right = torch.zeros(3, 3), torch.zeros(3, 1)
    other = Boxes((3, 4), [(Box((0, 0), (3, 3)), left), (Box((0, 3), (3, 1)), right)])
    dcp.load({"x": other}, checkpoint_id=str(tmp_path), no_dist=True)
    assert torch.equal(torch.cat([left, right], 1), whole)
    with pytest.raises(NotImplementedError, match="saved and loaded"):
        other + 1


def test_ranks_stand_where_the_other_backends_ranks_do() -> None:
    parallel = ParallelConfig(tensor=2, pipeline=2, context=2)
    sizes = {"pp": 2, "replicate": 1, "shard": 3, "cp": 2, "tp": 2}
    for rank in range(24):
        here, at = make_grid(parallel, rank, 24), coordinates(sizes, rank)
        assert set(at) == set(AXES)
        assert (here.stage, here.data_rank, here.tensor_rank) == (at["pp"], at["shard"], at["tp"])
        assert (rank in here.data_leaders) == is_data_leader(sizes, at)
    assert make_grid(parallel, 0, 24).data_leaders == [12, 16, 20]


def test_experts_are_shared_out_or_their_matrices_are() -> None:
    spread = [make_grid(ParallelConfig(tensor=2, expert=4), rank, 4).place(0, 4) for rank in range(4)]
    assert [(place.ep, place.expert_tp) for place in spread] == [((rank, 4), (0, 1)) for rank in range(4)]
    parallel = ParallelConfig(tensor=2, context=2, expert=8)
    wide = [make_grid(parallel, rank, 16).place(0, 4).ep for rank in range(16)]
    assert wide == [(rank % 8, 8) for rank in range(16)]
    cut = [make_grid(ParallelConfig(tensor=2), rank, 2).place(0, 4) for rank in range(2)]
    assert [(place.ep, place.expert_tp) for place in cut] == [((0, 1), (rank, 2)) for rank in range(2)]


def test_stages_take_turns_only_if_asked_to() -> None:
    parallel = ParallelConfig(pipeline=2, pipeline_schedule="interleaved")
    layers = [
        [list(make_grid(parallel, rank, 2).place(chunk, 4).layers(MODEL)) for chunk in (0, 1)]
        for rank in (0, 1)
    ]
    assert layers == [[[0], [2]], [[1], [3]]]
    assert make_grid(ParallelConfig(pipeline=16), 0, 16).stages(61) == (4,) * 13 + (3,) * 3
    assert make_grid(ParallelConfig(pipeline=2), 0, 2).chunks == 1


@pytest.mark.parametrize(
    ("world", "parallel", "key"),
    [
        (3, {"context": 2}, "context 2"),
        (2, {"replicate": 2}, "replicate"),
        (3, {"tensor": 2}, "parallel"),
        (2, {"expert": 3}, "expert"),
    ],
)
def test_what_megatron_is_not_asked_for_is_refused(world: int, parallel: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make_grid(ParallelConfig(**parallel), 0, world)


@pytest.mark.parametrize(
    ("world", "parallel", "mixture", "why"),
    [
        (5, {"pipeline": 5}, None, "4 layers"),
        (4, {"tensor": 4}, None, "2 key heads"),
        (2, {"expert": 2}, None, "the model has none"),
        (2, {"expert": 2}, Mixture(3, 8), "3 experts"),
        (2, {"tensor": 2, "sequence": False}, Mixture(2, 16), "Megatron requires it"),
        (2, {"tensor": 2}, Mixture(2, 24), "leaves 12 of an expert's rows"),
        (8, {"context": 8}, None, "4 attention heads"),
        (8, {"context": 4, "tensor": 2}, None, "2 attention heads"),
    ],
)
def test_what_does_not_go_with_the_model_is_refused(
    world: int, parallel: dict[str, Any], mixture: Mixture | None, why: str
) -> None:
    axes, model = ParallelConfig(**parallel), dataclasses.replace(MODEL, mixture=mixture)
    with pytest.raises(ConfigError, match=why):
        check_model(make_grid(axes, 0, world), model, axes)


@pytest.mark.parametrize(
    ("family", "bias", "norm", "mixture", "mixed"),
    [
        ("qwen2", True, False, None, 0),
        ("qwen3", False, True, None, 0),
        ("llama", False, False, None, 0),
        ("mistral", False, False, None, 0),
        ("mixtral", False, False, Mixture(4, 64, **MIXTRAL), 4),  # type: ignore[arg-type]
        ("qwen3_moe", False, True, Mixture(4, 16), 3),
        ("qwen2_moe", True, False, Mixture(4, 16, shared=24), 4),
    ],
)
def test_architectures(
    tmp_path: Path, family: str, bias: bool, norm: bool, mixture: Mixture | None, mixed: int
) -> None:
    write_model(tmp_path, family)
    found = architecture(AutoConfig.from_pretrained(tmp_path), "model.path", "there")
    assert (found.gpt.qkv_bias, found.gpt.qk_norm, found.gpt.mixture) == (bias, norm, mixture)
    assert (found.gpt.layers, found.gpt.heads, found.gpt.key_heads, found.gpt.ffn) == (4, 4, 2, 64)
    assert (found.gpt.vocab, found.padded(4).padded_vocab) == (33, 36)
    assert sum(found.mixed) == mixed
    assert found.windows == ((48,) * 4 if family == "mistral" else (None,) * 4)
    assert math.isclose(found.epsilon, AutoConfig.from_pretrained(tmp_path).rms_norm_eps)


def test_deepseek_v3(tmp_path: Path) -> None:
    write_model(tmp_path, "deepseek_v3")
    found = architecture(AutoConfig.from_pretrained(tmp_path), "model.path", "there")
    assert found.gpt.latent == Latent(query=24, key=16, plain=12, rotated=8, value=10)
    assert found.gpt.mixture == Mixture(8, 16, 32, **DEEPSEEK)  # type: ignore[arg-type]
    assert found.router == Router(4, sigmoid=True, renormalised=True, groups=4, chosen=2, scale=2.5)
    assert (found.mixed, found.interleaved) == ((False, True, True, True), True)
    assert math.isclose(found.scaling, 20**-0.5 * (0.1 * 0.7 * math.log(4) + 1) ** 2)


def test_without_yarn_scores_are_divided_by_the_root_of_a_head_alone(tmp_path: Path) -> None:
    write_model(tmp_path, "deepseek_v3_plain")
    found = architecture(AutoConfig.from_pretrained(tmp_path), "model.path", "there")
    assert found.gpt.latent == Latent(query=None, key=16, plain=12, rotated=8, value=10)
    assert (found.scaling, found.interleaved) == (20**-0.5, False)


@pytest.mark.parametrize(
    ("router", "why"),
    [
        ({"norm_topk_prob": False}, "not renormalised"),
        ({"num_experts_per_tok": 1}, "that choose one expert"),
        ({"n_routed_experts": 12, "n_group": 8}, "12 experts in 8 groups"),
        ({"n_routed_experts": 64, "n_group": 64}, "64 experts in 64 groups"),
        ({"n_group": 8, "topk_group": 4, "num_experts_per_tok": 4}, "4 of 8 groups for 4 experts"),
    ],
)
def test_routers_that_megatron_computes_otherwise_are_refused(router: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        architecture(DeepseekV3Config(**router), "model.path", "there")
    kept = DeepseekV3Config(n_group=1, topk_group=1, num_experts_per_tok=6)
    assert architecture(kept, "model.path", "there").router == Router(6, True, scale=2.5)


def test_keys_that_are_null_count_as_left_out(tmp_path: Path) -> None:
    write_model(tmp_path, "deepseek_v3")
    config = AutoConfig.from_pretrained(tmp_path)
    config.rope_parameters["mscale_all_dim"] = config.first_k_dense_replace = None
    found = architecture(config, "model.path", "there")
    assert (found.scaling, found.mixed) == (20**-0.5, (True,) * 4)


def test_sliding_windows_are_of_the_layers_that_have_them() -> None:
    config = Qwen2Config(num_hidden_layers=4, use_sliding_window=True, sliding_window=8, max_window_layers=2)
    assert architecture(config, "model.path", "there").windows == (None, None, 8, 8)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Gemma2Config(), "gemma2"),
        (LlamaConfig(attention_bias=True), "attention_bias"),
        (LlamaConfig(hidden_act="gelu"), "gelu"),
    ],
)
def test_other_models_are_refused_by_name(config: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        architecture(config, "reference.path", "there")
