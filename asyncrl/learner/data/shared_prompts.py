"""Prompts that several segments of a micro-batch have: a forward computes each of them once.

    token_ids_N   5 6 7 8 | 5 6 9 | 5 6 4      three answers to the prompt 5 6
    source_N      0 1 2 3 | 0 1 6 | 0 1 9      the token whose state each token has
    computed      5 6 7 8       9       4      10 tokens become 6

A token's state depends on the tokens of its segment up to it alone, so results are equal but for rounding. With groups
of S answers of A tokens to prompts of P, S · (P + A) tokens become P + S · A. PrefixGrouper (arXiv:2506.05433) does
the same with padded groups.

Axes:  N packed tokens · D segments
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.learner.data.batch import MicroBatch


class Prompts(NamedTuple):
    """number_D: equal for equal prompts, with equal images and experts · length_D: tokens before the first one that the
    policy made; 0 where it made none."""

    number_D: list[int]
    length_D: list[int]

    @staticmethod
    def of(batch: MicroBatch) -> Prompts:
        """Those of a batch on the CPU."""
        columns = [batch.token_ids_N, batch.media_N]
        columns += [batch.columns["experts"]] if "experts" in batch.columns else []
        arrays = [column.numpy() for column in columns]
        start_D = torch.nonzero(batch.position_ids_N == 0)[:, 0].numpy()
        made_N = np.where(batch.loss_mask_N.numpy(), np.arange(batch.tokens), batch.tokens)
        first_D = np.minimum.reduceat(made_N, start_D)
        length_D = np.where(first_D < batch.tokens, first_D - start_D, 0)
        numbers: dict[tuple[bytes, ...], int] = {}
        number_D = [
            numbers.setdefault(
                tuple(array[start : start + length].tobytes() for array in arrays), len(numbers)
            )
            for start, length in zip(start_D, length_D, strict=True)
        ]
        return Prompts(number_D, length_D.tolist())

    def repeated(self) -> Iterator[tuple[int, int]]:
        """(segment, the one before it that has the same prompt first), for each that repeats one."""
        first: dict[int, int] = {}
        for segment, number in enumerate(self.number_D):
            if first.setdefault(number, segment) != segment and self.length_D[segment]:
                yield segment, first[number]


def sources(batch: MicroBatch) -> Tensor | None:
    """[N]: the token whose state each token has; None where nothing is repeated. On the CPU."""
    prompts = Prompts.of(batch)
    start_D = np.cumsum([0, *batch.segment_lengths])
    source_N = np.arange(batch.tokens)
    for segment, first in prompts.repeated():
        length, start = prompts.length_D[segment], start_D[segment]
        source_N[start : start + length] = np.arange(start_D[first], start_D[first] + length)
    repeats = bool((source_N != np.arange(batch.tokens)).any())
    return torch.from_numpy(source_N) if repeats else None


def computed_tokens(batch: MicroBatch, source_N: Tensor | None) -> int:
    """Those that a forward with these `sources` computes."""
    return batch.tokens if source_N is None else int((source_N == torch.arange(batch.tokens)).sum())


def repeated_lengths(batch: MicroBatch) -> list[int]:
    """The tokens of each prompt that a forward does not compute again."""
    prompts = Prompts.of(batch)
    return [prompts.length_D[segment] for segment, _ in prompts.repeated()]


class Need(NamedTuple):
    """The tokens of a rollout. own: without prompts · prompts: number ▸ tokens, which a forward computes once · whole:
    all of them, prompts each time"""

    own: int
    prompts: dict[int, int]
    whole: int


def needs_of(batch: MicroBatch, rollouts: Sequence[int]) -> list[Need]:
    """Those of these rollouts."""
    prompts = Prompts.of(batch)
    ends = torch.bincount(batch.seq_N[batch.position_ids_N == 0], minlength=batch.rollouts).cumsum(0).tolist()
    segments_R = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    return [
        Need(
            batch.lengths_R[r] - sum(prompts.length_D[d] for d in segments_R[r]),
            {prompts.number_D[d]: prompts.length_D[d] for d in segments_R[r]},
            batch.lengths_R[r],
        )
        for r in rollouts
    ]
