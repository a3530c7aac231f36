"""Lanes reduced to pixel columns, against sums over every span and column; rows, the pile, open spans, moved clocks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.observability.dash.lanes import MOST_ROWS, LaneTrack, SpanColumns, as_one, shares
from asyncrl.observability.timeline import Span

BASE = 1_795_000_000.0
"""Times of runs are large: sums must stay exact."""


def by_hand(spans: list[Span], edges: np.ndarray, now: float) -> dict[str, np.ndarray]:
    """Seconds of each name in each column, one span and one column at a time."""
    found: dict[str, np.ndarray] = {}
    for span in spans:
        end = now if math.isnan(span.end) else span.end
        into = found.setdefault(span.name, np.zeros(len(edges) - 1))
        for column in range(len(edges) - 1):
            into[column] += max(0.0, min(end, edges[column + 1]) - max(span.start, edges[column]))
    return found


def summed(rows: list[SpanColumns]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for row in rows:
        for name, seconds in row.seconds.items():
            found[name] = found.get(name, 0.0) + seconds
    return found


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name in {*found, *expected}:
        np.testing.assert_allclose(found.get(name, 0.0), expected.get(name, 0.0), atol=1e-5)


names = st.sampled_from(["compute", "wait/groups", "other"])
times = st.integers(0, 400).map(lambda n: n / 8)
overlapping = st.lists(st.tuples(names, times, times), max_size=60)
views = st.tuples(times, times).filter(lambda pair: pair[0] != pair[1]).map(sorted)


@given(overlapping, views, st.integers(1, 40), st.integers(1, 60))
def test_no_second_of_any_name_is_lost_or_counted_twice(drawn, view, pixels, at_a_time):
    spans = [Span(name, BASE + min(a, b), BASE + max(a, b)) for name, a, b in drawn]
    track, edges = LaneTrack(switches=False), np.linspace(BASE + view[0], BASE + view[1], pixels + 1)
    for taken in range(0, len(spans) + at_a_time, at_a_time):  # as a file grows
        track.take(spans[:taken])
    same(summed(track.columns(edges, BASE + 60)), by_hand(spans, edges, BASE + 60))


@given(st.lists(st.tuples(names, st.integers(0, 40)), min_size=1, max_size=60), views, st.integers(1, 40))
def test_a_lane_that_switches_is_one_row_whose_last_span_is_open(drawn, view, pixels):
    spans, at = [], BASE
    for name, length in drawn:
        spans.append(Span(name, at, at + length / 8))
        at += length / 8
    spans[-1].end = math.nan
    track, edges = LaneTrack(switches=True), np.linspace(BASE + view[0], BASE + view[1], pixels + 1)
    track.take(spans)
    rows = track.columns(edges, at + 3)
    assert len(rows) == 1
    same(rows[0].seconds, by_hand(spans, edges, at + 3))
    # The name that fills most of a column has the largest share in it.
    parts, expected = shares(rows[0], edges), by_hand(spans, edges, at + 3)
    for column in range(pixels):
        ranked = sorted(expected, key=lambda name: expected[name][column])
        width = edges[1] - edges[0]
        if len(ranked) > 1 and expected[ranked[-1]][column] - expected[ranked[-2]][column] > 0.02 * width:
            assert max(parts, key=lambda name: parts[name][column]) == ranked[-1]


@given(overlapping)
def test_spans_of_a_row_never_overlap(drawn):
    track = LaneTrack(switches=False)
    track.take([Span(name, min(a, b), max(a, b)) for name, a, b in drawn])
    edges = np.linspace(0.0, 60.0, 481)  # no span ends inside a column
    for row in track.columns(edges, 60.0)[:MOST_ROWS]:
        if row.at_once == 1.0:
            assert sum(row.seconds.values(), np.zeros(480)).max() <= 0.125 + 1e-5


def test_spans_that_find_no_row_are_counted():
    track = LaneTrack(switches=False)
    track.take([Span("generate", 10.0, 20.0) for _ in range(MOST_ROWS + 7)])
    *rows, pile = track.columns(np.array([10.0, 15.0, 25.0]), 30.0)
    assert len(rows) == MOST_ROWS
    assert pile.at_once == pytest.approx(7.0)
    np.testing.assert_allclose(pile.seconds["generate"], [35.0, 35.0])
    assert shares(pile, np.array([10.0, 15.0, 25.0]))["generate"].tolist() == [255, 128]


def test_an_open_span_ends_in_place_and_frees_its_row():
    track, spans = LaneTrack(switches=False), [Span("fetch", 1.0)]
    track.take(spans)
    np.testing.assert_allclose(track.columns(np.array([0.0, 2.0, 4.0]), 3.0)[0].seconds["fetch"], [1.0, 1.0])
    spans[0].end = 2.5
    spans.append(Span("flip", 2.5, 3.5))
    track.take(spans)
    (row,) = track.columns(np.array([0.0, 2.0, 4.0]), 9.0)
    same(row.seconds, {"fetch": np.array([1.0, 0.5]), "flip": np.array([0.0, 1.0])})


def test_spans_that_have_moved_with_their_clock_are_taken_again():
    track, spans = LaneTrack(switches=True), [Span("compute", 1.0, 2.0), Span("other", 2.0)]
    track.take(spans)
    for span in spans:
        span.start, span.end = span.start + 10.0, span.end + 10.0
    track.take(spans)
    (row,) = track.columns(np.array([0.0, 10.0, 12.0, 14.0]), 13.0)
    same(row.seconds, {"compute": np.array([0.0, 1.0, 0.0]), "other": np.array([0.0, 0.0, 1.0])})


def test_the_span_at_a_moment():
    track = LaneTrack(switches=False)
    first, second = Span("fetch", 1.0, 5.0), Span("flip", 2.0, 3.0)
    track.take([first, second])
    assert [track.at(0, 4.0), track.at(1, 2.5), track.at(0, 0.5), track.at(2, 2.5)] == [
        first,
        second,
        None,
        None,
    ]


def test_a_short_span_is_never_invisible():
    edges = np.linspace(0.0, 1000.0, 11)
    columns = SpanColumns({"flip": np.array([0.0, 1e-4] + [0.0] * 8)})
    assert shares(columns, edges)["flip"].tolist() == [0, 1] + [0] * 8


def test_several_lanes_as_one():
    edges = np.array([0.0, 1.0])
    lane = [SpanColumns({"compute": np.array([0.75]), "wait/tasks": np.array([0.25])})]
    (row,) = as_one([lane, lane, lane], edges)
    assert row.at_once == pytest.approx(3.0)
    assert shares(row, edges)["compute"].tolist() == [191]


def test_spans_of_a_lane_that_switches_do_not_count_twice_where_a_clock_was_set_anew():
    track = LaneTrack(switches=True)
    track.take([Span("compute", 0.0, 4.0), Span("wait/groups", 3.0, 5.0)])
    (row,) = track.columns(np.array([0.0, 5.0]), 5.0)
    same(row.seconds, {"compute": np.array([4.0]), "wait/groups": np.array([1.0])})


def test_spans_that_touch_share_a_row_and_those_that_overlap_do_not():
    edges = np.array([0.0, 2.0])
    for start, rows in ((1.0, 1), (1.0 - 5e-7, 1), (0.95, 2)):
        track = LaneTrack(switches=False)
        track.take([Span("fetch", 0.0, 1.0), Span("flip", start, 2.0)])
        assert len(track.columns(edges, 2.0)) == rows
