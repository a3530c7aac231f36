"""Collectives between the ranks of a group that are differentiable.

                 forward          backward         input                     output
    copied       nothing          all-reduce       equal on all ranks        the same; gradients are terms of a sum
    summed       all-reduce       nothing          terms of a sum            the sum, on all ranks
    gathered     all-gather       reduce-scatter   this rank's tokens        all tokens; gradients are terms of a sum
    scattered    reduce-scatter   all-gather       terms, for all tokens     the sum, for this rank's tokens
    replicated   all-gather       slice            this rank's tokens        all tokens; gradients are whole
    all_to_all   all-to-all       all-to-all       rows for other ranks      rows from other ranks

Source: f, its inverse, g and g-bar of Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198.

Axes:  1 batch · N tokens, a multiple of the ranks · D hidden size
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # their names before torch 2.13
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single


def copied(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return _Collective.apply(tensor, group, _same, _reduce)


def summed(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return _Collective.apply(tensor, group, _reduce, _same)


def gathered(tensor_1ND: Tensor, group: ProcessGroup) -> Tensor:
    return _Collective.apply(tensor_1ND, group, _gather, _reduce_scatter)


def scattered(tensor_1ND: Tensor, group: ProcessGroup) -> Tensor:
    return _Collective.apply(tensor_1ND, group, _reduce_scatter, _gather)


def replicated(tensor_1ND: Tensor, group: ProcessGroup) -> Tensor:
    return _Collective.apply(tensor_1ND, group, _gather, _slice)


Move = Callable[[Tensor, ProcessGroup], Tensor]


class TensorParallelCollectives(NamedTuple):
    """The collectives before and after the matrices of one layer. sequence: between layers each rank has other
    tokens."""

    group: ProcessGroup
    sequence: bool

    def enter(self, tensor: Tensor) -> Tensor:
        """To be called before matrices that are cut by columns."""
        return (gathered if self.sequence else copied)(tensor, self.group)

    def leave(self, tensor: Tensor) -> Tensor:
        """To be called after matrices that are cut by rows."""
        return (scattered if self.sequence else summed)(tensor, self.group)

    def replicate(self, tensor: Tensor) -> Tensor:
        """To be called after the last layer: all ranks compute the same with its output."""
        return replicated(tensor, self.group) if self.sequence else tensor


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, there: Move, back: Move) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.back(grad, ctx.group), None, None, None


def _same(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return tensor.view_as(tensor)


def _reduce(tensor: Tensor, group: ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(tensor: Tensor, group: ProcessGroup) -> Tensor:
    _, tokens, *rest = tensor.shape
    every = tensor.new_empty(1, tokens * group.size(), *rest)
    all_gather_single(every[0], tensor[0].contiguous(), group=group)
    return every


def _reduce_scatter(tensor: Tensor, group: ProcessGroup) -> Tensor:
    _, tokens, *rest = tensor.shape
    mine = tensor.new_empty(1, tokens // group.size(), *rest)
    reduce_scatter_single(mine[0], tensor[0].contiguous(), group=group)
    return mine


def _slice(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return tensor.chunk(group.size(), 1)[group.rank()].contiguous()


def all_to_all(
    rows: Tensor,
    group: ProcessGroup,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
) -> Tensor:
    """Exchange rows: `sent[i]` go to rank i of the group, `received[i]` come from it. Without sizes all are equal."""
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
