"""The proximal policy π_p: the centre of the trust region.

Axes:  N tokens
"""

from __future__ import annotations

from torch import Tensor

from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.types import Version


def loglinear_proximal(behaviour_N: Tensor, logp_N: Tensor, versions_N: Tensor, version: Version) -> Tensor:
    """log π_p ≈ log μ + α(sg(log π) − log μ): the policy one version back, on the line from μ to π.

    A token of version b, trained at `version` v, has α = (v − 1 − b) / (v − b): 0 for a token up to one version old,
    whose π_p is μ, and nearer to 1 the older it is. Source: A-3PO, arXiv 2512.06547, and AReaL's prox_logp_method
    'loglinear'.
    """
    age_N = (version - versions_N).clamp(min=1)
    alpha_N = 1 - 1 / age_N.to(logp_N.dtype)
    return behaviour_N + alpha_N * (logp_N.detach() - behaviour_N)


def proximal(batch: MicroBatch, now_N: Tensor, config: AlgorithmConfig, version: Version) -> Tensor:
    """log π_p [N], as `algorithm.proximal` defines it.

    Args:
        now_N: Log-probs of the policy as it is, without gradient. They are those of the version's start where the batch
            has no column `proximal`.
    """
    if config.proximal == "behaviour":
        return batch.behaviour_N
    if config.proximal == "loglinear":
        return loglinear_proximal(batch.behaviour_N, now_N, batch.versions_N, version)
    return batch.columns.get("proximal", now_N)
