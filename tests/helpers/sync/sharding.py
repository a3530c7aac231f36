"""Random sharded models, shared by the tests of the weight stream."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise, product

import numpy as np
import torch
from hypothesis import strategies as st

from asyncrl.sync.layout.layout import ITEM_BYTES, Box, Layout, ParamLayout

DTYPES = tuple(ITEM_BYTES)


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """A parameter cut into boxes, `parts[d]` along axis d, as even as it goes, row-major, no empty ones."""
    axes = []
    for size, count in zip(shape, parts, strict=True):
        edges = [size * i // count for i in range(count + 1)]
        axes.append([(a, b - a) for a, b in pairwise(edges) if b > a])
    return [Box(tuple(o for o, _ in cell), tuple(n for _, n in cell)) for cell in product(*axes)]


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
        tensor = torch.zeros(param.shape, dtype=getattr(torch, param.dtype))
        bits = random.integers(0, 2 if param.dtype == "bool" else 256, tensor.nbytes, np.uint8)
        if tensor.numel():
            tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(bits))
        tensors[name] = tensor
    return tensors


def local_tensors(
    layout: Layout, full: Mapping[str, torch.Tensor], *, strided: bool = False
) -> dict[str, list[torch.Tensor]]:
    """One rank's shards of whole parameters, a tensor per box. strided: as views into a larger tensor each."""
    return {
        name: [_shard(full[name][box.slices()], strided) for box in param.boxes]
        for name, param in layout.items()
    }


def _shard(part: torch.Tensor, strided: bool) -> torch.Tensor:
    if not strided or not part.dim():
        return part.clone()
    *most, last = part.shape
    return torch.zeros(*most, last + 1, dtype=part.dtype)[..., 1:].copy_(part)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaNs of equal bits are equal."""
    return bool(
        torch.equal(a.flatten().contiguous().view(torch.uint8), b.flatten().contiguous().view(torch.uint8))
    )
