"""Groups that differ in one number each."""

from __future__ import annotations

import numpy as np

from asyncrl.types import Group, Rollout, Sampling, Task


def group(ordinal: int = 3, reward: float = 0.5, logprob: float = -0.25, version: int = 2) -> Group:
    rollout = Rollout(
        token_ids=np.array([5, 6, 7]),
        loss_mask=np.array([0, 1, 1], np.int8),
        logprobs=np.array([0, logprob, -0.5], np.float32),
        versions=np.array([-1, version, 3], np.int32),
        finish="stop",
        reward=reward,
    )
    return Group.from_rollouts(Task(ordinal, "1+1="), Sampling(), [rollout, rollout])
