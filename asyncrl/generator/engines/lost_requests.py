"""Requests that a server, or vLLM, has not answered, and those among them that it has lost.

A request is lost if it is old, and the server meanwhile made several times as many tokens of each request, on
average, as this one may have. So no pause, slow server or long answer makes a request a lost one. While requests wait
at the server for a slot nothing is counted: the old one may be one of these. A server that makes no token at all is
noticed by `generator/watches.py`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from asyncrl.generator.engines.engine import SampleLostError

R = TypeVar("R", bound=Hashable)

TIMES_ITS_TOKENS = 4.0
"""How many times as many tokens as the request may have."""


def lost_error(engine: str, name: str, deadline_s: float) -> SampleLostError:
    """The error of a lost request. engine: that has lost it"""
    return SampleLostError(
        f"{engine} has not answered {name} after {deadline_s:g} s, though it has made {TIMES_ITS_TOKENS:g} times as "
        f"many tokens of each other request as {name} may have"
    )


class _Owed(NamedTuple):
    since: float
    pace: float
    most_tokens: int


class LostRequests(Generic[R]):
    """Pure. deadline_s: no request is lost before"""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._owed: dict[R, _Owed] = {}
        self._lost: set[R] = set()
        self._tokens = self._pace = 0.0
        """The server's tokens at the last look; those of one request, on average, since the first."""
        self._present = 0
        """Requests that were there at the last look or came since: the new tokens are theirs."""

    @property
    def longest(self) -> int:
        """The tokens that one of the requests may still have."""
        return max((owed.most_tokens for owed in self._owed.values()), default=0)

    def begin(self, request: R, now: float, most_tokens: int) -> None:
        self._owed[request] = _Owed(now, self._pace, most_tokens)
        self._present += 1

    def end(self, request: R) -> None:
        """The request is answered, or given up."""
        self._owed.pop(request, None)

    def take_lost(self, request: R) -> bool:
        """Whether the request was lost. It is forgotten."""
        lost = request in self._lost
        self._lost.discard(request)
        return lost

    def look(self, now: float, tokens: float, queued: bool) -> list[R]:
        """The requests that are lost from now on. tokens: the server's, so far · queued: requests wait for a slot"""
        made, self._tokens = tokens - self._tokens, tokens
        if self._present and not queued:
            self._pace += made / self._present
        lost = [
            request
            for request, (since, pace, most_tokens) in self._owed.items()
            if now - since >= self._deadline_s and self._pace - pace >= TIMES_ITS_TOKENS * most_tokens
        ]
        for request in lost:
            self._lost.add(request)
            self.end(request)
        self._present = len(self._owed)
        return lost
