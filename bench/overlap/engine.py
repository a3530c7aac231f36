"""An engine whose samples take scripted times, for `generator.own_engine`. It computes nothing.

    sample ─▸ the slot that is free first ─▸ length × token_s later: the tokens, each with the version of its time

A slot goes on at the time when its last sample was due, not when the event loop came round: delays of the loop count
once, and do not add up.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.generator.engines.engine import SECONDS, SampleRequest, check_complete, check_fits
from asyncrl.generator.engines.receiver import LocalReceiver, WeightReader, WeightReceiver
from asyncrl.models.adapters import live_tensors
from asyncrl.models.loading import load_causal_lm
from asyncrl.types import NO_VERSION, Array, Turn, Version
from bench.overlap.times import Times

TOKEN, LOGPROB = 3, -0.5
"""Of every token that is made."""


def load(config: Config, _tokenizer: Any, _name: str) -> TimedEngine:
    """For `generator.own_engine`."""
    targets = live_tensors(load_causal_lm(config.model, config.run.seed))
    return TimedEngine(Times.of_this_process(), config.generator.slots, config.generator.max_length, targets)


class TimedEngine:
    """See `Engine`."""

    def __init__(self, times: Times, slots: int, max_length: int, targets: Mapping[str, Tensor]) -> None:
        self._times, self._slots, self._max_length = times, slots, max_length
        self.targets = targets
        self._free = [0.0] * slots  # when each slot is free, by time.monotonic()
        self._flips: list[tuple[float, Version]] = []
        self._tokens = 0
        self._ends: list[float] = []  # of the samples that have not ended yet; a heap
        self._stats_at = time.monotonic()

    @property
    def version(self) -> Version:
        return self._flips[-1][1] if self._flips else NO_VERSION

    async def start(self) -> None:
        self._stats_at = time.monotonic()

    async def sample(self, request: SampleRequest) -> list[Turn]:
        check_fits(request, self._slots, self._max_length)
        now = time.monotonic()
        spans = []
        for index in range(request.first, request.first + request.n):
            tokens = max(1, self._times.length(request.ordinal, index) - request.made)
            begun = max(heapq.heappop(self._free), now)
            end = begun + tokens * self._times.token_s
            heapq.heappush(self._free, end)
            heapq.heappush(self._ends, end)
            spans.append((begun, tokens))
        last = max(begun + tokens * self._times.token_s for begun, tokens in spans)
        await asyncio.sleep(last - time.monotonic())
        self._tokens += sum(tokens for _, tokens in spans)
        return [self._turn(request, begun, tokens) for begun, tokens in spans]

    def _turn(self, request: SampleRequest, begun: float, tokens: int) -> Turn:
        versions = self._versions(begun, tokens)
        return request.turn([TOKEN] * tokens, [LOGPROB] * tokens, versions, "stop")

    def _versions(self, begun: float, tokens: int) -> Array:
        """The version that made each token, by the times of the flips."""
        ends = begun + self._times.token_s * np.arange(1, tokens + 1)
        at = [bisect_right(self._flips, end, key=lambda flip: flip[0]) - 1 for end in (begun, ends[-1])]
        if at[0] == at[1]:
            return np.full(tokens, self._flips[at[0]][1], np.int32)
        flipped = np.array([when for when, _ in self._flips])
        versions = np.array([version for _, version in self._flips], np.int32)
        return versions[np.maximum(0, np.searchsorted(flipped, ends, side="right") - 1)]

    async def flip(self, staged: Mapping[str, Tensor], version: Version) -> float:
        check_complete(self.targets, staged, version)
        begun = time.monotonic()
        for name, target in self.targets.items():
            target.data.copy_(staged[name])
        self._flips.append((time.monotonic(), version))
        return time.monotonic() - begun

    def receiver(self, reader: WeightReader) -> WeightReceiver:
        return LocalReceiver(self.targets, self.flip, reader)

    def stats(self) -> dict[str, float]:
        """seconds/compute: the time since the last call times the share of slots that work now; calls come often."""
        now = time.monotonic()
        elapsed_s, self._stats_at = now - self._stats_at, now
        while self._ends and self._ends[0] <= now:
            heapq.heappop(self._ends)
        running = min(len(self._ends), self._slots)
        return {
            "tokens": float(self._tokens),
            "running": float(running),
            "waiting": float(len(self._ends) - running),
            f"{SECONDS}compute": elapsed_s * running / self._slots,
            f"{SECONDS}wait/tasks": elapsed_s * (1 - running / self._slots),
        }

    async def close(self) -> None:
        """Nothing is under way but sleeps, which the worker cancels."""
