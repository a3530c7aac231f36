"""Fully asynchronous, off-policy, streaming reinforcement learning for language models.

import asyncrl

summary = asyncrl.train("configs/recipes/demo.yaml", tasks=my_tasks, reward=my_reward)
"""

from asyncrl.api import train
from asyncrl.types import Group, Rollout, Scored, Step, Task

__all__ = ["Group", "Rollout", "Scored", "Step", "Task", "train"]
