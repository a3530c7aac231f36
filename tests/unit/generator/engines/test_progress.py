"""An engine that makes no progress, and requests that its server has lost. Times are numbers here."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import eventually

from asyncrl.errors import DeadlineError
from asyncrl.generator.engines.http import server
from asyncrl.generator.engines.http.server import LoadMeter, ServerLoad
from asyncrl.generator.engines.lost_requests import TIMES_ITS_TOKENS, LostRequests
from asyncrl.generator.watches import LONGEST_LOOK_S, TOKEN_S, EngineWatch
from asyncrl.types import NO_VERSION


def watch(version: int = 3) -> EngineWatch:
    engine: Any = SimpleNamespace(version=version)
    return EngineWatch("generator-0", engine, deadline_s=10.0)


def look(
    at: EngineWatch, now: float, tokens: float, *, running: float = 2.0, flipping: bool = False, **more: float
) -> None:
    at.look(now, {"tokens": tokens, "running": running, "waiting": 1.0 if running else 0.0, **more}, flipping)


def test_an_engine_that_makes_no_token_is_waited_for_until_the_deadline() -> None:
    watched = watch()
    for now in range(1, 11):
        look(watched, now, tokens=5.0)
    with pytest.raises(DeadlineError) as error:
        look(watched, 11, tokens=5.0)
    assert str(error.value) == (
        "generator-0 waited 10.0 s for its engine (SimpleNamespace): a token of version 3 did not come; "
        "2 samples run, 1 wait for a slot; the limit is generator.progress_deadline_s=10"
    )


@pytest.mark.parametrize("progress", ["a token", "idle", "a flip ends"])
def test_progress_begins_the_wait_anew(progress: str) -> None:
    watched = watch()
    for now in range(1, 10):
        look(watched, now, 5.0, flipping=progress == "a flip ends")
    look(watched, 10, 6.0 if progress == "a token" else 5.0, running=0.0 if progress == "idle" else 2.0)
    for now in range(11, 20):
        look(watched, now, 6.0 if progress == "a token" else 5.0)
    with pytest.raises(DeadlineError):
        look(watched, 20, 6.0 if progress == "a token" else 5.0)


def test_a_flip_that_does_not_end_is_no_progress_also_without_samples() -> None:
    watched = watch()
    for now in range(1, 11):
        look(watched, now, 5.0, running=0.0, flipping=True)
    with pytest.raises(DeadlineError, match="the end of a flip from version 3 did not come"):
        look(watched, 11, 5.0, running=0.0, flipping=True)


def test_samples_that_wait_for_the_first_weights_are_no_fault_of_the_engine() -> None:
    watched = watch(NO_VERSION)
    for now in range(1, 100):
        look(watched, now, 0.0)


def test_the_time_in_which_this_process_was_stopped_does_not_count() -> None:
    watched = watch()
    look(watched, 1, 5.0)
    look(watched, 1000, 5.0)
    look(watched, 1000 + 10 - LONGEST_LOOK_S - 1, 5.0)
    with pytest.raises(DeadlineError):
        look(watched, 1000 + 10 - LONGEST_LOOK_S, 5.0)


async def test_tokens_of_a_server_that_starts_again_are_added_to_those_of_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had made 100 tokens for others, then 50, and 20 after its restart."""
    monkeypatch.setattr(server, "LOAD_S", 0.0)
    loads = [ServerLoad(tokens) for tokens in (100.0, 150.0, 20.0)]

    async def load() -> ServerLoad:
        if not loads:
            await asyncio.Event().wait()
        return loads.pop(0)

    meter = LoadMeter(SimpleNamespace(load=load), lambda: None)  # type: ignore[arg-type]
    await meter.start()
    polling = asyncio.create_task(meter.run(["a request"]))
    await eventually(lambda: meter.load.tokens == 20.0)
    polling.cancel()
    assert meter.tokens == 70.0


def test_tokens_that_are_counted_late_get_time() -> None:
    watched = watch()
    for now in range(1, 11 + round(7 * TOKEN_S)):
        look(watched, now, 5.0, uncounted=7.0)
    with pytest.raises(DeadlineError):
        look(watched, 11 + 7 * TOKEN_S, 5.0, uncounted=7.0)


# ---- requests that are lost


def test_a_request_is_lost_once_the_others_made_several_times_its_tokens() -> None:
    """Two requests: 80 tokens of the server are 40 of each, 4 times the 10 that the first may have."""
    assert TIMES_ITS_TOKENS == 4
    owed = LostRequests[str](deadline_s=5.0)
    owed.begin("old", 0.0, most_tokens=10)
    owed.begin("long", 0.0, most_tokens=11)
    assert owed.longest == 11
    assert owed.look(4.0, 79.0, queued=False) == []
    assert owed.look(4.9, 80.0, queued=False) == []  # enough tokens, but not old yet
    assert owed.look(5.0, 80.0, queued=False) == ["old"]
    assert owed.look(6.0, 80.0, queued=False) == []
    assert (owed.take_lost("old"), owed.take_lost("old"), owed.take_lost("long")) == (True, False, False)


def test_what_is_made_while_requests_wait_for_a_slot_does_not_count() -> None:
    owed = LostRequests[str](deadline_s=5.0)
    owed.begin("a", 0.0, most_tokens=10)
    assert owed.look(10.0, 1000.0, queued=True) == []
    assert owed.look(11.0, 1039.0, queued=False) == []
    assert owed.look(12.0, 1040.0, queued=False) == ["a"]


def test_tokens_that_are_counted_when_their_requests_end_are_shared_by_all_that_were_there() -> None:
    """Eight requests of 10 tokens; seven end between two looks: 70 tokens, below 9 of each."""
    owed = LostRequests[int](deadline_s=5.0)
    for request in range(8):
        owed.begin(request, 0.0, most_tokens=10)
    assert owed.look(9.0, 0.0, queued=False) == []
    for request in range(7):
        owed.end(request)
    assert owed.look(10.0, 70.0, queued=False) == []
    assert owed.look(11.0, 70.0 + 31.0, queued=False) == []
    assert owed.look(12.0, 70.0 + 32.0, queued=False) == [7]


def test_a_request_counts_from_its_beginning_and_an_answered_one_not_at_all() -> None:
    owed = LostRequests[str](deadline_s=5.0)
    owed.begin("answered", 0.0, most_tokens=10)
    assert owed.look(1.0, 39.0, queued=False) == []
    owed.begin("late", 1.0, most_tokens=10)
    owed.end("answered")
    assert owed.look(2.0, 41.0, queued=False) == []  # one token of each of the two
    assert owed.look(10.0, 79.0, queued=False) == []
    assert owed.look(11.0, 80.0, queued=False) == ["late"]
