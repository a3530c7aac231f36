"""The broker's memory of a client: which requests it waits for, and the replies that it may not have read.

request ──▸ handled ──▸ reply, kept ──▸ the client's next message does not wait for it any more: forgotten
                             └── the request comes again: sent again, within limits
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncrl.queue.wire.envelope import MAX_REQUESTS, Message

CLIENT_BYTES = 1 << 28
"""Bytes of a client's unread replies above which it is 'busy'. As many are sent again to it within `AGAIN_S`."""

ALL_BYTES, SMALL_BYTES = 1 << 28, 1 << 16
"""Bytes of the values in all unread replies above which a client with more than the second number of them is 'busy'.
The payloads behind them count for their client alone: the store has most of them anyway. The socket holds a copy of
each value that is sent, so that within `AGAIN_S` no more values are sent again to a client than it has not read."""

AGAIN_S = 30.0


class Grants(NamedTuple):
    """leases: (ordinal, epoch) of each"""

    stream: str
    leases: Sequence[tuple[int, int]]


@dataclass(slots=True)
class UnreadValues:
    """The size of the values in replies that may not have been read."""

    nbytes: int = 0


@dataclass(slots=True)
class ClientState:
    """The broker's memory of one client.

    name    of the client, the same for all its sessions
    unread  replies that it may not have read, by request · grants: the leases in them
    values  those of all clients
    again   bytes of replies that were sent again since `again_from` · values_again: of the values in them
    """

    name: str = ""
    newest: int = 0
    waiting: set[int] = field(default_factory=set)
    unread: dict[int, Message] = field(default_factory=dict)
    unread_bytes: int = 0
    grants: dict[int, Grants] = field(default_factory=dict)
    values: UnreadValues = field(default_factory=UnreadValues)
    own_values: int = 0
    again: int = 0
    values_again: int = 0
    again_from: float = 0.0
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
            self.drop(request_id)
        return over

    def keep(self, request_id: int, message: Message, grants: Grants | None = None) -> None:
        """Keep a reply until the client does not wait for it any more."""
        self.unread[request_id] = message
        self._count(message, 1)
        if grants is not None:
            self.grants[request_id] = grants

    def drop(self, request_id: int) -> None:
        """Forget a reply, if there is one."""
        message = self.unread.pop(request_id, None)
        if message is not None:
            self._count(message, -1)
        self.grants.pop(request_id, None)

    def drop_all(self) -> None:
        for request_id in list(self.unread):
            self.drop(request_id)

    def may_have_again(self, request_id: int, now: float) -> bool:
        """Whether an unread reply may be sent once more, which counts it."""
        if now - self.again_from >= AGAIN_S:
            self.again, self.values_again, self.again_from = 0, 0, now
        message = self.unread[request_id]
        nbytes, values = sum(map(len, message)), len(message[0])
        if self.again and self.again + nbytes > CLIENT_BYTES:
            return False
        if self.values_again + values > max(self.own_values, SMALL_BYTES):
            return False
        self.again, self.values_again = self.again + nbytes, self.values_again + values
        return True

    @property
    def busy(self) -> bool:
        """Whether the client has to read before its next request is handled."""
        if len(self.waiting) > MAX_REQUESTS or self.unread_bytes >= CLIENT_BYTES:
            return True
        return self.values.nbytes >= ALL_BYTES and self.own_values > SMALL_BYTES

    def _count(self, message: Message, sign: int) -> None:
        self.unread_bytes += sign * sum(map(len, message))
        self.own_values += sign * len(message[0])
        self.values.nbytes += sign * len(message[0])
