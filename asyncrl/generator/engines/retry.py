"""Requests at which the engine fails: `generator.on_failure`.

    retry   repeated twice, after a pause; then as drop
    drop    RequestFailedError: the task ends as DROPPED(engine), the others go on
    stop    the error itself: the generator ends

Many failures in a row are the engine's fault, not a request's: they end the generator too.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Literal

from asyncrl.errors import ConfigError, EngineFailedError, ProcessDiedError, RunClosedError, WeightSyncError
from asyncrl.generator.engines.engine import PromptTooLongError, Sampler, SampleRequest
from asyncrl.types import Turn

log = logging.getLogger(__name__)

RETRIES = 2

PAUSE_S = 0.5
"""Before the first retry; twice as long before the second."""

IN_A_ROW = 8
"""Consecutive lost requests that end the generator."""

NOT_THE_REQUEST = (ConfigError, EngineFailedError, ProcessDiedError, RunClosedError, WeightSyncError)
"""Errors after which the engine cannot continue, or need not."""


class RequestFailedError(Exception):
    """The engine failed at one request. The task is dropped with reason 'engine'."""


class RetryingSampler:
    """See `Sampler`. Wraps an engine."""

    def __init__(self, engine: Sampler, on_failure: Literal["retry", "drop", "stop"]) -> None:
        self._engine, self._policy = engine, on_failure
        self._in_a_row = 0

    async def sample(self, request: SampleRequest) -> list[Turn]:
        """As the engine's. Raises RequestFailedError, and the errors that end the generator."""
        tries = 1 + (RETRIES if self._policy == "retry" else 0)
        for attempt in range(tries):
            if attempt:
                await asyncio.sleep(PAUSE_S * attempt)
            try:
                # A new name: the engine may still know the old one.
                again = f"{request.request_id}~{attempt}" if attempt else request.request_id
                turns = await self._engine.sample(replace(request, request_id=again))
            except (PromptTooLongError, *NOT_THE_REQUEST):
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
        self._in_a_row += 1
        if self._in_a_row >= IN_A_ROW:
            raise EngineFailedError(
                f"the engine failed at {self._in_a_row} requests in a row, last with {why!r}"
            )
        raise RequestFailedError(f"request {request.request_id}: {why!r}") from why
