"""Whose turn it is among the requests that wait, and what a client's words say about its requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from raw_request import session_request

from asyncrl.queue.broker.client_state import CLIENT_BYTES, ClientState
from asyncrl.queue.broker.long_poll import LongPoll, Waiter
from asyncrl.queue.wire.envelope import MAX_REQUESTS


def waiter(who: bytes, request_id: int, until: float = 9.0, op: str = "lease", **args: Any) -> Waiter:
    request = session_request(
        op, f"{who!r}/1", {"stream": "train", "held": 0, "lineage": 0, "most": 1, **args}
    )
    return Waiter(who, request_id, request, "train", until)


def parking(*waiters: Waiter) -> LongPoll:
    lot = LongPoll()
    for each in waiters:
        lot.add(each)
    return lot


def taker(most: int) -> tuple[list[tuple[bytes, int]], Callable[[Waiter], bool]]:
    """Answers the first `most` that are offered, and says whom."""
    served: list[tuple[bytes, int]] = []

    def answer(offered: Waiter) -> bool:
        if len(served) == most:
            return False
        served.append(offered.key)
        return True

    return served, answer


def test_callers_take_turns_however_many_requests_one_has() -> None:
    lot = parking(*(waiter(b"greedy", i) for i in range(1, 6)), waiter(b"a", 1), waiter(b"b", 1))
    served, answer = taker(4)
    assert lot.offer("train", answer) == 4
    assert served == [(b"greedy", 1), (b"a", 1), (b"b", 1), (b"greedy", 2)]
    assert len(lot) == 3


def test_lines_take_turns_and_the_one_served_last_is_tried_last() -> None:
    lot = parking(
        *(waiter(b"new", i, held=2) for i in (1, 2, 3)), *(waiter(b"old", i, held=1) for i in (1, 2, 3))
    )
    first, answer = taker(3)
    lot.offer("train", answer)
    assert first == [(b"new", 1), (b"old", 1), (b"new", 2)]
    second, answer = taker(1)
    lot.offer("train", answer)
    assert second == [(b"old", 2)]


def test_the_first_of_a_line_stands_for_the_others() -> None:
    """1,000 generators that hold the same version cost one attempt, whatever number of tasks each asks for."""
    lot = parking(*(waiter(str(i).encode(), 1, held=7, most=1 + i % 9, wait_s=i) for i in range(1000)))
    tried: list[Waiter] = []
    assert lot.offer("train", lambda offered: bool(tried.append(offered))) == 0
    assert len(tried) == 1


def test_a_request_for_nothing_does_not_stand_in_the_way() -> None:
    lot = parking(waiter(b"odd", 1, most=0), waiter(b"good", 1, most=1))
    assert lot.offer("train", lambda offered: offered.request.request.most > 0) == 1
    assert (b"odd", 1) in lot


def test_a_wait_ends_once_and_the_removed_are_forgotten() -> None:
    lot = parking(*(waiter(b"a", i, until=float(i)) for i in range(1, 201)))
    assert [late.number for late in lot.late(3.0)] == [1, 2, 3]
    assert lot.late(3.0) == []
    for i in range(1, 200):
        lot.remove((b"a", i))
    lot.remove((b"a", 1))
    assert len(lot._deadlines) < 70  # those that have left do not stay in the heap for their whole wait
    assert [late.number for late in lot.late(1e9)] == [200]
    lot.remove((b"a", 200))
    assert (len(lot), lot.keys, lot.has("train", "lease")) == (0, [], False)


History = list[tuple[int, frozenset[int]]]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """What a client says over time: it issues numbers, and waits for fewer and fewer of the old ones."""
    newest, waiting, said = 0, frozenset[int](), []
    for _ in range(draw(st.integers(1, 12))):
        fresh = frozenset(range(newest + 1, newest + 1 + draw(st.integers(0, 3))))
        done = draw(st.sets(st.sampled_from(sorted(waiting)))) if waiting else set()
        newest, waiting = newest + len(fresh), (waiting | fresh) - done
        said.append((newest, waiting))
    return said


@given(histories(), st.data())
def test_words_that_come_late_twice_or_in_any_order_never_end_a_request_that_is_waited_for(
    said: History, data: st.DataObject
) -> None:
    caller, heard = ClientState(), data.draw(st.lists(st.sampled_from(said), min_size=1))
    for newest, waiting in heard:
        caller.update(newest, waiting)
        caller.keep(newest, [b"reply"])
    newest = max(newest for newest, _ in heard)
    # Over is what one of the messages says is over, and nothing else.
    over = {i for i in range(1, newest + 1) if any(i <= n and i not in w for n, w in heard)}
    assert caller.waiting == set(range(1, newest + 1)) - over
    assert caller.waiting >= {i for i in said[-1][1] if i <= newest}


def test_a_client_is_busy_when_it_does_not_read() -> None:
    caller = ClientState()
    caller.update(MAX_REQUESTS, range(1, MAX_REQUESTS + 1))
    assert not caller.busy
    caller.update(MAX_REQUESTS + 1, range(1, MAX_REQUESTS + 2))
    assert caller.busy
    caller.update(MAX_REQUESTS + 1, [1])
    caller.keep(1, [b"", memoryview(bytes(CLIENT_BYTES))])
    assert caller.busy
    caller.update(MAX_REQUESTS + 1, [])
    assert (caller.busy, caller.unread, caller.unread_bytes) == (False, {}, 0)
