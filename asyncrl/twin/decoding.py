"""One generator that decodes with continuous batching, in simulated time.

    waiting ──▸ slots: every sequence gets one token each decode step ──▸ a group ends with its longest rollout
                │
                └ a step takes step_s + n · sequence_s, so that n sequences slow each other down

Sequences join between two steps, so that their ends coincide. Between two ends n does not change: the next end is known
at once, and no step is simulated by itself.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

from asyncrl.twin.times import GenerationTimes

COMPUTE, FLIP, IDLE = "compute", "wait/weights", "wait/tasks"
"""Names of the seconds of an engine, as its spans have them."""

CLOSE = 1e-9
"""Decode steps that lie nearer count as the same."""


class Decoder:
    """slots: sequences decoded at once · grain: decode steps to which the ends of sequences are rounded; 0: exact

    seconds  of each name so far · now: seconds · group: ordinal of a task
    """

    def __init__(self, slots: int, times: GenerationTimes, grain: float = 0.0) -> None:
        self.seconds = {COMPUTE: 0.0, FLIP: 0.0, IDLE: 0.0}
        self.now = 0.0
        self.tokens = 0.0
        self._slots, self._grain = slots, grain
        self._step_s, self._sequence_s = times.step_s, times.sequence_s
        self._steps = self._stalled_until = 0.0
        self._running: list[tuple[float, int]] = []  # heap of (steps at its end, group)
        self._waiting: deque[tuple[float, int]] = deque()  # (tokens, group)
        self._left: dict[int, int] = {}  # group -> sequences that are not done

    @property
    def samples(self) -> int:
        """Sequences under way, those without a slot included."""
        return len(self._running) + len(self._waiting)

    @property
    def next_end(self) -> float:
        """When the next sequence ends; infinite for none."""
        if not self._running:
            return math.inf
        left = max(0.0, self._running[0][0] - self._steps)
        return max(self.now, self._stalled_until) + left * self._of_a_step

    def add(self, group: int, lengths: Sequence[float]) -> None:
        """Begin a group now. lengths: tokens of each rollout"""
        self._left[group] = len(lengths)
        for tokens in lengths:
            self._waiting.append((tokens, group))
        self._fill()

    def stall(self, seconds: float) -> None:
        """Stand still for a flip that begins now."""
        self._stalled_until = max(self._stalled_until, self.now) + seconds

    def advance(self, now: float) -> list[int]:
        """Go on to `now`, which lies no later than `next_end`. Returns the groups that are done."""
        stalled = min(now, self._stalled_until) - self.now
        if stalled > 0:
            self.seconds[FLIP] += stalled
            self.now += stalled
        passed = now - self.now
        if passed > 0:
            if self._running:
                self._steps += passed / self._of_a_step
                self.tokens += passed / self._of_a_step * len(self._running)
            self.seconds[COMPUTE if self._running else IDLE] += passed
            self.now = now
        return self._end_sequences()

    def _end_sequences(self) -> list[int]:
        done: list[int] = []
        reached = self._steps + CLOSE * max(1.0, self._steps)
        # The clock may be too coarse for the rest of a sequence: then it is over, too.
        while self._running and (self._running[0][0] <= reached or self.next_end <= self.now):
            _, group = heapq.heappop(self._running)
            self._left[group] -= 1
            if not self._left[group]:
                del self._left[group]
                done.append(group)
        self._fill()
        return done

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            tokens, group = self._waiting.popleft()
            end = math.ceil(self._steps - CLOSE * max(1.0, self._steps)) + tokens
            if self._grain:
                end = max(self._steps, self._grain * round(end / self._grain))
            heapq.heappush(self._running, (end, group))

    @property
    def _of_a_step(self) -> float:
        """Seconds."""
        return self._step_s + self._sequence_s * len(self._running)
