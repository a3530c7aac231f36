"""The experts that a model's routers choose: engines record them, the learner replays them (R3, arXiv:2510.11370).

    router's scores [n, E] ─▸ topk ─▸ the engine notes the choice         column `experts` of the rollout
                              topk ◂─ the learner puts it in its place, and takes its own scores of these experts

Engine and learner round different sums. Where two experts have nearly the same score, one of them takes another expert,
and the log-probs of the token and of those after it differ by far more than rounding does. A replayed choice has no
gradient, as an own one has none; the scores have theirs.

Axes:  n tokens of a forward · E experts · k experts of each token · W numbers of each token: k for each layer
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from asyncrl.types import COLUMNS, UNROUTED, Array

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names that configurations give to the number of experts."""


class RouterShape(NamedTuple):
    """layers: all of the model, those without a router too."""

    layers: int
    experts: int
    top_k: int

    @property
    def width(self) -> int:
        """W."""
        return self.layers * self.top_k

    def of_layer(self, number: int) -> slice:
        """The numbers of one layer among the W."""
        return slice(number * self.top_k, (number + 1) * self.top_k)

    @staticmethod
    def of(config: PretrainedConfig) -> RouterShape | None:
        """The shape that a configuration names; None for one without experts."""
        text = config.get_text_config()
        experts = next((n for n in (getattr(text, name, None) for name in EXPERTS) if n), None)
        top_k = getattr(text, "num_experts_per_tok", None)
        return RouterShape(text.num_hidden_layers, experts, top_k) if experts and top_k else None


class RouterChoice(TorchFunctionMode):
    """While it is entered, one layer's router takes the experts in `given_nk`, its own where UNROUTED stands; made_nk:
    those it took, None before it ran.

    A router calls topk for the k best of all E experts once, and for nothing else on a matrix of this width.
    """

    def __init__(self, shape: RouterShape, given_nk: Tensor | None = None) -> None:
        super().__init__()
        self._shape, self._given_nk = shape, given_nk
        self.made_nk: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        best = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or not self._of_router(args[0], best.indices):
            return best
        self.made_nk = best.indices
        if self._given_nk is None:
            return best
        self.made_nk = torch.where(self._given_nk == UNROUTED, best.indices, self._given_nk)
        return torch.return_types.topk((args[0].gather(1, self.made_nk), self.made_nk))

    def _of_router(self, scores: Tensor, best: Tensor) -> bool:
        return scores.dim() == 2 and (scores.shape[1], best.shape[1]) == self._shape[1:]


def replay_experts(layers: Iterable[nn.Module], shape: RouterShape) -> None:
    """Let layers take a keyword `experts`, the column [n, W] of their tokens; without it they choose themselves."""
    for number, layer in enumerate(layers):
        layer.forward = partial(_replayed, layer.forward, shape, number)


def _replayed(
    forward: Callable[..., Any],
    shape: RouterShape,
    number: int,
    *args: Any,
    experts: Tensor | None = None,
    **options: Any,
) -> Any:
    if experts is None:
        return forward(*args, **options)
    with RouterChoice(shape, experts[:, shape.of_layer(number)].long()):
        return forward(*args, **options)


class ExpertRecorder:
    """Notes the experts of each forward of these layers. `take` after each."""

    def __init__(self, layers: Iterable[nn.Module], shape: RouterShape) -> None:
        self.shape = shape
        self._made: dict[int, Tensor] = {}
        for number, layer in enumerate(layers):
            layer.forward = partial(self._recorded, layer.forward, number)

    @classmethod
    def of(cls, layers: Iterable[nn.Module], config: PretrainedConfig) -> Self | None:
        """The recorder of a model; None for one without experts."""
        shape = RouterShape.of(config)
        return shape and cls(layers, shape)

    def take(self, tokens: int) -> Array:
        """[n, W]: of the last forward's tokens; UNROUTED in layers without a router. Waits for a GPU once."""
        rows = np.full((tokens, self.shape.width), UNROUTED, COLUMNS["experts"])
        if self._made:
            made_nlk = torch.stack(list(self._made.values()), 1).cpu().numpy()
            for number, made_nk in zip(self._made, made_nlk.swapaxes(0, 1), strict=True):
                rows[:, self.shape.of_layer(number)] = made_nk
        self._made.clear()
        return rows

    def _recorded(self, forward: Callable[..., Any], number: int, *args: Any, **options: Any) -> Any:
        with RouterChoice(self.shape) as choice:
            result = forward(*args, **options)
        if choice.made_nk is not None:
            self._made[number] = choice.made_nk
        return result
