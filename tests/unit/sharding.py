"""Random sharded models, shared by the tests of the weight stream."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from asyncrl.sync.layout import Box, Layout, ParamLayout, grid

DTYPES = ("float32", "bfloat16", "int64", "uint8")


@st.composite
def sharded_models(draw: st.DrawFn) -> tuple[list[Layout], Layout]:
    """(layouts of the learner's ranks, of a generator): cut along random axes, some replicated."""
    ranks = draw(st.integers(1, 4))
    sources: list[dict[str, ParamLayout]] = [{} for _ in range(ranks)]
    destination = {}
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        boxes = grid(shape, tuple(draw(st.integers(1, 3)) for _ in shape))
        copies = draw(st.integers(1, ranks))
        held: list[list[Box]] = [[] for _ in range(ranks)]
        for number, box in enumerate(boxes):
            for copy in range(copies):
                held[(number + copy) % ranks].append(box)
        for rank in range(ranks):
            sources[rank][f"p{index}"] = ParamLayout(shape, dtype, tuple(held[rank]))
        needed = grid(shape, tuple(draw(st.integers(1, 3)) for _ in shape))
        chosen = draw(st.lists(st.sampled_from(needed), unique=True))
        destination[f"p{index}"] = ParamLayout(shape, dtype, tuple(chosen))
    return list(sources), destination


def full_tensors(layout: Layout, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random bits for every whole parameter."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, param in layout.items():
        dtype = getattr(torch, param.dtype)
        count = int(np.prod(param.shape)) * dtype.itemsize
        tensors[name] = (
            torch.from_numpy(random.integers(0, 256, count, np.uint8)).view(dtype).view(param.shape)
        )
    return tensors


def local_tensors(layout: Layout, full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One rank's shards of whole parameters: a box's shape, or flat for several boxes."""
    local = {}
    for name, param in layout.items():
        parts = [full[name][box.slices()] for box in param.boxes]
        if len(parts) == 1:
            local[name] = parts[0].clone()
        elif parts:
            local[name] = torch.cat([part.reshape(-1) for part in parts])
    return local


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaNs of equal bits are equal."""
    return bool(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))
