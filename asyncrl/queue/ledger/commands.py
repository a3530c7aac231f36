"""What all commands of a ledger share: its book, its journal, and the checks that several of them begin with."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.errors import RefusedError, RunClosedError
from asyncrl.queue.ledger.events import Event
from asyncrl.queue.ledger.ledger_state import LedgerState
from asyncrl.queue.ledger.settings import StreamSettings
from asyncrl.queue.ledger.transitions import apply


class Commands:
    """`journal` sees every event after it was applied."""

    def __init__(self, journal: Callable[[Event], None] | None = None) -> None:
        self.book = LedgerState()
        self._journal = journal

    def apply(self, event: Event) -> None:
        """The one way to change the state; replaying a journal goes through here."""
        apply(self.book, event)
        if self._journal is not None:
            self._journal(event)

    def require_running(self) -> None:
        if self.book.closed is not None:
            raise RunClosedError(self.book.closed)

    def require_open(self) -> StreamSettings:
        self.require_running()
        if self.book.settings is None:
            raise RefusedError("unopened", "no learner has opened this stream yet")
        return self.book.settings
