"""Which rollouts have succeeded: for the reward model, which learns to tell them, and the LM loss, which imitates them.

Axes:  R rollouts
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from asyncrl.learner.algorithms.advantages.segments import column
from asyncrl.learner.data.batch import MicroBatch

SUCCESS: Final = 0.5
"""A rollout with a reward above this, before any shaping, has succeeded."""


def succeeded(batch: MicroBatch) -> Tensor:
    """[R] bool. Reads the column `outcome`: the reward before any shaping, at each token of the rollout.

    Raises TrainingError for a batch without it.
    """
    return column(batch, "outcome")[batch.position_ids_N == 0] > SUCCESS
