"""Groups that must not be trained on: a number in them, or computed from them, is not finite.

    nonfinite_inputs    in what came with the groups, or in other models' columns
    nonfinite_outputs   in the outputs of the model in training for a micro-batch, or in its loss

One such group would spoil the sum of gradients of all ranks. Its step is abandoned before anything moves and, under
`learner.on_bad_batch: skip`, restarted without it: exactly as if the group had not been there.

Axes:  N tokens · R rollouts
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

import torch
from torch import Tensor

from asyncrl.learner.data.batch import MicroBatch

NOT_FINITE: Final = "not_finite"
"""Why groups are dropped."""

SHOWN = 5
"""Ordinals named in a message."""


class NonFiniteGroups(Exception):  # noqa: N818  (`learner.on_bad_batch` decides what follows)
    """Raised on all ranks at once, before a version's first optimizer step. ordinals: of all ranks' bad groups."""

    def __init__(self, ordinals: Collection[int]) -> None:
        self.ordinals = sorted(ordinals)
        tasks = ", ".join(map(str, self.ordinals[:SHOWN])) + (", …" if len(self.ordinals) > SHOWN else "")
        super().__init__(f"{len(self.ordinals)} groups have values that are not finite: of tasks {tasks}")


def nonfinite_inputs(batch: MicroBatch) -> set[int]:
    """Ordinals of groups with a reward, or under the loss mask a recorded log-prob or a column, that is not finite."""
    finite_N = torch.isfinite(batch.behaviour_N)
    for column in batch.columns.values():
        if column.is_floating_point():
            finite_N = finite_N & _finite(column)
    bad_rewards = batch.ordinals_R[~torch.isfinite(batch.rewards_R)].tolist()
    return _ordinals(batch, ~finite_N & batch.loss_mask_N) | set(bad_rewards)


def nonfinite_outputs(
    batch: MicroBatch, outputs: Sequence[Tensor], loss: Tensor, loss_of: Callable[..., Tensor]
) -> set[int]:
    """Ordinals of the groups with outputs, [N] or [N, K] each, or a loss that are not finite; all of them if only the
    sum over groups is not. All on the CPU, without gradient. loss_of: (batch, *outputs) → its loss."""
    finite = torch.isfinite(loss) & torch.stack([torch.isfinite(values).all() for values in outputs]).all()
    if bool(finite):
        return set()
    finite_N = torch.stack([_finite(values) for values in outputs]).all(0)
    found = _ordinals(batch, ~finite_N)
    if not found:
        found = {
            ordinal
            for ordinal in batch.ordinals_R.unique().tolist()
            if not bool(torch.isfinite(loss_of(*_alone(batch, outputs, ordinal))))
        }
    return found or set(batch.ordinals_R.tolist())


def _alone(
    batch: MicroBatch, outputs: Sequence[Tensor], ordinal: int
) -> tuple[MicroBatch, *tuple[Tensor, ...]]:
    rollouts = torch.nonzero(batch.ordinals_R == ordinal)[:, 0].tolist()
    at = batch.tokens_of(rollouts)
    return batch.select(rollouts), *(values[at] for values in outputs)


def _finite(values: Tensor) -> Tensor:
    """[N] bool, of [N] or [N, K]."""
    finite = torch.isfinite(values)
    return finite if finite.ndim == 1 else finite.all(1)


def _ordinals(batch: MicroBatch, bad_N: Tensor) -> set[int]:
    """The ordinals of the groups that these tokens belong to."""
    return set(batch.ordinals_R[batch.seq_N[bad_N]].tolist())
