"""Predicted cuts of parameters for tensor and expert parallelism, by Hugging Face names, where no model is loaded.

    column   q, k, v, gate, up, embeddings, head     rows over tp
    row      o, down                                 columns over tp; scales of rows on each
    neither  norms, routers, low-rank downs (MLA)    every tp rank has them
    expert   …experts.17.…                           over tp like the others, or whole at one rank of ep

This holds for Llama, Mistral, Mixtral, Qwen 2 and 3, their mixtures, DeepSeek V2 and V3, GLM, Phi-3, GPT-2. Several
ranks share key and value heads of which there are fewer than ranks. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.sync.layout.sharding import MeshLayout, RankMesh, Sharding, Split

COLUMN = frozenset(
    {
        *("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "qkv_proj"),
        *("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"),
        *("embed_tokens", "lm_head", "wte"),
    }
)
ROW = frozenset({"o_proj", "down_proj", "w2"})
TRANSPOSED = {"c_attn": 1, "c_fc": 1, "c_proj": 0}
"""The dimension that is cut. GPT-2 stores weights as [in, out]; a bias lies along out."""

EXPERT = re.compile(r"\.experts\.(\d+)\.")

Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Full shape and dtype of each parameter, by checkpoint name."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Rows of the query, key and value heads together, for packed ones; heads of keys and values."""

    query_rows: int
    key_rows: int
    key_heads: int


@dataclass(frozen=True, slots=True)
class Plane:
    """The axes of a mesh, by the parameters that they cut. Each cuts by the product of its axes; none: not at all.

    fsdp: of ordinary parameters, after `tp` · ep: experts to whole ranks · expert_fsdp, expert_tp: of one expert
    """

    tp: tuple[str, ...] = ()
    fsdp: tuple[str, ...] = ()
    ep: tuple[str, ...] = ()
    expert_tp: tuple[str, ...] = ()
    expert_fsdp: tuple[str, ...] = ()


def tensor_split(
    name: str, shape: tuple[int, ...], mesh: RankMesh, axes: tuple[str, ...], heads: Heads
) -> Split | None:
    """The cut of a parameter over `axes` by tensor parallelism; None: it is not cut."""
    *_, module, kind = name.split(".") if "." in name else ("", name)
    ranks = mesh.count(axes)
    if ranks == 1:
        return None
    if module in TRANSPOSED:
        dim = TRANSPOSED[module] if kind == "weight" else 0
        if kind == "bias" and module == "c_proj":
            return None
        return Split(axes, dim, blocks=(shape[dim] // 3,) * 3 if module == "c_attn" else ())
    if module in ROW:
        return Split(axes, 1) if len(shape) > 1 and shape[1] > 1 else None
    if module not in COLUMN:
        return None
    if module in ("k_proj", "v_proj") and heads.key_heads < ranks:
        return Split(axes, 0, parts=heads.key_heads)
    if module == "qkv_proj":
        return Split(axes, 0, blocks=(heads.query_rows, heads.key_rows, heads.key_rows))
    return Split(axes, 0, blocks=(shape[0] // 2,) * 2 if module == "gate_up_proj" else ())


def experts_of(shapes: Shapes) -> int:
    """Experts of one layer; 0 for a dense model."""
    return max((int(found[1]) + 1 for name in shapes if (found := EXPERT.search(name))), default=0)


def mesh_layout(shapes: Shapes, mesh: RankMesh, plane: Plane, heads: Heads) -> MeshLayout:
    """The layouts of all ranks of a mesh.

    Raises ValueError where the experts cannot be dealt out evenly to the ranks of `ep`.
    """
    ep, experts = mesh.count(plane.ep), experts_of(shapes)
    if experts % ep:
        raise ValueError(f"{experts} experts cannot be dealt out evenly to {ep} ranks")

    def sharding(name: str, shape: tuple[int, ...], dtype: str) -> Sharding:
        expert = EXPERT.search(name)
        tp, fsdp = (plane.expert_tp, plane.expert_fsdp) if expert else (plane.tp, plane.fsdp)
        tensor = tensor_split(name, shape, mesh, tp, heads)
        splits = [tensor] if tensor else []
        if mesh.count(fsdp) > 1 and shape:
            splits.append(Split(fsdp))
        at = mesh.unravel(plane.ep, int(expert[1]) // (experts // ep)) if expert else ()
        return Sharding(shape, dtype, tuple(splits), at)

    return MeshLayout(mesh, {name: sharding(name, *form) for name, form in shapes.items()})
