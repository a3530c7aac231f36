"""The models that are carried: Qwen2 shapes of about 100M and 500M parameters, as two FSDP ranks hold them and as a
generator of one or two tensor-parallel ranks needs them."""

from __future__ import annotations

import math

from asyncrl.sync.layout.layout import Box, ParamLayout
from asyncrl.sync.layout.sharding import Local

LEARNERS = 2

SHAPES = {
    # millions of parameters: hidden, intermediate, layers, heads, kv heads, vocabulary (the second is Qwen2.5-0.5B)
    1: (64, 256, 4, 4, 2, 4000),
    100: (640, 1728, 18, 10, 2, 32_000),
    500: (896, 4864, 24, 14, 2, 151_936),
}
HEAD = 64

COLUMNS = ("o_proj.weight", "down_proj.weight")
"""Cut along their input by tensor parallelism; norms are whole on every rank, all else is cut along its output."""


def shapes(millions: int) -> dict[str, tuple[int, ...]]:
    """{checkpoint name: shape}; the tied head is there once."""
    hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[millions]
    named: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name, out in (("q", heads * HEAD), ("k", kv_heads * HEAD), ("v", kv_heads * HEAD)):
            named[f"{at}self_attn.{name}_proj.weight"] = (out, hidden)
            named[f"{at}self_attn.{name}_proj.bias"] = (out,)
        named[f"{at}self_attn.o_proj.weight"] = (hidden, heads * HEAD)
        named |= {f"{at}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        named[f"{at}mlp.down_proj.weight"] = (hidden, inner)
        named |= {f"{at}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return named


def learner_layout(millions: int, rank: int) -> dict[str, ParamLayout]:
    """As FSDP2 shards: rows in even chunks."""
    return {name: _part(shape, 0, LEARNERS, rank) for name, shape in shapes(millions).items()}


def generator_layout(millions: int, rank: int, world: int) -> dict[str, ParamLayout]:
    """As tensor parallelism shards."""
    return {
        name: _part(shape, 1 if name.endswith(COLUMNS) else 0, 1 if "norm" in name else world, rank)
        for name, shape in shapes(millions).items()
    }


def total_bytes(millions: int) -> int:
    return sum(2 * math.prod(shape) for shape in shapes(millions).values())


def _part(shape: tuple[int, ...], axis: int, parts: int, rank: int) -> ParamLayout:
    local = Local((Box.whole(shape),)).chunk(axis, parts, rank % parts)
    return ParamLayout(shape, "bfloat16", local.boxes)
