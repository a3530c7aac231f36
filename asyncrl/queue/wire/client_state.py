"""What the broker remembers of a client: which of its requests are over, and the replies it may not have read.

Every message of a client says what it knew when it was sent: the newest number it has given to a request, and
which numbers up to that it still waits for. All others are over for ever, so that such words may come late,
twice or in any order. A request that is over is never done again, and its reply is forgotten; a request that is
not is done once, however often it comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

UNKNOWN = -1
"""Of the broker's complaint about a message that it could not read. No request has this number, as they count from 1:
who waits would take it for the answer."""

MAX_REQUESTS = 64
MAX_UNREAD_BYTES = 1 << 28
"""Of one client: requests that it waits for at once, and bytes of replies it has not read, before it is 'busy'."""

Message = list[Any]
"""Frames: of a message, envelope first; of a reply in one, first what is packed of it."""


@dataclass(slots=True)
class ClientState:
    """name: of the client, the same for all its sessions."""

    name: str = ""
    newest: int = 0
    waiting: set[int] = field(default_factory=set)
    unread: dict[int, Message] = field(default_factory=dict)
    unread_bytes: int = 0
    heard_at: float = 0.0

    def hear(self, newest: int, waiting: Iterable[int]) -> set[int]:
        """Take in what a message says. Returns the requests that are over since.

        >>> caller = ClientState()
        >>> caller.hear(2, [1, 2]), caller.hear(3, [2, 3]), caller.hear(2, [1, 2]), caller.waiting
        (set(), {1}, set(), {2, 3})
        """
        said, known = set(waiting), self.waiting
        over = {i for i in known - said if i <= newest}
        self.waiting = known - over | {i for i in said - known if i > self.newest}
        self.newest = max(self.newest, newest)
        for request_id in over:
            self.unread_bytes -= _size(self.unread.pop(request_id, ()))
        return over

    def keep(self, request_id: int, message: Message) -> None:
        """Until the client does not wait for it any more."""
        self.unread[request_id] = message
        self.unread_bytes += _size(message)

    @property
    def busy(self) -> bool:
        """Nothing more is done for it before it reads."""
        return len(self.waiting) > MAX_REQUESTS or self.unread_bytes >= MAX_UNREAD_BYTES


def _size(message: Iterable[Any]) -> int:
    return sum(map(len, message))
