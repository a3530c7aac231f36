"""Names of the models that a learner may hold, and the type of their losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import Tensor

POLICY: Final = "policy"
REFERENCE: Final = "reference"
MODELS: Final = frozenset({"critic", "cost_critic", "reference", "reward_model", "teacher"})
"""Models beside the policy. Critics compute values, the others log-probs. Reference and teacher are frozen."""

LEARNING: Final = ("critic", "cost_critic", "reward_model")
"""The models beside the policy that are trained, in this order. The reward model may be frozen instead."""

Loss = Callable[..., Tensor]
"""(micro-batch on the device, the model's outputs) → a sum to differentiate.

Outputs are log-probs and entropies, or a critic's values: all [N] float32, 0 where the loss mask is 0."""
