"""Where tensors go from one rank of a tensor-parallel group to all of them and back, with their gradients.

                 forward          backward         what arrives            what leaves
    copied       nothing          all-reduce       the same everywhere     the same; gradients are terms of a sum
    summed       all-reduce       nothing          terms of a sum          the sum, everywhere
    gathered     all-gather       reduce-scatter   this rank's tokens      all tokens; gradients are terms of a sum
    scattered    reduce-scatter   all-gather       terms, of all tokens    the sum, of this rank's tokens
    shown        all-gather       slice            this rank's tokens      all tokens; gradients are whole everywhere

Source: f, its inverse, g and g-bar of Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198.

Axes:  1 batch · N tokens, a multiple of the ranks · D hidden size
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
    return _Edge.apply(tensor, group, _same, _reduce)


def summed(tensor: Tensor, group: ProcessGroup) -> Tensor:
    return _Edge.apply(tensor, group, _reduce, _same)


def gathered(tensor_1ND: Tensor, group: ProcessGroup) -> Tensor:
    return _Edge.apply(tensor_1ND, group, _gather, _reduce_scatter)


def scattered(tensor_1ND: Tensor, group: ProcessGroup) -> Tensor:
    return _Edge.apply(tensor_1ND, group, _reduce_scatter, _gather)


def shown(tensor_1ND: Tensor, group: ProcessGroup) -> Tensor:
    return _Edge.apply(tensor_1ND, group, _gather, _slice)


Move = Callable[[Tensor, ProcessGroup], Tensor]


class TensorParallelCollectives(NamedTuple):
    """The ways into and out of the matrices of one layer. sequence: between them each rank has its own tokens."""

    group: ProcessGroup
    sequence: bool

    def enter(self, tensor: Tensor) -> Tensor:
        """Before matrices that are cut by columns."""
        return (gathered if self.sequence else copied)(tensor, self.group)

    def leave(self, tensor: Tensor) -> Tensor:
        """After matrices that are cut by rows."""
        return (scattered if self.sequence else summed)(tensor, self.group)

    def show(self, tensor: Tensor) -> Tensor:
        """To what comes after the last layer, which is the same on all ranks."""
        return shown(tensor, self.group) if self.sequence else tensor


class _Edge(torch.autograd.Function):
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
