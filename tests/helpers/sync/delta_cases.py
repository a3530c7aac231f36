"""A model that changes as one under training does: a few of its bits, mostly the lowest."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sharding import full_tensors
from stream_cases import Learner

import asyncrl.sync.delta.link_speed as link_speed
from asyncrl.sync.delta.delta import add
from asyncrl.sync.delta.link_speed import LinkSpeed
from asyncrl.sync.delta.records import read

DRIFTING = {"embed": ((128, 64), "bfloat16"), "norm": ((64,), "float32"), "head": ((96, 64), "bfloat16")}


def stepped(full: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """The next version: of this share of the bytes the lowest bit is another."""
    random = torch.Generator().manual_seed(seed)
    new = {}
    for name, tensor in full.items():
        bits = tensor.clone().view(-1).view(torch.uint8)
        bits ^= (torch.rand(len(bits), generator=random) < share).to(torch.uint8)
        new[name] = bits.view(tensor.dtype).view(tensor.shape)
    return new


FORMS = {"whole": (0.0, 0.0), "changes": (math.inf, 0.0), "deflated": (math.inf, math.inf)}
"""Forms of a version, with the speeds of a link below which changes are sent, and are deflated."""


def links_have(form: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """Let every link get this form. Returns sizes and seconds of whole versions, as they are measured."""
    fast, deflates = FORMS[form]
    monkeypatch.setattr(link_speed, "FAST_BYTES_S", fast)
    monkeypatch.setattr(link_speed, "DEFLATE_BYTES_S", deflates)
    monkeypatch.setattr(link_speed, "LATENCY_S", 0.0)
    measured: list[tuple[int, float]] = []
    real = LinkSpeed.of

    def spied(size: int, seconds: float) -> LinkSpeed:
        measured.append((size, seconds))
        return real(size, seconds)

    monkeypatch.setattr(LinkSpeed, "of", spied)
    return measured


def apply_delta(staged: torch.Tensor, record: torch.Tensor) -> None:
    """Make the old version, in place, into the new one."""
    (changes,) = read(record, [(staged.numel(), staged.element_size())])
    add(staged, changes)


class DriftingLearner(Learner):
    """Each version differs a little from the one before."""

    def __init__(self, world: int, config: Any, share: float = 0.02) -> None:
        self.share = share
        super().__init__(DRIFTING, world, config)

    def at(self, version: int) -> dict[str, torch.Tensor]:
        full = full_tensors(self.whole)
        for step in range(version):
            full = stepped(full, self.share, step)
        return full
