"""The place where ranks of several machines meet: a store of torch.distributed in the registry of the run's queue.

    rank r ≥ 1   join/r ◂── a word of its own           meeting ──▸ has its word in it?   ack/r ◂── both words
    rank 0       join/r ──▸ all are there?  meeting ◂── its own word and theirs           ack/r ──▸ all are there?
    all ranks    store/KEY ◂──▸ [word of rank 0, value]: what torch exchanges

The words are random and made anew at each start, so an entry that an earlier start has left is never used. Every start
uses the same keys, so the registry does not grow. All of it is encrypted with the queue's keys.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from asyncrl.config.schema import Config
from asyncrl.errors import DeadlineError
from asyncrl.queue.client.client import BlockingClient, QueueClient

LOOK_S = 0.1
"""Between two looks at entries that may be of an earlier start."""


IDLE_S = 5.0
"""After this long without a call the connection to the queue is closed."""


class PostRegistry(Protocol):
    """The part of `BlockingClient` that a store needs."""

    def post(self, key: str, value: Any) -> None: ...

    def lookup(self, key: str, wait_s: float) -> Any: ...


class QueueRegistry:
    """The registry of the run's queue. Connected only while it is in use, since a silent client is named."""

    def __init__(self, config: Config, who: str) -> None:
        self._config, self._who = config, who
        self._lock = threading.Lock()
        self._client: BlockingClient | None = None
        self._idle: threading.Timer | None = None

    def post(self, key: str, value: Any) -> None:
        with self._lock:
            self._connected().post(key, value)

    def lookup(self, key: str, wait_s: float) -> Any:
        with self._lock:
            return self._connected().lookup(key, wait_s)

    def close(self) -> None:
        """Disconnect; the next call connects again."""
        with self._lock:
            if self._client is not None:
                self._client.close()
            self._client = None

    def _connected(self) -> BlockingClient:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = threading.Timer(IDLE_S, self.close)
        self._idle.daemon = True
        self._idle.start()
        if self._client is None:
            client = BlockingClient(QueueClient.of(self._config, self._who))
            try:
                client.connect()
            except BaseException:
                client.close()
                raise
            self._client = client
        return self._client


def meet(registry: PostRegistry, name: str, rank: int, world: int, deadline_s: float) -> QueueStore:
    """The store of all ranks of this start. name: of the learner or of the pool's process.

    Raises DeadlineError, which names the rank that did not come.
    """
    own, end = secrets.token_hex(16), time.monotonic() + deadline_s
    word = (_gather if rank == 0 else _join)(registry, name, own, rank or world, end, deadline_s)
    return QueueStore(registry, name, word, timedelta(seconds=deadline_s))


def _gather(registry: PostRegistry, name: str, own: str, world: int, end: float, deadline_s: float) -> str:
    """Rank 0: wait for the others."""
    met: dict[int, str] = {}
    late = [*range(1, world)]
    while late:
        joined = {rank: _found(registry, f"ranks/{name}/join/{rank}") for rank in range(1, world)}
        if joined != met:
            met = joined
            registry.post(f"ranks/{name}/meeting", [own, [joined[rank] for rank in range(1, world)]])
        acks = {rank: _found(registry, f"ranks/{name}/ack/{rank}") for rank in range(1, world)}
        late = [rank for rank in range(1, world) if acks[rank] != [own, joined[rank]]]
        _wait(end, f"{name} rank 0", f"rank {late[0]}" if late else "", deadline_s)
    return own


def _join(registry: PostRegistry, name: str, own: str, rank: int, end: float, deadline_s: float) -> str:
    registry.post(f"ranks/{name}/join/{rank}", own)
    while True:
        match _found(registry, f"ranks/{name}/meeting"):
            case [str(word), [*words]] if len(words) >= rank and words[rank - 1] == own:
                registry.post(f"ranks/{name}/ack/{rank}", [word, own])
                return word
        _wait(end, f"{name} rank {rank}", "rank 0", deadline_s)


def _wait(end: float, who: str, whom: str, deadline_s: float) -> None:
    if whom and time.monotonic() > end:
        remedy = "start `asyncrl learner` (or `asyncrl pool`) with each --node, with the same configuration"
        raise DeadlineError(who, whom, "its entry in the queue", deadline_s, remedy)
    if whom:
        time.sleep(LOOK_S)


def _found(registry: PostRegistry, key: str) -> Any:
    """The entry; None if there is none."""
    try:
        return registry.lookup(key, 0.0)
    except DeadlineError:
        return None


class QueueStore(dist.Store):
    """The store of the ranks that have met under `word`.

    `add` and `compare_set` are not atomic among ranks; torch calls neither while it makes process groups.
    """

    def __init__(self, registry: PostRegistry, name: str, word: str, timeout: timedelta) -> None:
        super().__init__()
        self._registry, self._prefix, self._word = registry, f"ranks/{name}/store/", word
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def clone(self) -> QueueStore:
        return self

    def set(self, key: str, value: bytes | str) -> None:
        held = value.encode() if isinstance(value, str) else bytes(value)
        self._registry.post(self._prefix + key, [self._word, held])

    def find(self, key: str) -> bytes | None:
        """The value of a key; None if no rank of this start has set it."""
        found = _found(self._registry, self._prefix + key)
        match found:
            case [self._word, bytes(value)]:
                return value
        return None

    def get(self, key: str) -> bytes:
        self.wait([key], self._timeout)
        return self.find(key) or b""

    def check(self, keys: Sequence[str]) -> bool:
        return all(self.find(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Raises DeadlineError, which names the first key that is missing."""
        seconds = (timeout or self._timeout).total_seconds()
        end = time.monotonic() + seconds
        for key in keys:
            while self.find(key) is None:
                if time.monotonic() > end:
                    raise DeadlineError("a rank", "the other ranks", f"the entry '{key}'", seconds)
                time.sleep(LOOK_S)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        before = self.find(key)
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)
        if (before or b"") == wanted:
            self.set(key, desired)
            before = self.find(key)
        return before if before is not None else wanted

    def add(self, key: str, amount: int) -> int:
        total = int(self.find(key) or b"0") + amount
        self.set(key, str(total))
        return total

    def delete_key(self, key: str) -> bool:
        there = self.find(key) is not None
        self._registry.post(self._prefix + key, ["", b""])
        return there

    def num_keys(self) -> int:
        raise NotImplementedError("the registry of the queue does not count the keys of one start")
