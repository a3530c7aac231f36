"""Where the parameters of a Megatron-core GPT lie in the Hugging Face checkpoint, for any TP × PP × VPP × EP.

    decoder.layers.1.self_attention.linear_qkv.weight at pipeline stage 1 of 2 of 8 layers, tp 0 of 2, 4 key heads
        rows of q of group 0 │ k │ v │ q of group 1 │ k │ v        groups 0 and 1 of model.layers.5.self_attn.*_proj

Every local tensor is boxes of checkpoint parameters, one after another along its first dimension; rows left at its
end pad the vocabulary. So a shard is a list of boxes, and each is a view of it. Formats: megatron/core/models/gpt
and transformer/{attention,mlp,moe} of Megatron-core 0.16, local and Transformer Engine names, and experts.py and
layers.py of learner/backends/megatron. Attention from latents has its maps to latents whole on every rank, as
Transformer Engine and layers.py have them; Megatron's local layer cuts them, and is refused. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from asyncrl.errors import WeightSyncError
from asyncrl.sync.layout.layout import Box, ParamLayout

T = TypeVar("T")


class MegatronPart(NamedTuple):
    """A box of a checkpoint parameter of this full shape."""

    name: str
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a layer. shared: rows of the shared expert's gate; 0: there is none · weighs_shared: whether a map
    weighs its outputs · router: its name · bias: of the router's choice; None: there is none · expert, shared_expert:
    names before '{kind}.weight'"""

    experts: int
    ffn: int
    shared: int = 0
    weighs_shared: bool = True
    router: str = "mlp.gate.weight"
    bias: str | None = None
    expert: str = "mlp.experts.{expert}."
    shared_expert: str = "mlp.shared_expert."
    kinds: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


MIXTRAL = {
    "router": "block_sparse_moe.gate.weight",
    "expert": "block_sparse_moe.experts.{expert}.",
    "kinds": ("w1", "w3", "w2"),
}
"""The names of Mixtral."""

DEEPSEEK = {
    "weighs_shared": False,
    "bias": "mlp.gate.e_score_correction_bias",
    "shared_expert": "mlp.shared_experts.",
}
"""The shared expert and the names of DeepSeek-V3."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Attention from latents (MLA). Columns of: query, the latent of queries (None: there is none) · key, the latent of
    keys and values · plain, rotated: the two parts of a head of queries and keys · value, a head of values"""

    query: int | None
    key: int
    plain: int
    rotated: int
    value: int

    @property
    def head(self) -> int:
        """Columns of a head of queries and keys."""
        return self.plain + self.rotated


@dataclass(frozen=True, slots=True)
class Gpt:
    """A decoder with gated feed-forward layers and RMS norms, as Llama, Qwen, Mixtral and DeepSeek-V3 have them.

    vocab: rows in the checkpoint · padded_vocab: in Megatron, over all tp ranks · latent: in place of key_heads and
    head_dim, which count nothing then
    """

    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    ffn: int
    vocab: int
    padded_vocab: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    mixture: Mixture | None = None
    latent: Latent | None = None


@dataclass(frozen=True, slots=True)
class MegatronPlace:
    """The place of one model chunk of one rank: (rank, size) of each kind of parallelism. vpp: chunk of the stage.

    stages: layers of each chunk in the order of the model, where they are not all alike. Data-parallel ranks of one
    place are replicas. Raises ValueError where a rank is beyond its size.
    """

    tp: tuple[int, int] = (0, 1)
    pp: tuple[int, int] = (0, 1)
    vpp: tuple[int, int] = (0, 1)
    ep: tuple[int, int] = (0, 1)
    expert_tp: tuple[int, int] = (0, 1)
    stages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for rank, size in (self.tp, self.pp, self.vpp, self.ep, self.expert_tp):
            if not 0 <= rank < size:
                raise ValueError(f"rank {rank} of {size}: {self}")

    @property
    def chunk(self) -> int:
        """Its number in the order of the model."""
        return self.vpp[0] * self.pp[1] + self.pp[0]

    @property
    def is_first(self) -> bool:
        return self.chunk == 0

    @property
    def is_last(self) -> bool:
        return self.chunk == self.pp[1] * self.vpp[1] - 1

    def layers(self, gpt: Gpt) -> range:
        """Numbers, in the model, of this chunk's layers."""
        count = self.pp[1] * self.vpp[1]
        stages = self.stages or (_share(gpt.layers, count, "layers over chunks"),) * count
        if len(stages) != count or sum(stages) != gpt.layers:
            raise ValueError(f"stages {stages}: {count} chunks must have {gpt.layers} layers together")
        start = sum(stages[: self.chunk])
        return range(start, start + stages[self.chunk])


class RowTable(Protocol):
    """A tensor or an array, of which a slice is a view."""

    @property
    def shape(self) -> Sequence[int]: ...

    def __getitem__(self: T, rows: slice, /) -> T: ...


R = TypeVar("R", bound=RowTable)


def checkpoint_views(
    tensors: Mapping[str, R], dtype: str, gpt: Gpt, place: MegatronPlace
) -> tuple[dict[str, ParamLayout], dict[str, list[R]]]:
    """A chunk's local parameters → (its layout, and the view of each box) in checkpoint names.

    Raises WeightSyncError for a parameter that is not known here, or of another shape.
    """
    parts: dict[str, list[MegatronPart]] = {}
    views: dict[str, list[R]] = {}
    for name, tensor in tensors.items():
        start = 0
        for part in megatron_parts(name, gpt, place):
            stop = start + part.box.shape[0]
            view = tensor[start:stop]
            if tuple(view.shape) != part.box.shape:
                raise WeightSyncError(
                    f"parameter {name} of Megatron: {tuple(tensor.shape)} at {place}, where {part.name} has a part of "
                    f"{part.box.shape}"
                )
            parts.setdefault(part.name, []).append(part)
            views.setdefault(part.name, []).append(view)
            start = stop
    layout = {
        name: ParamLayout(found[0].shape, dtype, tuple(part.box for part in found))
        for name, found in parts.items()
    }
    return layout, views


def megatron_parts(name: str, gpt: Gpt, place: MegatronPlace) -> list[MegatronPart]:
    """The boxes of the local parameter `name`. Raises WeightSyncError for a name that is not known here."""
    if name == "embedding.word_embeddings.weight" or (name == "output_layer.weight" and gpt.tied):
        return _vocabulary("model.embed_tokens.weight", gpt, place)
    if name == "output_layer.weight":
        return _vocabulary("lm_head.weight", gpt, place)
    if name == "decoder.final_layernorm.weight":
        return [_whole("model.norm.weight", gpt.hidden)]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is not None and int(match[1]) < len(place.layers(gpt)):
        layer = place.layers(gpt)[int(match[1])]
        found = _of_layer(match[2], gpt, place)
        if found is not None:
            return [part._replace(name=f"model.layers.{layer}.{part.name}") for part in found]
    raise WeightSyncError(f"parameter {name} of Megatron: not known at {place}")


def _of_layer(name: str, gpt: Gpt, place: MegatronPlace) -> list[MegatronPart] | None:
    module, _, kind = name.rpartition(".")
    if gpt.latent is not None and module.startswith("self_attention."):
        return _of_latent_attention(module.removeprefix("self_attention."), kind, gpt, gpt.latent, place.tp)
    norm = NORMS.get(name)
    if norm is not None:
        return [_whole(norm, gpt.head_dim if "self_attn" in norm else gpt.hidden)]
    if module == "self_attention.linear_qkv":
        return _qkv(kind, gpt, place.tp)
    if module == "self_attention.linear_proj" and kind == "weight":
        return [_columns("self_attn.o_proj.weight", (gpt.hidden, gpt.heads * gpt.head_dim), place.tp)]
    if name.startswith("mlp.linear_"):
        return _feed_forward(name.removeprefix("mlp."), "mlp.", KINDS, gpt.hidden, gpt.ffn, place.tp)
    return _of_mixture(name, gpt, gpt.mixture, place) if gpt.mixture is not None else None


def _of_latent_attention(
    module: str, kind: str, gpt: Gpt, latent: Latent, tp: tuple[int, int]
) -> list[MegatronPart] | None:
    """The maps to latents are whole on every rank."""
    if kind == "layer_norm_weight":  # of Transformer Engine's maps
        module, kind = (
            {"linear_q_up_proj": "q_layernorm", "linear_kv_up_proj": "kv_layernorm"}.get(module, ""),
            "weight",
        )
    if kind != "weight":
        return None
    inputs, queries = latent.query or gpt.hidden, gpt.heads * latent.head
    both = gpt.heads * (latent.plain + latent.value)
    match module:
        case "q_layernorm":
            return [_whole("self_attn.q_a_layernorm.weight", inputs)]
        case "kv_layernorm":
            return [_whole("self_attn.kv_a_layernorm.weight", latent.key)]
        case "linear_q_down_proj":
            return [_whole("self_attn.q_a_proj.weight", inputs, gpt.hidden)]
        case "linear_kv_down_proj":
            return [_whole("self_attn.kv_a_proj_with_mqa.weight", latent.key + latent.rotated, gpt.hidden)]
        case "linear_q_proj":
            return [_cut_rows("self_attn.q_proj.weight", (queries, gpt.hidden), tp)]
        case "linear_q_up_proj":
            return [_cut_rows("self_attn.q_b_proj.weight", (queries, inputs), tp)]
        case "linear_kv_up_proj":
            return [_cut_rows("self_attn.kv_b_proj.weight", (both, latent.key), tp)]
        case "linear_proj":
            return [_columns("self_attn.o_proj.weight", (gpt.hidden, gpt.heads * latent.value), tp)]
    return None


def _of_mixture(name: str, gpt: Gpt, mixture: Mixture, place: MegatronPlace) -> list[MegatronPart] | None:
    if name == "mlp.router.weight":
        return [_whole(mixture.router, mixture.experts, gpt.hidden)]
    if name == "mlp.router.expert_bias" and mixture.bias is not None:
        return [_whole(mixture.bias, mixture.experts)]
    if name == "mlp.shared_experts.gate_weight" and mixture.weighs_shared:
        return [_whole("mlp.shared_expert_gate.weight", 1, gpt.hidden)]
    if name.startswith("mlp.shared_experts."):
        linear = name.removeprefix("mlp.shared_experts.")
        return _feed_forward(
            linear, mixture.shared_expert, mixture.kinds, gpt.hidden, mixture.shared, place.tp
        )
    rank, size = place.ep
    experts = _share(mixture.experts, size, "experts over ep")
    match = re.fullmatch(r"mlp\.experts\.grouped_(fc[12])", name)
    if match is not None:
        every = [
            _of_expert(f"linear_{match[1]}", rank * experts + n, gpt, mixture, place) for n in range(experts)
        ]
        return [part for parts in every for part in parts or ()]
    # One module an expert, or one module with a weight for each.
    match = re.fullmatch(r"mlp\.experts\.(?:local_experts\.(\d+)\.(\w+)\.weight|(\w+)\.weight(\d+))", name)
    if match is None:
        return None
    here, linear = int(match[1] or match[4] or 0), match[2] or match[3]
    return _of_expert(linear, rank * experts + here, gpt, mixture, place)


def _of_expert(
    linear: str, expert: int, gpt: Gpt, mixture: Mixture, place: MegatronPlace
) -> list[MegatronPart] | None:
    prefix = mixture.expert.format(expert=expert)
    return _feed_forward(f"{linear}.weight", prefix, mixture.kinds, gpt.hidden, mixture.ffn, place.expert_tp)


NORMS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
KINDS = ("gate_proj", "up_proj", "down_proj")


def _qkv(kind: str, gpt: Gpt, tp: tuple[int, int]) -> list[MegatronPart] | None:
    """Group by group: the queries that share a key head, then that key head, then its values."""
    if kind not in ("weight", "bias"):
        return None
    width = gpt.hidden if kind == "weight" else None
    groups = _share(gpt.key_heads, tp[1], "key heads over tp")
    queries = _share(gpt.heads, gpt.key_heads, "heads over key heads")
    return [
        _rows(f"self_attn.{which}_proj.{kind}", (gpt.key_heads * rows, width), group * rows, rows)
        for group in range(tp[0] * groups, (tp[0] + 1) * groups)
        for which, rows in (("q", queries * gpt.head_dim), ("k", gpt.head_dim), ("v", gpt.head_dim))
    ]


def _feed_forward(
    name: str, prefix: str, kinds: tuple[str, str, str], hidden: int, ffn: int, tp: tuple[int, int]
) -> list[MegatronPart] | None:
    gate, up, down = (f"{prefix}{kind}.weight" for kind in kinds)
    if name == "linear_fc1.weight":
        rows = _share(ffn, tp[1], "rows over tp")
        return [_rows(part, (ffn, hidden), rows * tp[0], rows) for part in (gate, up)]
    return [_columns(down, (hidden, ffn), tp)] if name == "linear_fc2.weight" else None


def _vocabulary(name: str, gpt: Gpt, place: MegatronPlace) -> list[MegatronPart]:
    rank, size = place.tp
    rows = _share(gpt.padded_vocab, size, "padded vocabulary over tp")
    here = min(rows, gpt.vocab - rows * rank)
    return [_rows(name, (gpt.vocab, gpt.hidden), rows * rank, here)] if here > 0 else []


def _rows(name: str, shape: tuple[int, int | None], start: int, rows: int) -> MegatronPart:
    """Rows of a matrix, or of a vector if its width is None."""
    if shape[1] is None:
        return MegatronPart(name, shape[:1], Box((start,), (rows,)))
    return MegatronPart(name, (shape[0], shape[1]), Box((start, 0), (rows, shape[1])))


def _cut_rows(name: str, shape: tuple[int, int], tp: tuple[int, int]) -> MegatronPart:
    rows = _share(shape[0], tp[1], f"rows of {name} over tp")
    return _rows(name, shape, rows * tp[0], rows)


def _columns(name: str, shape: tuple[int, int], tp: tuple[int, int]) -> MegatronPart:
    columns = _share(shape[1], tp[1], f"columns of {name} over tp")
    return MegatronPart(name, shape, Box((0, columns * tp[0]), (shape[0], columns)))


def _whole(name: str, *shape: int) -> MegatronPart:
    return MegatronPart(name, shape, Box.whole(shape))


def _share(count: int, parts: int, what: str) -> int:
    if count % parts:
        raise ValueError(f"{what}: {count} cannot be cut into {parts} equal parts")
    return count // parts
