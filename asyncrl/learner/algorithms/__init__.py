"""The algorithms: pure functions over flat tokens. Importing the package fills the registries of `registry.py`."""

from asyncrl.learner.algorithms import (
    corrections,
    covariance_losses,
    divergence_losses,
    group_advantages,
    ratio_losses,
    rejections,
    return_advantages,
    sequence_losses,
    step_advantages,
)

__all__ = [
    "corrections",
    "covariance_losses",
    "divergence_losses",
    "group_advantages",
    "ratio_losses",
    "rejections",
    "return_advantages",
    "sequence_losses",
    "step_advantages",
]
