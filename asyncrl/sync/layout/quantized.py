"""The layout of a version whose projections travel in 8 bits: which parameters, and where their scales lie.

    model.layers.3.mlp.up_proj.weight        [N, K] bfloat16  ▸  [N, K] int8
    model.layers.3.mlp.up_proj.weight_scale                      [N, 1] float32

Names as in checkpoints of compressed-tensors, which vLLM loads. Embeddings, the head, norms, biases, routers, experts,
towers and what multiplies latent attention's cache stay as they are. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from asyncrl.config.rules import require
from asyncrl.sync.layout.layout import Box, Layout, ParamLayout

DTYPES: Mapping[str, str] = {"int8": "int8", "fp8": "float8_e4m3fn"}
"""The dtype of quantized elements, by generator.quantization."""

MODULES = (
    r"(?!.*(?:vision|visual|audio|tower|mtp\.|\.experts\.)).*\.layers\.\d+\."
    r".*\.(?:[qkvo]_proj|qkv_proj|gate_proj|up_proj|gate_up_proj|down_proj)"
)
"""A pattern of names of the modules whose weights are quantized: of the text's layers."""

SCALE = "_scale"
"""The end of a scale's name, after that of its parameter."""

_WEIGHTS = re.compile(rf"{MODULES}\.weight")


def is_quantized(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter of this name in the checkpoint is quantized.

    >>> [is_quantized(f"model.layers.0.{name}.weight", (8, 4)) for name in ("mlp.up_proj", "mlp.gate")]
    [True, False]
    """
    return len(shape) == 2 and _WEIGHTS.fullmatch(name) is not None


def quantized_layout(layout: Layout, quantization: str | None) -> dict[str, ParamLayout]:
    """The layout that a rank of this one sends or takes under generator.quantization: with the scales of its rows."""
    found: dict[str, ParamLayout] = {}
    for name, param in layout.items():
        if quantization is None or not is_quantized(name, param.shape):
            found[name] = param
            continue
        found[name] = ParamLayout(param.shape, DTYPES[quantization], param.boxes)
        rows = dict.fromkeys(scale_box(box) for box in param.boxes)
        found[name + SCALE] = ParamLayout((param.shape[0], 1), "float32", tuple(rows))
    return found


def check_projections(quantized: Collection[str], quantization: str) -> None:
    """Raises ConfigError for a model without parameters that are quantized."""
    rule = "finds no projections (q_proj, up_proj, …) in the model, which alone it quantizes"
    require(bool(quantized), "generator.quantization", quantization, rule, "leave it out")


def scale_box(box: Box) -> Box:
    """The scales of the rows of a box of a parameter."""
    return Box((box.offsets[0], 0), (box.shape[0], 1))
