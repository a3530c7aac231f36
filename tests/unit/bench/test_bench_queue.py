"""The comparison's own arithmetic, and that what each system carries arrives as it was."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.types import Task
from bench.bars import figures, verdicts
from bench.queue import pyzmq_bare, redis_list, report
from bench.queue.asyncrl_queue import columns_of, group_of
from bench.queue.load import AHEAD, Load, Source, check

LOAD = Load(groups=40, tokens=16)


def test_ratios_are_medians_of_each_repetition_not_ratios_of_medians() -> None:
    ours, theirs = report.BARS[2].figure, report.BARS[2].over
    assert theirs == "rows_per_s.pyzmq_bare.512"
    repetitions = [{ours: 6.0, theirs: 10.0}, {ours: 70.0, theirs: 100.0}, {ours: 1.0, theirs: 2.0}]
    found = figures(repetitions, report.BARS)
    assert found[ours] == 6.0
    assert found[f"{ours} / {theirs}"] == pytest.approx(0.6)


def test_what_is_absent_is_neither_zero_nor_a_pass() -> None:
    found = figures([{"rows_per_s.asyncrl_memory.512": 5.0, "ledger_transitions_per_s": 1e5}], report.BARS)
    assert not any("transferqueue" in name for name in found)
    said = dict(verdicts(found, report.BARS))
    assert said["rows_per_s.asyncrl_memory.512 / rows_per_s.transferqueue.512 ≥ 10"] == "absent: not measured"
    assert said["ledger_transitions_per_s ≥ 100,000"] == "pass: 1e+05"
    names = {"asyncrl_memory": "ours", "transferqueue": "theirs"}
    text = report.table(names, found, {"transferqueue": "not installed"}, "1 core.", 1)
    assert "| transferqueue | theirs: absent, not installed |" in text


def test_a_hop_must_stay_below_its_bar() -> None:
    bar = next(bar for bar in report.BARS if bar.figure == "hop_ms_p99.asyncrl_memory")
    assert (bar.passes(3.0), bar.passes(3.1), bar.passes(None)) == (True, False, False)


@pytest.mark.parametrize("blobs", [1, 8])
def test_a_group_in_a_redis_list_comes_back_as_it_was(blobs: int) -> None:
    sent = Source(LOAD).columns(21)
    number, got = redis_list.decode(redis_list.encode(21, sent, blobs), LOAD.tokens)
    check(LOAD, number, got)
    assert all(np.array_equal(sent[name], got[name]) for name in sent)


def test_a_bare_message_comes_back_as_it_was() -> None:
    import zmq

    sent = Source(LOAD).columns(21)
    frames = [zmq.Frame(part) for part in pyzmq_bare.encode(21, sent)]
    assert len(frames) == 3
    number, got = pyzmq_bare.decode(frames, LOAD.tokens)
    assert number == 21
    assert all(np.array_equal(sent[name], got[name]) for name in sent)


def test_the_columns_of_our_own_group_are_those_that_went_in() -> None:
    sent = Source(LOAD).columns(3)
    group = group_of(Task(3, "three"), sent)
    assert (group.tokens, group.start_version) == (8 * 16, AHEAD)
    check(LOAD, 3, columns_of(group))


def test_a_wrong_group_is_noticed() -> None:
    with pytest.raises(AssertionError):
        check(LOAD, 4, Source(LOAD).columns(3))
