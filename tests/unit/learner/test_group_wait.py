"""How long a learner waits while generators are busy, on a clock that the tests turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import RefusedError
from asyncrl.learner.group_wait import LOOKS, GroupWait

DEADLINE_S = 600.0
STEP_S = 0.5
"""Between two requests of the learner."""

Status = Callable[[float], dict[str, Any]]


def status(tokens: int, dropped: int = 0, worker: str = "generator-0") -> dict[str, Any]:
    workers = {worker: {"tokens": float(tokens)}, "rewards-0": {"groups": 3}}
    return {"workers": workers, "streams": {"train": {"dropped_by_reason": {"filtered": dropped}}}}


def ends_at(seen: Status, longest_s: float) -> float | None:
    """When a wait from second 0 on is over; None: not within `longest_s`."""
    now = 0.0
    wait = GroupWait(DEADLINE_S, lambda: seen(now), began=0.0)
    while now < longest_s:
        if wait.is_over(now):
            return now
        now += STEP_S
    return None


def test_a_rollout_of_900_seconds_ends_no_run() -> None:
    assert ends_at(lambda now: status(tokens=int(30 * now)), 900.0) is None


def test_generators_that_make_no_tokens_end_it() -> None:
    assert ends_at(lambda now: status(tokens=7), 2000.0) == DEADLINE_S + STEP_S


def test_generators_that_stop_end_it_a_deadline_after_the_look_that_saw_the_last_token() -> None:
    """They stop at second 900: the look after 901.5 s, the sixth, sees their last tokens."""
    at = ends_at(lambda now: status(tokens=int(min(now, 900.0))), 3000.0)
    look = 6 * (DEADLINE_S / LOOKS + STEP_S)
    assert at == 903.0 + DEADLINE_S + STEP_S == look + DEADLINE_S + STEP_S


def test_tokens_of_tasks_that_are_dropped_count_for_nothing() -> None:
    """All groups are filtered: the run ends with that reason, busy as the generators are."""
    assert ends_at(lambda now: status(int(30 * now), dropped=int(now / 20)), 2000.0) == DEADLINE_S + STEP_S


def test_a_queue_without_an_answer_is_no_progress() -> None:
    def gone(now: float) -> dict[str, Any]:
        raise RefusedError("full")

    assert ends_at(gone, 2000.0) == DEADLINE_S + STEP_S


def test_a_generator_that_begins_anew_at_zero_has_made_nothing_since() -> None:
    """Its totals are those of a process. Each of its lives ends before it has made as many tokens as the one before."""
    assert ends_at(lambda now: status(tokens=int(5000 - now)), 2000.0) == DEADLINE_S + STEP_S


def test_a_generator_that_begins_anew_does_not_hide_the_tokens_of_another_one() -> None:
    """All generators together have fewer tokens at each look than at the one before."""

    def seen(now: float) -> dict[str, Any]:
        workers = {"generator-0": {"tokens": 1e6 - 100 * now}, "generator-1": {"tokens": now}}
        return {**status(0), "workers": workers}

    assert ends_at(seen, 2000.0) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=30))
def test_a_wait_is_over_a_deadline_after_its_last_progress(looks: list[tuple[int, bool]]) -> None:
    """(tokens made since the look before, whether a task was dropped) at each look; then nothing more."""
    spacing = DEADLINE_S / LOOKS + STEP_S
    totals, tokens, dropped, last = [], 0, 0, 0
    for number, (made, drops) in enumerate(looks, 1):
        tokens, dropped = tokens + made, dropped + drops
        totals.append((tokens, dropped))
        if number > 1 and made and not drops and number - last <= LOOKS - 1:
            last = number

    def seen(now: float) -> dict[str, Any]:
        return status(*totals[min(round(now / spacing), len(totals)) - 1])

    assert ends_at(seen, 1e5) == last * spacing + DEADLINE_S + STEP_S


@pytest.mark.parametrize("deadline_s", [1e-6, 1e9])
def test_the_first_look_proves_nothing(deadline_s: float) -> None:
    looked: list[int] = []

    def seen() -> dict[str, Any]:
        looked.append(1)
        return status(tokens=9)

    wait = GroupWait(deadline_s, seen, began=5.0)
    assert not wait.is_over(5.0)
    assert wait.is_over(5.0 + 2 * deadline_s)
    assert looked == [1]
