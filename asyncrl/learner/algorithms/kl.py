"""KL divergence to another policy, estimated at the tokens that were sampled.

Source of the estimators: http://joschu.net/blog/kl-approx.html. With r = π_other / π: k1 = −log r, k2 = ½ log² r,
k3 = r − 1 − log r.

Axes:  N tokens
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.learner.algorithms.losses.policy_loss import log_ratio

MAX_K3 = 10.0


def kl(logp_N: Tensor, other_N: Tensor, form: str) -> Tensor:
    """[N]: the estimate of KL(π‖π_other) at each token, with the gradient of logp_N.

    form: k1, k2, k3, abs. k1+ and k3+ have that value and the gradient of k2, which alone is unbiased on the policy's
    own samples. In k3 the log-ratio is clamped to ±20 and the result to 10, as in verl.
    """
    if form.endswith("+"):
        gradient_N = kl(logp_N, other_N, "k2")
        return gradient_N - gradient_N.detach() + kl(logp_N, other_N, form[:-1]).detach()
    if form == "k1":
        return logp_N - other_N
    if form == "abs":
        return (logp_N - other_N).abs()
    if form == "k2":
        return 0.5 * (logp_N - other_N) ** 2
    log_r_N = log_ratio(other_N, logp_N)
    return (torch.expm1(log_r_N) - log_r_N).clamp(max=MAX_K3)  # expm1: near 0 the 1 would eat the digits of r
