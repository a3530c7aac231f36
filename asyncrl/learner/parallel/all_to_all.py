"""All-to-all of rows, which gradients take back the way they came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def all_to_all(
    rows: Tensor,
    group: ProcessGroup,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
) -> Tensor:
    """`sent[i]` rows go to rank i of the group, in this order, `received[i]` come from it; neither: equally many."""
    share = [len(rows) // group.size()] * group.size()
    return cast(Tensor, _AllToAll.apply(rows, group, list(sent or share), list(received or share)))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _move(rows, group, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _move(grad, ctx.group, ctx.received, ctx.sent), None, None, None


def _move(rows: Tensor, group: ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
