"""The seam between the engine behind HTTP and one kind of server: what the engine asks, and what it may expect.

generate(ask) ─▸ piece           many at a time
pause ─▸ install ─▸ resume       the server makes no token, and comes out of it with other weights and another label
label, load                      which weights it has, how busy it is
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.generator.engines.receiver import WeightReader, WeightReceiver
from asyncrl.types import Finish, Sampling, Version

Install = Callable[[str], Awaitable[None]]
"""install(label): makes the server compute with the new weights, and call them `label`. The server is paused."""


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """What is missing of one sample. name: no other's beginning · salt: cached prefixes are shared under the same."""

    name: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    most_tokens: int
    seed: int
    salt: str


@dataclass(frozen=True, slots=True)
class ServerChunk:
    """What came of it. labels: (label, first token, one past the last) of the weights that made them."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    labels: Sequence[tuple[str, int, int]]
    finish: Finish


def check_whole(piece: ServerChunk) -> None:
    """Raises ValueError unless each token has one log-prob and one label.

    >>> check_whole(ServerChunk([5, 6], [-1.0, -2.0], [("a", 0, 1), ("b", 1, 2)], "stop"))
    >>> check_whole(ServerChunk([5, 6], [-1.0, -2.0], [("a", 0, 1)], "stop"))
    Traceback (most recent call last):
    ValueError: an answer of 2 tokens with 2 log-probs and labels for [(0, 1)]
    """
    ends = [0, *(end for _, _, end in piece.labels)]
    spans = [(start, end) for _, start, end in piece.labels]
    joined = all(start == before <= end for before, (start, end) in zip(ends, spans, strict=False))
    if not joined or not len(piece.token_ids) == len(piece.logprobs) == ends[-1]:
        raise ValueError(
            f"an answer of {len(piece.token_ids)} tokens with {len(piece.logprobs)} log-probs and labels for {spans}"
        )


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """tokens: made so far · waiting: requests with no slot yet · kv_usage: share · preemptions so far."""

    tokens: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0
    preemptions: float = 0.0


class ServedEngine(Protocol):
    """The engine, as those see it who bring weights to its server."""

    async def flip(self, version: Version, install: Install) -> float:
        """The pause in seconds, which with kv=drain does not count the wait for samples to end.

        Raises LostWeightsError if the server went away meanwhile, and what `install` raises: then it stays paused.
        """
        ...

    async def present(self) -> None:
        """Raises LostWeightsError, once, if the server has other weights than it was flipped to."""
        ...


class Server(Protocol):
    """One kind of server. Raises UnreachableError or ServerRefusedError, and ProcessDiedError after its deadline."""

    async def start(self) -> None:
        """Connect, see whether the server can do what is asked, and end a pause that a former generator has left.
        Raises ConfigError."""
        ...

    async def generate(self, ask: ServerRequest) -> ServerChunk:
        """finish "abort": it ended for another reason than its own."""
        ...

    async def abort(self, name: str) -> None:
        """`generate` of that name returns soon with what it has; of one that is not there: nothing."""
        ...

    async def label(self) -> str: ...

    async def set_label(self, label: str) -> None:
        """Of weights that it has already."""
        ...

    async def pause(self, keep: bool) -> None:
        """No token is made from now on. keep: requests stay and go on later; else they return what they have, and no
        cached key or value is used again."""
        ...

    async def resume(self) -> None: ...

    async def load(self) -> ServerLoad: ...

    def receiver(self, engine: ServedEngine, reader: WeightReader) -> WeightReceiver: ...

    async def close(self) -> None: ...
