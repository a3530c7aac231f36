"""Groups that must not be trained on: some number in them, or made of them, is not finite.

    unsound     by what came with the groups and what other models say of them
    blamed      by what the model in training says of a micro-batch, and by the loss made of that

One such group would poison the sum of gradients of all ranks. So the step it is in is given up before anything moves,
and begun anew without it under `learner.on_bad_batch: skip`: exactly as if the group had not been there.

Axes:  N tokens · R rollouts
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from asyncrl.learner.data.batch import MicroBatch

SHOWN = 5
"""Ordinals named in a message."""


class NotFinite(Exception):  # noqa: N818  (what becomes of it is `learner.on_bad_batch`'s decision)
    """∀ Raised on all ranks at once, before a version's first optimizer step. ordinals: of all ranks' bad groups."""

    def __init__(self, ordinals: Collection[int]) -> None:
        self.ordinals = sorted(ordinals)
        tasks = ", ".join(map(str, self.ordinals[:SHOWN])) + (", …" if len(self.ordinals) > SHOWN else "")
        super().__init__(f"{len(self.ordinals)} groups have values that are not finite: of tasks {tasks}")


def unsound(batch: MicroBatch) -> set[int]:
    """Ordinals of groups with a reward, or under the loss mask a recorded log-prob or a value of a column, that is not
    finite."""
    sound_N = torch.isfinite(batch.behaviour_N)
    for column_N in batch.columns.values():
        sound_N = sound_N & torch.isfinite(column_N)
    return _ordinals(batch, ~sound_N & batch.loss_mask_N) | set(
        batch.ordinals_R[~torch.isfinite(batch.rewards_R)].tolist()
    )


def blamed(
    batch: MicroBatch, said: Sequence[Tensor], loss: Tensor, loss_of: Callable[..., Tensor]
) -> set[int]:
    """Ordinals of the groups that make `said`, [N] each, or the loss not finite; none if all is finite.

    loss_of: (a batch, what the model says of it) → its loss. Where only the sum over groups is not finite, all of them.
    """
    sound = torch.isfinite(loss) & torch.stack([torch.isfinite(values_N).all() for values_N in said]).all()
    if bool(sound):
        return set()
    cpu = torch.device("cpu")
    batch, said = batch.to(cpu), [values_N.detach().to(cpu) for values_N in said]
    sound_N = torch.stack([torch.isfinite(values_N) for values_N in said]).all(0)
    found = _ordinals(batch, ~sound_N)
    if not found:
        found = {
            ordinal
            for ordinal in batch.ordinals_R.unique().tolist()
            if not bool(torch.isfinite(loss_of(*_alone(batch, said, ordinal))))
        }
    return found or set(batch.ordinals_R.tolist())


def _alone(batch: MicroBatch, said: Sequence[Tensor], ordinal: int) -> tuple[MicroBatch, *tuple[Tensor, ...]]:
    rollouts = torch.nonzero(batch.ordinals_R == ordinal)[:, 0].tolist()
    at = batch.tokens_of(rollouts)
    return batch.select(rollouts), *(values_N[at] for values_N in said)


def _ordinals(batch: MicroBatch, bad_N: Tensor) -> set[int]:
    """Of the groups that these tokens belong to."""
    return set(batch.ordinals_R[batch.seq_N[bad_N]].tolist())
