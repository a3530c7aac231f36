"""Sums of gradients over ranks under FSDP2, float32 at least from the first addition on.

    backward of a micro-batch ─▸ gradient of whole parameters ──┐
                                                                │ learner.reduce_gradients
    micro_batch   reduce-scatter now; a rank adds up its shard ◂┤
    step          a rank adds up all of it; reduce-scatter at   │
                  the optimizer step ◂──────────────────────────┘

The second way sends gradients once a step, however many micro-batches it has. It costs 4 bytes for each parameter that
a rank computes with, on every rank.

FSDP2 casts each sum to the parameter's dtype, which rounds every micro-batch of a bfloat16 model. It has no setting for
that: `Reduction` sets the dtype in its parameter groups, and allows float32 gradients of such parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


class Reduction:
    """The sums of the gradients of one network on this rank.

    parts  the network, or its pipeline stages; those that FSDP does not shard have nothing to sum
    once   whether ranks sum once a step; pipelines sum once for each schedule by themselves
    """

    def __init__(self, parts: Sequence[nn.Module], once: bool) -> None:
        self._roots = [part for part in parts if isinstance(part, FSDPModule)]
        self._once, self._pending = once, False
        for root in self._roots:
            _state(root)._lazy_init()  # else the first forward sets the dtype again
        for group in self._groups():
            if group._orig_dtype is not None:  # None: nothing in it is trained
                group._orig_dtype = torch.promote_types(group._orig_dtype, torch.float32)

    def begin(self) -> None:
        """To be called before the passes of some micro-batches."""
        if self._once:
            self._pending = True
            for root in self._roots:
                root.set_requires_gradient_sync(False)

    def finish(self) -> None:
        """Collective: sum what was added since the last call."""
        if not self._pending:
            return
        self._pending = False
        for root in self._roots:
            root.set_requires_gradient_sync(True)
            for group in _groups(root):
                group.post_backward()
            _state(root)._root_post_backward_final_callback()  # this stream waits for the sums

    def forget(self) -> None:
        """Drop what is not summed yet."""
        self._pending = False
        for group in self._groups():
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                    whole.grad = None

    def _groups(self) -> Iterator[Any]:
        for root in self._roots:
            yield from _groups(root)


def _state(root: FSDPModule) -> Any:
    return cast(Any, fully_shard).state(root)


def _groups(root: FSDPModule) -> Iterator[Any]:
    """FSDP's groups of parameters below a root."""
    for state in _state(root)._state_ctx.all_states:
        yield from groups_in(state)


def groups_in(state: Any) -> list[Any]:
    """The groups of parameters of one FSDP module: several in torch 2.13, at most one in 2.11."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
