"""The offset of a clock, from requests of any delays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.telemetry.clock_offset import DRIFT, ClockOffset

delays = st.floats(0.0, 30.0)
trips = st.lists(st.tuples(st.floats(0.0, 600.0), delays, delays), min_size=1, max_size=30)
"""(pause before the request, its way there, the way back)"""


@given(
    true=st.floats(-1e6, 1e6),
    rate=st.floats(-DRIFT, DRIFT),
    trips=trips,
)
def test_the_true_offset_is_within_the_error_also_of_clocks_that_drift_apart(true, rate, trips):
    clock, now = ClockOffset(), 1.7e9
    for pause, there, back in trips:
        sent = now + pause
        answered, now = sent + there, sent + there + back
        clock.observe(sent, answered + true + rate * (answered - 1.7e9), now)
        age = now - clock.at + 30.0  # of the moment in between, at which the offset was true
        allowed = DRIFT * (age + 30.0) + 1e-5
        really = true + rate * (now - 1.7e9)
        assert abs(clock.offset_s - really) <= clock.error_s + allowed
        offset, error = clock.settled()
        assert abs(offset - really) <= error + allowed


@given(true=st.floats(-1e3, 1e3), trips=trips)
def test_the_shortest_round_trip_wins_until_it_is_old(true, trips):
    clock, now, seen = ClockOffset(), 0.0, []
    for pause, there, back in trips:
        sent = now + pause
        now = sent + there + back
        clock.observe(sent, sent + there + true, now)
        seen.append(((now - sent) / 2, now))
    allowed = [error + DRIFT * (now - at) for error, at in seen]
    assert clock.error_s <= min(allowed) + 1e-9


@given(trips=trips)
def test_clocks_that_agree_have_no_offset_at_all(trips):
    clock, now = ClockOffset(), 0.0
    for pause, there, back in trips:
        sent = now + pause
        now = sent + there + back
        clock.observe(sent, sent + there, now)
        assert clock.settled()[0] == 0


def test_an_answer_in_the_middle_of_its_round_trip_tells_the_offset_exactly():
    clock = ClockOffset()
    assert clock.observe(sent=100.0, there=90.5, received=101.0)
    assert (clock.offset_s, clock.error_s) == (-10.0, 0.5)
    assert not clock.observe(sent=102.0, there=93.6, received=104.0)
    assert clock.observe(sent=105.0, there=95.25, received=105.5)
    assert (clock.offset_s, clock.error_s) == (-10.0, 0.25)
    assert clock.settled() == (-10.0, 0.25)


def test_a_longer_round_trip_wins_once_the_short_one_is_so_old_that_the_clocks_may_have_drifted():
    clock = ClockOffset()
    clock.observe(sent=0.0, there=0.005, received=0.01)
    assert not clock.observe(sent=100.0, there=100.1, received=100.2)
    assert clock.observe(sent=2000.0, there=2000.1, received=2000.2)


def test_an_offset_that_may_be_none_is_none_with_so_much_more_error():
    clock = ClockOffset()
    clock.observe(sent=100.0, there=100.75, received=101.0)
    assert (clock.offset_s, clock.error_s) == (0.25, 0.5)
    assert clock.settled() == (0.0, 0.75)
