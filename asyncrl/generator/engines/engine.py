"""The seam between the worker and the engines, which make tokens.

A worker has one engine, requests many samples of it at once, and now and then flips it to a newer version:

    sample(request) ──▸ n turns          any number of calls at the same time; the engine batches them
    receiver ──▸ stage(v), flip(v)       waits for the decode step in progress; see generator.kv for samples in flight
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from asyncrl.errors import ConfigError, EngineFailedError, ProcessDiedError, RunClosedError, WeightSyncError
from asyncrl.generator.engines.receiver import WeightReader, WeightReceiver
from asyncrl.generator.engines.stop_texts import StopTexts
from asyncrl.telemetry.spans import Spans
from asyncrl.types import Array, Finish, Sampling, Shown, Turn, Version

log = logging.getLogger(__name__)

SECONDS = "seconds/"
"""Prefix of the spans in an engine's stats."""


def span_seconds(spans: Spans) -> dict[str, float]:
    """The seconds of each span since the last call, as `Engine.stats` has them."""
    return {f"{SECONDS}{name}": seconds for name, seconds in spans.take().items()}


class PromptTooLongError(ValueError):
    """A prompt that leaves no room for a token of an answer. The task is dropped with reason 'too_long'."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Samples are handed out before they end.

    every  tokens of one sample between two pieces, about
    take   take(i, turn): sample i of the request so far, from its first token. finish is "abort"; or that of a
           sample which has ended before its siblings. A request that is begun anew gives shorter pieces again
    """

    every: int
    take: Callable[[int, Turn], None]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """n samples of one prompt.

    request_id  unique among the requests in flight
    prompt_ids  [P] int64
    ordinal     with `sampling.seed`, the sample's index first..first+n-1 and the token's position it fixes every draw
    place       at fixed shape, the row (modulo slots) of the first sample; by default ordinal * n
    first       index of the first sample: above 0 if others of the same prompt are requested apart
    made        tokens at the end of prompt_ids that belong to the answer already: the first of them has position 0
    media       what prompt_ids show; text stands before, between and behind
    pieces      None: only whole samples are wanted
    stop        None: no text ends a sample. An engine may make tokens behind such a text; `turn` leaves them out
    """

    request_id: str
    prompt_ids: Array
    sampling: Sampling
    ordinal: int
    n: int = 1
    place: int | None = None
    first: int = 0
    made: int = 0
    pieces: Pieces | None = None
    media: tuple[Shown, ...] = ()
    stop: StopTexts | None = None

    def turn(
        self,
        tokens: Sequence[int] | Array,
        logprobs: Sequence[float] | Array,
        versions: Sequence[Version] | Array,
        finish: Finish,
        experts: Array | None = None,
    ) -> Turn:
        """A turn that answers this request, up to the first of its `stop` texts."""
        prompt_ids, output_ids = np.asarray(self.prompt_ids, np.int64), np.array(tokens, np.int64)
        kept = None
        if self.stop is not None:
            before = len(prompt_ids) - self.made
            kept = self.stop.length(np.concatenate([prompt_ids[before:], output_ids]))
        if kept is not None:
            kept, finish = max(0, kept - self.made), "stop"
        return Turn(
            prompt_ids=prompt_ids,
            output_ids=output_ids[:kept],
            logprobs=np.array(logprobs[:kept], np.float32),
            versions=np.array(versions[:kept], np.int32),
            finish=finish,
            experts=experts,
        )


def check_fits(request: SampleRequest, slots: int, max_length: int) -> None:
    """Raises PromptTooLongError or ValueError for a request that an engine of this size can never run."""
    if not 0 < len(request.prompt_ids) < max_length:
        raise PromptTooLongError(
            f"request {request.request_id}: a prompt of {len(request.prompt_ids)} tokens leaves no room for "
            f"an answer within generator.max_length={max_length}"
        )
    if not 0 < request.n <= slots:
        raise ValueError(f"request {request.request_id}: {request.n} samples need 1 to {slots} slots")


def check_complete(targets: Iterable[str], staged: Iterable[str], version: Version) -> None:
    """Raises ValueError unless a version that is to be flipped to has all parameters."""
    if missing := sorted({*targets} - {*staged}):
        raise ValueError(f"flip to version {version} lacks {len(missing)} parameters, e.g. {missing[0]}")


class Sampler(Protocol):
    """The part of an engine that makes rollouts."""

    async def sample(self, request: SampleRequest) -> list[Turn]:
        """n turns, in sample order. Cancelling the call aborts the request.

        Raises PromptTooLongError, and ValueError if n is more than the engine can hold.
        """
        ...


class Engine(Sampler, Protocol):
    """Makes tokens with the newest version it was flipped to. All methods run on one event loop.

    Waiting requests begin in the order of their ordinals.
    """

    @property
    def version(self) -> Version:
        """The version that makes the next token; NO_VERSION until the first flip of a worker's engine."""
        ...

    async def start(self) -> None: ...

    def receiver(self, reader: WeightReader) -> WeightReceiver:
        """A receiver that brings the learner's versions into this engine."""
        ...

    def stats(self) -> dict[str, float]:
        """tokens (output tokens so far), running (samples being decoded), waiting (samples with no slot yet),
        and seconds/<span> since the last call; some engines add kv_usage (share of the KV cache in use) and
        preemptions (samples that lost their KV and were computed again, so far), uncounted (most tokens of one
        sample that `tokens` may lack until they all are made), asleep (whether it waits for its turn), drafted
        and accepted (tokens that were drafted, and those of them that the policy drew, so far), and the sums of
        `StepTimes`."""
        ...

    async def close(self) -> None:
        """Samples in flight raise RunClosedError."""
        ...


class StoppingSampler:
    """An engine's `sample`, whose requests bring the texts of their `Sampling.stop` along. decode: as of `StopTexts`"""

    def __init__(self, engine: Sampler, decode: Callable[[Array], str]) -> None:
        self._engine, self._decode = engine, decode

    async def sample(self, request: SampleRequest) -> list[Turn]:
        if texts := request.sampling.stop:
            request = replace(request, stop=StopTexts(texts, self._decode))
        return await self._engine.sample(request)


# ---- requests at which the engine fails

RETRIES = 2

PAUSE_S = 0.5
"""Before the first retry; twice as long before the second."""

IN_A_ROW = 8
"""Consecutive lost requests that end the generator."""

NOT_THE_REQUEST = (ConfigError, EngineFailedError, ProcessDiedError, RunClosedError, WeightSyncError)
"""Errors after which the engine cannot continue, or need not."""


class RequestFailedError(Exception):
    """The engine failed at one request. The task is dropped with reason 'engine'."""


class SampleLostError(Exception):
    """The engine owes a sample for too long, or its connection broke. The task is given back to the queue."""


class RetryingSampler:
    """An engine's `sample` under `generator.on_failure`.

    retry   a request that failed is repeated twice, after a pause; then as drop
    drop    RequestFailedError: the task ends as DROPPED(engine), the others go on
    stop    the error itself: the generator ends

    A lost sample is not repeated here: another generator may make it. Many failures in a row are the engine's fault,
    not a request's: they end the generator too.
    """

    def __init__(self, engine: Sampler, on_failure: Literal["retry", "drop", "stop"]) -> None:
        self._engine, self._policy = engine, on_failure
        self._in_a_row = 0

    async def sample(self, request: SampleRequest) -> list[Turn]:
        """As the engine's. Raises RequestFailedError, and the errors that end the generator."""
        tries = 1 + (RETRIES if self._policy == "retry" else 0)
        for attempt in range(tries):
            if attempt:
                await asyncio.sleep(PAUSE_S * attempt)
            # A new name: the engine may still know the old one.
            again = replace(request, request_id=f"{request.request_id}~{attempt}") if attempt else request
            try:
                turns = await self._engine.sample(again)
            except (PromptTooLongError, *NOT_THE_REQUEST):
                raise
            except SampleLostError as error:
                self._count_failure(error)
                raise
            except Exception as error:
                if self._policy == "stop":
                    raise
                log.warning(
                    "request %s failed, try %d of %d: %r", request.request_id, attempt + 1, tries, error
                )
                why = error
            else:
                self._in_a_row = 0
                return turns
        self._count_failure(why)
        raise RequestFailedError(f"request {request.request_id}: {why!r}") from why

    def _count_failure(self, why: Exception) -> None:
        """Raises EngineFailedError if this was one too many in a row."""
        self._in_a_row += 1
        if self._in_a_row >= IN_A_ROW:
            raise EngineFailedError(
                f"the engine failed at {self._in_a_row} requests in a row, last with {why!r}"
            ) from why
