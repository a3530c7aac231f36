"""The weights themselves: drawn by name, so that every process can say what a version should look like."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from asyncrl.sync.layout.layout import Layout

STD = 0.02


def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """bf16, the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randn(shape, generator=generator) * STD).to(torch.bfloat16)


def shards_of(layout: Layout) -> dict[str, torch.Tensor]:
    return {name: drawn(name, p.shape)[p.boxes[0].slices()].contiguous() for name, p in layout.items()}


def empty_shards(layout: Layout) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(p.boxes[0].shape, dtype=torch.bfloat16) for name, p in layout.items()}


def check(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Against what the name says; RuntimeError."""
    for name, param in layout.items():
        if not torch.equal(tensors[name], drawn(name, param.shape)[param.boxes[0].slices()]):
            raise RuntimeError(f"{name} arrived wrong")
