"""The proximal policy without a forward pass.

Axes:  N tokens
"""

from __future__ import annotations

from torch import Tensor

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
