"""One request that an engine fails at: retried, dropped or the end, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest

from asyncrl.errors import EngineFailedError, ProcessDiedError
from asyncrl.generator.engines import engine as engines
from asyncrl.generator.engines.engine import (
    IN_A_ROW,
    PromptTooLongError,
    RequestFailedError,
    RetryingSampler,
    SampleLostError,
    SampleRequest,
)
from asyncrl.types import Sampling, Turn

ASKED = SampleRequest("r", np.zeros(1, np.int64), Sampling(), 0)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "PAUSE_S", 0.0)


class Moody:
    """Fails as `mood` says of the number of the call."""

    def __init__(self, mood: Callable[[int], Exception | None]) -> None:
        self.mood, self.asked = mood, list[str]()

    async def sample(self, request: SampleRequest) -> list[Turn]:
        self.asked.append(request.request_id)
        if error := self.mood(len(self.asked)):
            raise error
        return []


async def test_a_failed_request_is_asked_again_under_another_name() -> None:
    engine = Moody(lambda call: ValueError("hiccup") if call < 3 else None)
    assert await RetryingSampler(engine, "retry").sample(ASKED) == []
    assert engine.asked == ["r", "r~1", "r~2"]


@pytest.mark.parametrize(("policy", "calls"), [("retry", 3), ("drop", 1)])
async def test_then_the_request_is_given_up(policy: Literal["retry", "drop"], calls: int) -> None:
    engine = Moody(lambda call: ValueError("never"))
    with pytest.raises(RequestFailedError, match="request r: ValueError"):
        await RetryingSampler(engine, policy).sample(ASKED)
    assert len(engine.asked) == calls


async def test_stop_lets_the_error_through() -> None:
    with pytest.raises(ValueError, match="never"):
        await RetryingSampler(Moody(lambda call: ValueError("never")), "stop").sample(ASKED)


@pytest.mark.parametrize("error", [ProcessDiedError("gone"), PromptTooLongError("long")])
async def test_what_no_second_try_can_mend_is_not_tried_again(error: Exception) -> None:
    engine = Moody(lambda call: error)
    with pytest.raises(type(error)):
        await RetryingSampler(engine, "retry").sample(ASKED)
    assert engine.asked == ["r"]


async def test_a_lost_sample_is_not_asked_for_again_and_many_in_a_row_end_the_generator() -> None:
    engine = Moody(lambda call: SampleLostError("no answer"))
    sampler = RetryingSampler(engine, "retry")
    for _ in range(IN_A_ROW - 1):
        with pytest.raises(SampleLostError, match="no answer"):
            await sampler.sample(ASKED)
    assert engine.asked == ["r"] * (IN_A_ROW - 1)
    with pytest.raises(EngineFailedError, match="8 requests in a row, last with SampleLostError"):
        await sampler.sample(ASKED)


async def test_an_engine_that_only_fails_ends_the_generator_and_one_success_starts_the_count_anew() -> None:
    engine = Moody(lambda call: None if call == IN_A_ROW else ValueError("dead"))
    sampler = RetryingSampler(engine, "drop")
    for _ in range(IN_A_ROW - 1):
        with pytest.raises(RequestFailedError):
            await sampler.sample(ASKED)
    await sampler.sample(ASKED)
    for _ in range(IN_A_ROW - 1):
        with pytest.raises(RequestFailedError):
            await sampler.sample(ASKED)
    with pytest.raises(EngineFailedError, match="8 requests in a row, last with ValueError"):
        await sampler.sample(ASKED)
