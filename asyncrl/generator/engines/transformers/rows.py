"""The rows of a decoding batch: the samples under way, one a row, as arrays.

Axes:  R rows · C columns, prompt + output tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from asyncrl.counter_rng import stream_key
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.engines.transformers.sampling import Support
from asyncrl.types import Array, Finish, Turn


@dataclass(slots=True)
class BatchedRequest:
    """A request in the batch. joined: samples that have or had a row · turns: finished ones by sample."""

    request: SampleRequest
    joined: int = 0
    turns: dict[int, Turn] = field(default_factory=dict)

    @property
    def left(self) -> int:
        return self.request.n - self.joined

    @property
    def finished(self) -> bool:
        return len(self.turns) == self.request.n

    def in_order(self) -> list[Turn]:
        """All turns; those of samples that never had a row are empty and aborted."""
        nothing = self.request.turn((), (), (), "abort")
        return [self.turns.get(sample, nothing) for sample in range(self.request.n)]


class BatchRows:
    """See above.

    cached_R   tokens in the cache: the column of the next token to feed
    known_R    prompt and output tokens so far: the column of the next token to draw
    prompt_R   prompt tokens
    limit_R    the number of columns at which the sample ends
    """

    def __init__(self, rows: int, columns: int) -> None:
        self.used = 0
        self.used_R = np.zeros(rows, bool)
        self.cached_R, self.known_R, self.prompt_R, self.limit_R = np.zeros((4, rows), np.int64)
        self.temperature_R = np.ones(rows)
        self.support = Support(np.ones(rows), np.zeros(rows, np.int64), np.zeros(rows))
        self.key_R = np.zeros(rows, np.uint64)
        self.token_RC = np.zeros((rows, columns), np.int64)
        self.logp_RC = np.zeros((rows, columns), np.float32)
        self.version_RC = np.zeros((rows, columns), np.int32)
        self._owner: list[tuple[BatchedRequest, int] | None] = [None] * rows

    def assign(self, batched: BatchedRequest, rows: Array, cached: int) -> None:
        """Give rows to the next samples of a request. cached: tokens of the prompt that the cache has."""
        request, sample_A = batched.request, batched.joined + np.arange(len(rows))
        prompt, sampling = len(request.prompt_ids), request.sampling
        for sample, row in zip(sample_A, rows, strict=True):
            self._owner[row] = (batched, int(sample))
        batched.joined += len(rows)
        self.used_R[rows] = True
        self.used += len(rows)
        self.cached_R[rows] = cached
        self.known_R[rows] = self.prompt_R[rows] = prompt
        self.limit_R[rows] = min(prompt + sampling.max_tokens, self.token_RC.shape[1])
        self.temperature_R[rows] = sampling.temperature
        self.support.top_p_R[rows] = sampling.top_p
        self.support.top_k_R[rows] = sampling.top_k
        self.support.min_p_R[rows] = sampling.min_p
        self.key_R[rows] = stream_key(request.sampling.seed, request.ordinal, sample_A)
        self.token_RC[rows, :prompt] = request.prompt_ids

    def release(self, rows: Array, finish: Sequence[Finish]) -> list[BatchedRequest]:
        """Free rows, and give their turns to their requests. Returns the requests, each once."""
        left: dict[int, BatchedRequest] = {}
        for row, reason in zip(rows, finish, strict=True):
            batched, sample = self._owner_of(row)
            made = slice(self.prompt_R[row], self.known_R[row])
            batched.turns[sample] = batched.request.turn(
                self.token_RC[row, made], self.logp_RC[row, made], self.version_RC[row, made], reason
            )
            left[id(batched)] = batched
            self._owner[row] = None
        self.used_R[rows] = False
        self.used -= len(rows)
        return list(left.values())

    def move(self, source: Array, destination: Array) -> None:
        """Move rows in use to free ones."""
        for of_row in (
            self.cached_R, self.known_R, self.prompt_R, self.limit_R, self.temperature_R, self.key_R,
            *self.support, self.token_RC, self.logp_RC, self.version_RC,
        ):  # fmt: skip
            of_row[destination] = of_row[source]
        for free, row in zip(destination, source, strict=True):
            self._owner[free], self._owner[row] = self._owner[row], None
        self.used_R[destination], self.used_R[source] = True, False

    def requests(self) -> dict[int, BatchedRequest]:
        """The request of each row in use."""
        return {row: self._owner_of(row)[0] for row in np.flatnonzero(self.used_R).tolist()}

    def _owner_of(self, row: int) -> tuple[BatchedRequest, int]:
        owner = self._owner[row]
        assert owner is not None, "a row in use has an owner"
        return owner
