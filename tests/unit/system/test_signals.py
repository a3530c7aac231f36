"""Signals that stop a process."""

from __future__ import annotations

import signal

import pytest

from asyncrl.system.signals import stop_signals


@pytest.mark.parametrize("ignored", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_the_process_was_started_to_ignore_stops_nothing(ignored: signal.Signals) -> None:
    """nohup ignores SIGHUP; the queue of a job that a scheduler may signal as a whole, SIGTERM."""
    (other,) = {signal.SIGTERM, signal.SIGHUP} - {ignored}
    before = {each: signal.getsignal(each) for each in (ignored, other)}
    signal.signal(ignored, signal.SIG_IGN)
    signal.signal(other, signal.SIG_DFL)  # the tests may run under nohup
    try:
        assert [*stop_signals()] == [other]
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
