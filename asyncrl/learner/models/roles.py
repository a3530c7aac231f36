"""Names of the models that a learner may hold, and the type of their losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import Tensor

POLICY: Final = "policy"
MODELS: Final = frozenset({"critic", "cost_critic", "reference", "reward_model", "teacher"})
"""Models beside the policy: critics compute values, the others log-probs. Reference and teacher are frozen."""

LEARNING: Final = ("critic", "cost_critic", "reward_model")
"""Those that learn, in the order in which they do; a reward model that is frozen does not."""

Loss = Callable[..., Tensor]
"""(micro-batch on the device, what the model says of it: log-probs and entropies, of critics values; all [N] float32, 0
where the loss mask is 0) → a sum to differentiate."""
