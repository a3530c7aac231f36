"""The broker's memory of a client: which of its requests are over, and the replies it may not have read.

Every message of a client states its knowledge when it was sent: the newest number it has given to a request, and the
numbers up to that which it still waits for. All others are over for ever, so that such statements may come late,
twice or in any order. A request that is over is never handled again, and its reply is forgotten; a request that is
not is handled once, however often it comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

UNKNOWN = -1
"""The number in the broker's complaint about a message that it could not read. Requests count from 1, so that nobody
takes it for a reply."""

MAX_REQUESTS = 64
MAX_UNREAD_BYTES = 1 << 28
"""Limits of one client before it is 'busy': requests that it waits for at once, and bytes of its unread replies."""

Message = list[Any]
"""Frames of a message, its envelope first; or of one reply in a message, its packed value first."""


@dataclass(slots=True)
class ClientState:
    """name: of the client, the same for all its sessions."""

    name: str = ""
    newest: int = 0
    waiting: set[int] = field(default_factory=set)
    unread: dict[int, Message] = field(default_factory=dict)
    unread_bytes: int = 0
    seen_at: float = 0.0

    def update(self, newest: int, waiting: Iterable[int]) -> set[int]:
        """Take in the statement of a message. Returns the requests that are over since.

        >>> client = ClientState()
        >>> client.update(2, [1, 2]), client.update(3, [2, 3]), client.update(2, [1, 2]), client.waiting
        (set(), {1}, set(), {2, 3})
        """
        stated, known = set(waiting), self.waiting
        over = {i for i in known - stated if i <= newest}
        self.waiting = known - over | {i for i in stated - known if i > self.newest}
        self.newest = max(self.newest, newest)
        for request_id in over:
            self.unread_bytes -= _size(self.unread.pop(request_id, ()))
        return over

    def keep(self, request_id: int, message: Message) -> None:
        """Keep a reply until the client does not wait for it any more."""
        self.unread[request_id] = message
        self.unread_bytes += _size(message)

    @property
    def busy(self) -> bool:
        """Whether the client has to read before its next request is handled."""
        return len(self.waiting) > MAX_REQUESTS or self.unread_bytes >= MAX_UNREAD_BYTES


def _size(message: Iterable[Any]) -> int:
    return sum(map(len, message))
