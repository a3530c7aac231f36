"""Fully asynchronous, off-policy, streaming reinforcement learning for language models.

import asyncrl

result = asyncrl.train(model="my-model", tasks=my_rows, reward=my_reward, max_staleness=2)

help(asyncrl.train) has the rest.
"""

from asyncrl.api import TrainResult, train
from asyncrl.types import Group, Rollout, Scored, Step, Task

__all__ = ["Group", "Rollout", "Scored", "Step", "Task", "TrainResult", "train"]
