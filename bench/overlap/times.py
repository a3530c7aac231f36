"""The times of scripted stages, and the shortest time that they allow. Pure.

A sample has length(ordinal, index) tokens, and holds one slot of an engine for `token_s` each. The learner works
`train_token_s` for each token of the policy, and `step_s` for each version.
"""

from __future__ import annotations

import heapq
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Self

import numpy as np

from asyncrl.counter_rng import stream_key

VARIABLE = "ASYNCRL_BENCH_TIMES"
"""The environment variable by which processes of a run get their times."""

PROMPT_TOKENS = 2
"""The length of the prompts of overlap.yaml's tasks."""


@dataclass(frozen=True, slots=True)
class Times:
    """Lengths are log-normal, cut off at `longest`: median `median` tokens, log(length) with deviation `spread`.

    With spread 1, one sample in a hundred is ten times as long as the median. queued: whether the learner's passes run
    on a device beside its thread, as on a GPU, or in its thread, as on a CPU
    """

    median: float = 24.0
    spread: float = 1.0
    longest: int = 128
    token_s: float = 0.01
    train_token_s: float = 0.0
    step_s: float = 0.0
    queued: bool = False

    @classmethod
    def of_this_process(cls) -> Self:
        """Raises KeyError outside of the bench."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    def length(self, ordinal: int, index: int) -> int:
        """Tokens of one sample of a task, at least 1."""
        return _length(self, ordinal, index)

    def lengths(self, ordinals: Iterable[int], samples: int) -> list[list[int]]:
        """The tokens of each sample of each task."""
        return [[self.length(ordinal, index) for index in range(samples)] for ordinal in ordinals]

    def mean_length(self) -> float:
        """The mean over many samples."""
        return float(np.mean([self.length(ordinal, 0) for ordinal in range(4096)]))

    def train_s(self, tokens: float) -> float:
        """The learner's work for a version of so many tokens."""
        return self.train_token_s * tokens + self.step_s


@cache
def _length(times: Times, ordinal: int, index: int) -> int:
    normal = np.random.default_rng(int(stream_key(0, ordinal, index))).standard_normal()
    return max(1, min(times.longest, round(times.median * math.exp(times.spread * float(normal)))))


def synchronous_s(
    times: Times, groups: Sequence[Sequence[int]], slots: int, claim_tokens: int | None = None
) -> float:
    """The shortest time of one version at max_staleness 0, in seconds: samples take slots in their order, and a group
    can be trained once all its samples have ended.

    Args:
        groups: the lengths of each group's samples.
        slots: of all engines together.
        claim_tokens: the learner takes the groups in the order of their tasks, in claims that are as large as so many
            tokens allow, prompts included, as it does so that runs repeat bit for bit. None: it takes each group when
            that ends.

    >>> synchronous_s(Times(token_s=1.0, train_token_s=0.5, step_s=2.0), [[1, 3], [2, 2]], slots=2)
    9.0
    """
    free = [0.0] * slots
    ends: list[tuple[float, int]] = []
    for lengths in groups:
        last = 0.0
        for length in lengths:
            end = free[0] + times.token_s * length
            heapq.heapreplace(free, end)
            last = max(last, end)
        ends.append((last, sum(lengths)))
    if claim_tokens is None:
        claims = sorted(ends)
    else:
        claims = _whole_claims(ends, claim_tokens, PROMPT_TOKENS * len(groups[0]))
    trained = 0.0
    for end, tokens in claims:
        trained = max(trained, end) + times.train_token_s * tokens
    return trained + times.step_s


def _whole_claims(
    ends: Sequence[tuple[float, int]], claim_tokens: int, prompts: int
) -> list[tuple[float, int]]:
    """(when its last group has ended, tokens) of each claim, from those of each group, which has so many tokens more in
    prompts. A claim is known to be full once the next group has ended."""
    claims: list[tuple[float, int]] = []
    over, tokens, room = 0.0, 0, claim_tokens
    for end, made in ends:
        over = max(over, end)
        if tokens and made + prompts > room:
            claims.append((over, tokens))
            tokens, room = 0, claim_tokens
        tokens, room = tokens + made, room - made - prompts
    return [*claims, (over, tokens)]


def overlapping_s(times: Times, tokens: float, versions: int, slots: int) -> float:
    """The shortest time of `versions` versions with `tokens` tokens together, on pools that work at the same time."""
    return max(times.token_s * tokens / slots, times.train_token_s * tokens + times.step_s * versions)
