"""The signals that ask a process to save and stop, beside Ctrl-C."""

from __future__ import annotations

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, and SIGHUP of a terminal that closes, unless the process was started with nohup."""
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        return (signal.SIGTERM,)
    return signal.SIGTERM, signal.SIGHUP
