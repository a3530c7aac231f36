"""The learning rate of each step: a pure function of the step's number."""

from __future__ import annotations

import math

from asyncrl.config.sections.learner import OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warm-up from lr / warmup_steps, then the schedule,
    which reaches lr · min_lr_ratio at the last step.

    >>> config = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="linear", min_lr_ratio=0.0)
    >>> [learning_rate(k, 6, config) for k in range(6)]
    [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    peak = max(0, config.warmup_steps - 1)
    progress = min(1.0, (step - peak) / max(1, steps - 1 - peak))
    remaining = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)
