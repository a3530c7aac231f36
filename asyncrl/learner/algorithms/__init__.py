"""The algorithms: pure functions over flat tokens. Importing the package fills the registries of `registry.py`."""

from asyncrl.learner.algorithms import corrections
from asyncrl.learner.algorithms.advantages import group_advantages, return_advantages, step_advantages
from asyncrl.learner.algorithms.losses import covariance_losses, ratio_losses

__all__ = [
    "corrections",
    "covariance_losses",
    "group_advantages",
    "ratio_losses",
    "return_advantages",
    "step_advantages",
]
