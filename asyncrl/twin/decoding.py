"""One generator that decodes with continuous batching, in simulated time.

    waiting ──▸ prefill ──▸ slots: every sequence gets one token each decode step ──▸ a group ends with its longest
                │           └ takes step_s + n · sequence_s, so that n sequences slow each other down         rollout
                └ takes prefill_s + n · prefill_sequence_s for the n that join in a step, and makes their first tokens

Sequences join between two steps, so that their ends coincide. Between two ends n does not change: the next end is known
at once, and no step is simulated by itself. One whose group is under way copies the prompt from it and has no prefill.
A prefill begins as soon as its first sequence is there, also amid a step, and stops the others.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence

from asyncrl.twin.times import GenerationTimes

COMPUTE, FLIP, IDLE = "compute", "wait/weights", "wait/tasks"
"""Names of the seconds of an engine, as its spans have them."""

CLOSE = 1e-9
"""Share of the steps so far by which two may differ and count as the same."""


class Decoder:
    """slots: sequences decoded at once · grain: decode steps to which the ends of sequences are rounded; 0: exact

    seconds  of each name so far · now: seconds · group: ordinal of a task
    """

    def __init__(self, slots: int, times: GenerationTimes, grain: float = 0.0) -> None:
        self.seconds = {COMPUTE: 0.0, FLIP: 0.0, IDLE: 0.0}
        self.now = 0.0
        self._slots, self._grain = slots, grain
        self._times = times
        self._steps = self._stalled_until = 0.0
        self._prefill_left = self._prefill_began = 0.0  # seconds
        self._prefilled_before = -1  # the step that follows on the last prefill
        # A heap of (steps at its end, group, the same not rounded).
        self._running: list[tuple[float, int, float]] = []
        self._waiting: deque[tuple[float, int]] = deque()  # (tokens, group)
        self._left: dict[int, int] = {}  # group -> sequences that are not done
        self._decoding = Counter[int]()  # group -> sequences in slots

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
        return max(self.now, self._stalled_until) + self._prefill_left + left * self._of_a_step

    def add(self, group: int, lengths: Sequence[float]) -> None:
        """Begin a group now. lengths: tokens of each rollout"""
        self._left[group] = len(lengths)
        for tokens in lengths:
            self._waiting.append((tokens, group))
        self._fill(1)

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
                self._decode(passed)
            self.seconds[COMPUTE if self._running else IDLE] += passed
            self.now = now
        return self._end_sequences()

    def _decode(self, seconds: float) -> None:
        of_prefill = min(seconds, self._prefill_left)
        self._prefill_left -= of_prefill
        self._steps += (seconds - of_prefill) / self._of_a_step

    def _end_sequences(self) -> list[int]:
        done: list[int] = []
        steps: set[float] = set()  # in which sequences end
        reached = self._steps + self._close
        # The clock may be too coarse for the rest of a sequence: then it is over, too.
        while self._running and (
            (not self._prefill_left and self._running[0][0] <= reached) or self.next_end <= self.now
        ):
            _, group, step = heapq.heappop(self._running)
            steps.add(step)
            self._decoding[group] -= 1
            self._left[group] -= 1
            if not self._left[group]:
                del self._left[group], self._decoding[group]
                done.append(group)
        self._fill(len(steps))
        return done

    def _fill(self, steps: int) -> None:
        """Let those that wait join, over so many steps."""
        next_step = math.ceil(self._steps - self._close)
        fresh = Counter[int]()  # sequences to be prefilled, by group
        while self._waiting and len(self._running) < self._slots:
            tokens, group = self._waiting.popleft()
            step = next_step + tokens
            if self._times.first_tokens and (group in fresh or not self._decoding[group]):
                fresh[group] += 1
                step -= 1
            self._decoding[group] += 1
            end = max(self._steps, self._grain * round(step / self._grain)) if self._grain else step
            heapq.heappush(self._running, (end, group, step))
        if fresh:
            self._prefill(fresh.total(), steps, next_step)

    def _prefill(self, sequences: int, steps: int, next_step: int) -> None:
        """Those that join before the same step have one prefill, unless it has begun between two steps already."""
        self._prefill_left += self._times.prefill_sequence_s * sequences
        midway = next_step - self._steps > self._close
        if next_step == self._prefilled_before and (midway or self.now == self._prefill_began):
            return
        self._prefill_left += self._times.prefill_s * min(steps, sequences)
        self._prefilled_before, self._prefill_began = next_step, self.now

    @property
    def _close(self) -> float:
        """Steps that lie no farther apart count as the same: the clock has no more digits."""
        return CLOSE * max(1.0, self._steps)

    @property
    def _of_a_step(self) -> float:
        """Seconds."""
        return self._times.decode(len(self._running))
