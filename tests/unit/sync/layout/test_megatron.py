"""Against shards that are made as Megatron's own checkpoint converters make them (tools/checkpoint of Megatron-LM)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from asyncrl.errors import WeightSyncError
from asyncrl.sync.layout.layout import Layout, whole_layout
from asyncrl.sync.layout.megatron import (
    DEEPSEEK,
    MIXTRAL,
    Gpt,
    Latent,
    MegatronPlace,
    Mixture,
    checkpoint_views,
    megatron_parts,
)
from asyncrl.sync.plan.plan import plan

Arrays = dict[str, np.ndarray]

DENSE = Gpt(
    layers=4,
    hidden=6,
    heads=8,
    key_heads=4,
    head_dim=2,
    ffn=12,
    vocab=13,
    padded_vocab=16,
    qkv_bias=True,
    qk_norm=True,
)
MIXED = dataclasses.replace(DENSE, mixture=Mixture(4, 8, shared=4), qkv_bias=False)
LATENT = dataclasses.replace(
    DENSE,
    qkv_bias=False,
    qk_norm=False,
    mixture=Mixture(4, 8, 4, **DEEPSEEK),  # type: ignore[arg-type]
    latent=Latent(query=5, key=3, plain=2, rotated=4, value=3),
)
PLAIN = dataclasses.replace(LATENT, latent=dataclasses.replace(LATENT.latent, query=None))  # type: ignore[type-var]


def checkpoint(gpt: Gpt) -> Arrays:
    """Random whole parameters in Hugging Face names."""
    random = np.random.default_rng(0)
    whole: Arrays = {}

    def add(name: str, *shape: int) -> None:
        whole[name] = random.normal(size=shape).astype(np.float32)

    def add_ffn(
        prefix: str, rows: int, kinds: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    ) -> None:
        for kind, shape in zip(
            kinds, ((rows, gpt.hidden), (rows, gpt.hidden), (gpt.hidden, rows)), strict=True
        ):
            add(f"{prefix}{kind}.weight", *shape)

    add("model.embed_tokens.weight", gpt.vocab, gpt.hidden)
    add("model.norm.weight", gpt.hidden)
    if not gpt.tied:
        add("lm_head.weight", gpt.vocab, gpt.hidden)
    for layer in range(gpt.layers):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"{at}{norm}.weight", gpt.hidden)
        for name, shape in (of_latents if gpt.latent else of_heads)(gpt):
            add(f"{at}self_attn.{name}", *shape)
        mixture = gpt.mixture
        if mixture is None or layer == 0:
            add_ffn(f"{at}mlp.", gpt.ffn)
            continue
        add(at + mixture.router, mixture.experts, gpt.hidden)
        for expert in range(mixture.experts):
            add_ffn(at + mixture.expert.format(expert=expert), mixture.ffn, mixture.kinds)
        if mixture.shared:
            add_ffn(at + mixture.shared_expert, mixture.shared, mixture.kinds)
        if mixture.shared and mixture.weighs_shared:
            add(f"{at}mlp.shared_expert_gate.weight", 1, gpt.hidden)
        if mixture.bias:
            add(at + mixture.bias, mixture.experts)
    return whole


def of_heads(gpt: Gpt) -> Iterator[tuple[str, tuple[int, ...]]]:
    for kind, heads in (("q", gpt.heads), ("k", gpt.key_heads), ("v", gpt.key_heads)):
        yield f"{kind}_proj.weight", (heads * gpt.head_dim, gpt.hidden)
        if gpt.qkv_bias:
            yield f"{kind}_proj.bias", (heads * gpt.head_dim,)
    if gpt.qk_norm:
        yield "q_norm.weight", (gpt.head_dim,)
        yield "k_norm.weight", (gpt.head_dim,)
    yield "o_proj.weight", (gpt.hidden, gpt.heads * gpt.head_dim)


def of_latents(gpt: Gpt) -> Iterator[tuple[str, tuple[int, ...]]]:
    assert gpt.latent is not None
    query, key, plain, rotated, value = dataclasses.astuple(gpt.latent)
    if query is None:
        yield "q_proj.weight", (gpt.heads * (plain + rotated), gpt.hidden)
    else:
        yield "q_a_proj.weight", (query, gpt.hidden)
        yield "q_a_layernorm.weight", (query,)
        yield "q_b_proj.weight", (gpt.heads * (plain + rotated), query)
    yield "kv_a_proj_with_mqa.weight", (key + rotated, gpt.hidden)
    yield "kv_a_layernorm.weight", (key,)
    yield "kv_b_proj.weight", (gpt.heads * (plain + value), key)
    yield "o_proj.weight", (gpt.hidden, gpt.heads * value)


LATENT_NAMES = {
    "linear_q_proj.weight": "q_proj.weight",
    "linear_q_down_proj.weight": "q_a_proj.weight",
    "q_layernorm.weight": "q_a_layernorm.weight",
    "linear_q_up_proj.weight": "q_b_proj.weight",
    "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
    "kv_layernorm.weight": "kv_a_layernorm.weight",
    "linear_kv_up_proj.weight": "kv_b_proj.weight",
    "linear_proj.weight": "o_proj.weight",
}
FUSED_NORMS = {f"{kind}_layernorm.weight": f"linear_{kind}_up_proj.layer_norm_weight" for kind in ("q", "kv")}


def shards(gpt: Gpt, place: MegatronPlace, whole: Arrays, form: str) -> Arrays:
    """A chunk's local parameters. form: "local", Megatron's own modules; "te", the names of Transformer Engine's, for
    experts and norms; "grouped", the experts of a rank in two matrices."""
    grouped = form == "te"
    (tp, tps), local = place.tp, {}

    def rows(array: np.ndarray, rank: int = tp, size: int = tps) -> np.ndarray:
        return np.split(array, size)[rank]

    def columns(array: np.ndarray, rank: int = tp, size: int = tps) -> np.ndarray:
        return np.split(array, size, axis=1)[rank]

    def padded(name: str) -> np.ndarray:
        return rows(np.pad(whole[name], ((0, gpt.padded_vocab - gpt.vocab), (0, 0))))

    if place.is_first:
        local["embedding.word_embeddings.weight"] = padded("model.embed_tokens.weight")
    if place.is_last:
        local["decoder.final_layernorm.weight"] = whole["model.norm.weight"]
        local["output_layer.weight"] = padded("model.embed_tokens.weight" if gpt.tied else "lm_head.weight")
    for number, layer in enumerate(place.layers(gpt)):
        here, there = f"decoder.layers.{number}.", f"model.layers.{layer}."
        dense = gpt.mixture is None or layer == 0
        fuses = grouped and gpt.latent is None
        first = "self_attention.linear_qkv.layer_norm_weight" if fuses else "input_layernorm.weight"
        second = "mlp.linear_fc1.layer_norm_weight" if grouped and dense else "pre_mlp_layernorm.weight"
        local[here + first] = whole[there + "input_layernorm.weight"]
        local[here + second] = whole[there + "post_attention_layernorm.weight"]
        if gpt.latent is None:
            local |= {f"{here}self_attention.{name}": array for name, array in heads(gpt, whole, there, rows)}
        for name, of in LATENT_NAMES.items() if gpt.latent else ():
            if f"{there}self_attn.{of}" in whole:
                array = whole[f"{there}self_attn.{of}"]
                cut = rows(array) if of in ("q_proj.weight", "q_b_proj.weight", "kv_b_proj.weight") else array
                local[f"{here}self_attention.{FUSED_NORMS.get(name, name) if grouped else name}"] = cut
        local[here + "self_attention.linear_proj.weight"] = columns(whole[there + "self_attn.o_proj.weight"])

        def ffn(
            prefix: str, kinds: tuple[str, ...], at: tuple[int, int], there: str = there
        ) -> tuple[np.ndarray, ...]:
            gate, up, down = (whole[f"{there}{prefix}{kind}.weight"] for kind in kinds)
            return np.concatenate([rows(gate, *at), rows(up, *at)]), columns(down, *at)

        if dense:
            fc1, fc2 = ffn("mlp.", ("gate_proj", "up_proj", "down_proj"), place.tp)
            local[here + "mlp.linear_fc1.weight"], local[here + "mlp.linear_fc2.weight"] = fc1, fc2
            continue
        mixture = gpt.mixture
        assert mixture is not None
        local[here + "mlp.router.weight"] = whole[there + mixture.router]
        if mixture.bias:
            local[here + "mlp.router.expert_bias"] = whole[there + mixture.bias]
        each = mixture.experts // place.ep[1]
        prefixes = [mixture.expert.format(expert=place.ep[0] * each + expert) for expert in range(each)]
        made = [ffn(prefix, mixture.kinds, place.expert_tp) for prefix in prefixes]
        if form == "grouped":
            for linear, arrays in zip(("fc1", "fc2"), zip(*made, strict=True), strict=True):
                local[f"{here}mlp.experts.grouped_{linear}"] = np.concatenate(arrays)
        for expert, both in enumerate(made if form != "grouped" else ()):
            for linear, array in zip(("fc1", "fc2"), both, strict=True):
                one, all_ = (
                    f"local_experts.{expert}.linear_{linear}.weight",
                    f"linear_{linear}.weight{expert}",
                )
                local[f"{here}mlp.experts.{all_ if grouped else one}"] = array
        if mixture.shared:
            for linear, array in zip(
                ("fc1", "fc2"), ffn(mixture.shared_expert, mixture.kinds, place.tp), strict=True
            ):
                local[f"{here}mlp.shared_experts.linear_{linear}.weight"] = array
        if mixture.shared and mixture.weighs_shared:
            local[here + "mlp.shared_experts.gate_weight"] = whole[there + "mlp.shared_expert_gate.weight"]
    return local


def heads(gpt: Gpt, whole: Arrays, there: str, rows: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The parameters of an attention layer that does without latents, but for its last matrix."""
    for kind in ("weight", "bias") if gpt.qkv_bias else ("weight",):
        q, k, v = (whole[f"{there}self_attn.{which}_proj.{kind}"] for which in "qkv")
        groups = [array.reshape(gpt.key_heads, -1, *array.shape[1:]) for array in (q, k, v)]
        yield f"linear_qkv.{kind}", rows(np.concatenate(groups, axis=1).reshape(-1, *q.shape[1:]))
    for which in "qk" if gpt.qk_norm else "":
        yield f"{which}_layernorm.weight", whole[f"{there}self_attn.{which}_norm.weight"]


def places(
    tp: int = 1, pp: int = 1, vpp: int = 1, ep: int = 1, expert_tp: int = 1, stages: tuple = ()
) -> list[MegatronPlace]:
    sizes = (tp, pp, vpp, ep, expert_tp)
    return [
        MegatronPlace(*zip(ranks, sizes, strict=True), stages=stages)  # type: ignore[arg-type]
        for ranks in product(*map(range, sizes))
    ]


@pytest.mark.parametrize("form", ["local", "te", "grouped"])
@pytest.mark.parametrize(
    ("gpt", "sizes"),
    [
        (DENSE, {}),
        (DENSE, {"tp": 4}),
        (DENSE, {"tp": 2, "pp": 2, "vpp": 2}),
        (DENSE, {"pp": 2, "stages": (1, 3)}),
        (dataclasses.replace(DENSE, tied=True), {"tp": 2, "pp": 2}),
        (dataclasses.replace(DENSE, vocab=7), {"tp": 2}),
        (MIXED, {"ep": 2, "pp": 2}),
        (MIXED, {"tp": 2, "ep": 4, "expert_tp": 2}),
        (LATENT, {"tp": 2, "ep": 2, "pp": 2}),
        (PLAIN, {"tp": 4}),
        (dataclasses.replace(DENSE, mixture=Mixture(2, 8, **MIXTRAL)), {"ep": 2}),
    ],
)
def test_shards_put_together_are_the_checkpoint_bit_for_bit(gpt: Gpt, sizes: dict, form: str) -> None:
    whole = checkpoint(gpt)
    again = {name: np.full_like(array, np.nan) for name, array in whole.items()}
    layouts: list[Layout] = []
    for place in places(**sizes):
        local = shards(gpt, place, whole, form)
        layout, views = checkpoint_views(local, "float32", gpt, place)
        layouts.append(layout)
        for name, param in layout.items():
            assert param.shape == whole[name].shape
            for box, view in zip(param.boxes, views[name], strict=True):
                assert np.array_equal(view, whole[name][box.slices()])
                again[name][box.slices()] = view
    assert all(np.array_equal(again[name], whole[name]) for name in whole)
    needed = whole_layout({name: (array.shape, "float32") for name, array in whole.items()})
    assert plan(layouts, needed, 4096).bytes == sum(array.nbytes for array in whole.values())


def test_views_share_memory_with_the_shard() -> None:
    local = shards(DENSE, MegatronPlace(), checkpoint(DENSE), "local")
    _, views = checkpoint_views(local, "float32", DENSE, MegatronPlace())
    views["model.layers.0.self_attn.k_proj.weight"][1][:] = 7.0
    fused = local["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert np.flatnonzero((fused == 7.0).all(1)).tolist() == [12, 13], (
        "of each group: four rows of q, two k, two v"
    )


def test_a_shard_of_another_shape_is_refused() -> None:
    """Megatron's own layer cuts the maps to latents over tp."""
    cut = {"decoder.layers.0.self_attention.linear_kv_down_proj.weight": np.zeros((4, 6), np.float32)}
    with pytest.raises(WeightSyncError, match=r"linear_kv_down_proj.*\(4, 6\) at .* a part of \(7, 6\)"):
        checkpoint_views(cut, "float32", LATENT, MegatronPlace(tp=(0, 2)))


def test_interleaved_stages_take_turns() -> None:
    chunks = [list(place.layers(DENSE)) for place in places(pp=2, vpp=2)]
    assert chunks == [[0], [2], [1], [3]], "rank 0 has the chunks 0 and 2, rank 1 the chunks 1 and 3"


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.4.input_layernorm.weight",
        "decoder.layers.0.mlp.router.weight",
        "decoder.layers.0.x",
        "head",
    ],
)
def test_unknown_parameters_are_named(name: str) -> None:
    with pytest.raises(WeightSyncError, match=name):
        megatron_parts(name, DENSE, MegatronPlace())


def test_what_cannot_be_cut_evenly_is_refused() -> None:
    with pytest.raises(ValueError, match="key heads over tp: 4 cannot be cut into 8"):
        megatron_parts("decoder.layers.0.self_attention.linear_qkv.weight", DENSE, MegatronPlace(tp=(0, 8)))
    with pytest.raises(ValueError, match="must have 4 layers together"):
        MegatronPlace(pp=(0, 2), stages=(1, 1)).layers(DENSE)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        MegatronPlace(tp=(2, 2))
