"""The seam between the engine behind HTTP and one kind of server.

generate(request) ─▸ chunk       many at a time
pause ─▸ install ─▸ resume       the server makes no token, and continues with other weights and another label
label, load                      which weights the server has, how busy it is
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.generator.engines.http.http_link import ServerRefusedError, UnreachableError
from asyncrl.generator.engines.receiver import WeightReader, WeightReceiver
from asyncrl.types import Finish, Sampling, Version

Install = Callable[[str], Awaitable[None]]
"""install(label): the paused server takes the new weights, and calls them `label`."""

Flip = Callable[[Version, Install], Awaitable[float]]
"""flip(version, install): pause, install, resume. Returns the pause in seconds, without the wait of a drain.

Raises LostWeightsError if the server went away meanwhile, and the errors of `install`: then it stays paused."""

CheckWeights = Callable[[], Coroutine[Any, Any, None]]
"""Raises LostWeightsError, once, if the server has other weights than it was flipped to."""


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """The missing rest of one sample.

    name: a prefix of no other request's name · salt: requests with the same salt share cached prefixes
    """

    name: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    most_tokens: int
    seed: int
    salt: str


@dataclass(frozen=True, slots=True)
class ServerChunk:
    """The server's answer. labels: (label, first token, one past the last) of the weights that made the tokens."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    labels: Sequence[tuple[str, int, int]]
    finish: Finish


LOGPROBS = (-1e6, 0.01)
"""Below and above all log-probs, rounding included."""


def check_whole(chunk: ServerChunk, most_tokens: int, vocabulary: int) -> None:
    """Raises ValueError unless the tokens are some of the vocabulary, and each has one log-prob and one label.

    >>> check_whole(ServerChunk([5, 6], [-1.0, -2.0], [("a", 0, 1), ("b", 1, 2)], "stop"), 2, 7)
    >>> check_whole(ServerChunk([5, 6], [-1.0, -2.0], [("a", 0, 1)], "stop"), 2, 7)
    Traceback (most recent call last):
    ValueError: an answer of 2 tokens with 2 log-probs and labels for [(0, 1)]
    >>> check_whole(ServerChunk([5, 7], [-1.0, -2.0], [("a", 0, 2)], "stop"), 2, 7)
    Traceback (most recent call last):
    ValueError: an answer with tokens outside of the vocabulary of 7, or with log-probs that are none
    """
    if len(chunk.token_ids) > most_tokens:
        raise ValueError(f"an answer of {len(chunk.token_ids)} tokens, {most_tokens} were requested")
    ends = [0, *(end for _, _, end in chunk.labels)]
    spans = [(start, end) for _, start, end in chunk.labels]
    joined = all(start == before <= end for before, (start, end) in zip(ends, spans, strict=False))
    if not joined or not len(chunk.token_ids) == len(chunk.logprobs) == ends[-1]:
        raise ValueError(
            f"an answer of {len(chunk.token_ids)} tokens with {len(chunk.logprobs)} log-probs and labels for {spans}"
        )
    ids_are_known = all(type(token) is int and 0 <= token < vocabulary for token in chunk.token_ids)
    if not ids_are_known or not all(LOGPROBS[0] < logprob < LOGPROBS[1] for logprob in chunk.logprobs):
        raise ValueError(
            f"an answer with tokens outside of the vocabulary of {vocabulary}, or with log-probs that are none"
        )


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """tokens: made so far · at_once: they are counted when they are made, not when their request ends
    waiting: requests with no slot yet · kv_usage: share · preemptions so far."""

    tokens: float = 0.0
    at_once: bool = False
    waiting: float = 0.0
    kv_usage: float = 0.0
    preemptions: float = 0.0


class Server(Protocol):
    """One kind of server. Raises UnreachableError or ServerRefusedError, and ProcessDiedError after its deadline."""

    async def start(self) -> None:
        """Connect, check the server's abilities, and end a pause that a former generator has left.

        Raises ConfigError.
        """
        ...

    async def generate(self, request: ServerRequest) -> ServerChunk:
        """finish "abort": it neither stopped nor reached `most_tokens`."""
        ...

    async def abort(self, name: str) -> None:
        """`generate` of that name returns soon with its tokens so far; an unknown name is ignored."""
        ...

    async def label(self) -> str: ...

    async def set_label(self, label: str) -> None:
        """Rename the weights that the server has."""
        ...

    async def pause(self, keep: bool) -> None:
        """No token is made from now on.

        keep: requests stay and continue later. Otherwise they return their tokens so far, and no cached key or value is
        used again.
        """
        ...

    async def resume(self) -> None: ...

    async def load(self) -> ServerLoad: ...

    def receiver(self, reader: WeightReader, flip: Flip, check_weights: CheckWeights) -> WeightReceiver: ...

    async def close(self) -> None: ...


LOAD_S = 0.1
"""Between two requests for the server's load, while it has something to do."""


class LoadMeter:
    """The server's load, polled while it has requests, and the tokens that it has made for this engine.

    looked  called after each look
    """

    def __init__(self, server: Server, looked: Callable[[], None]) -> None:
        self.load, self.looked = ServerLoad(), looked
        self.finished_tokens = 0
        """Tokens of requests that have ended, for servers that report none."""
        self._server = server
        self._before = 0.0
        """Tokens before a restart of the server, less those before this engine began."""

    @property
    def tokens(self) -> float:
        return max(float(self.finished_tokens), self._before + self.load.tokens)

    async def start(self) -> None:
        self.load = await self._request()
        self._before = -self.load.tokens

    async def run(self, requests: Collection[Any]) -> None:
        """Poll the load while there are requests. Runs until cancelled."""
        while True:
            await asyncio.sleep(LOAD_S)
            if not requests:
                continue
            load = await self._request()
            self.looked()
            if load.tokens < self.load.tokens:
                self._before += self.load.tokens
            self.load = load

    async def _request(self) -> ServerLoad:
        """The load as before where the server does not report it."""
        with contextlib.suppress(UnreachableError, ServerRefusedError):
            return await self._server.load()
        return self.load
