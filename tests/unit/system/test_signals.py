"""Signals that stop a process."""

from __future__ import annotations

import signal

import pytest

from asyncrl.system.signals import stop_signals


@pytest.mark.parametrize("ignored", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_the_process_was_started_to_ignore_stops_nothing(ignored: signal.Signals) -> None:
    """nohup ignores SIGHUP; the queue of a job that a scheduler may signal as a whole, SIGTERM."""
    before = signal.getsignal(ignored)
    other = {signal.SIGTERM, signal.SIGHUP} - {ignored}
    signal.signal(ignored, signal.SIG_IGN)
    try:
        assert {*stop_signals()} == other
    finally:
        signal.signal(ignored, before)
