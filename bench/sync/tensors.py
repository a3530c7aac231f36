"""The weights themselves: drawn by name, so that every process can say what a version should look like."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from asyncrl.sync.layout.layout import Layout

STD = 0.02

LR = 1e-6
"""AdamW moves a weight by about this much in a step."""


def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """bf16, the same in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randn(shape, generator=generator) * STD).to(torch.bfloat16)


def shards_of(layout: Layout) -> dict[str, torch.Tensor]:
    return {name: drawn(name, p.shape)[p.boxes[0].slices()].contiguous() for name, p in layout.items()}


def empty_shards(layout: Layout) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(p.boxes[0].shape, dtype=torch.bfloat16) for name, p in layout.items()}


class Drift:
    """Weights that move by LR in each step, always in the same direction, as masters in float32."""

    def __init__(self, live: Mapping[str, torch.Tensor]) -> None:
        # Masters lie anywhere between two bf16 numbers.
        self._masters = {
            name: tensor.float() + 1e-5 * torch.randn(tensor.shape) for name, tensor in live.items()
        }
        self._moves = {name: LR * torch.randn(tensor.shape).sign() for name, tensor in live.items()}
        self._live = live

    def step(self) -> None:
        for name, master in self._masters.items():
            self._live[name].copy_(master.add_(self._moves[name]))


def check(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Against what the name says; RuntimeError."""
    for name, param in layout.items():
        if not torch.equal(tensors[name], drawn(name, param.shape)[param.boxes[0].slices()]):
            raise RuntimeError(f"{name} arrived wrong")
