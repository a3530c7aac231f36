"""What the learner needs from its neighbours, as protocols: the queue's blocking client and the weight
publisher.

The tests put in-memory fakes behind them; a run puts `asyncrl.queue` and `asyncrl.sync` there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from asyncrl.queue.ledger.ledger import StreamSettings
from asyncrl.types import Group, Task, Version


class Claim(Protocol):
    """`last`: with this claim the step's groups are all handed out. attempt: goes with the step's further claims."""

    @property
    def groups(self) -> list[Group]: ...

    @property
    def last(self) -> bool: ...

    @property
    def attempt(self) -> int: ...


class Opened(Protocol):
    @property
    def learner_epoch(self) -> int: ...

    @property
    def lineage(self) -> int: ...

    @property
    def version(self) -> Version: ...


class Trained(Protocol):
    """stats: the latest telemetry of each worker by its name · depth: the ledger's counts."""

    @property
    def version(self) -> Version: ...

    @property
    def stats(self) -> Mapping[str, Mapping[str, Any]]: ...

    @property
    def depth(self) -> Mapping[str, Any]: ...


class LearnerClient(Protocol):
    """The learner's part of `QueueClient`, blocking, callable from several threads."""

    def post(self, key: str, value: Any) -> None: ...

    def room(self, stream: str, wait_s: float) -> tuple[int, int]: ...

    def submit(self, stream: str, tasks: Sequence[Task], min_version: Version = 0) -> None: ...

    def open(self, stream: str, settings: StreamSettings, snapshot: bytes | None = None) -> Opened: ...

    def claim(
        self,
        stream: str,
        *,
        learner_epoch: int,
        step: int,
        index: int,
        rank: int,
        max_tokens: int,
        whole: bool,
        wait_s: float,
        attempt: int | None = None,
    ) -> Claim | None: ...

    def trained(
        self, stream: str, *, learner_epoch: int, step: int, waited: float | None = None
    ) -> Trained: ...

    def reject(self, stream: str, *, learner_epoch: int, step: int, reason: str) -> int: ...

    def abandon(
        self,
        stream: str,
        *,
        learner_epoch: int,
        step: int,
        attempt: int,
        dropped: Sequence[int],
        reason: str,
    ) -> int: ...

    def collect(self, stream: str, *, learner_epoch: int, wait_s: float) -> list[Group]: ...

    def snapshot(self, stream: str, *, learner_epoch: int) -> bytes: ...

    def status(self) -> Mapping[str, Any]: ...

    def checkpointed(self, stream: str, *, learner_epoch: int, version: Version) -> None: ...

    def finish(self, reason: str) -> None: ...


class Published(Protocol):
    """pause_s: how long the learner stood still · floor_s: one plain copy of as many bytes"""

    @property
    def pause_s(self) -> float: ...

    @property
    def floor_s(self) -> float: ...


class WeightPublisher(Protocol):
    """publish() returns once the live weights may change again."""

    @property
    def endpoint(self) -> str: ...

    def publish(self, version: Version) -> Published: ...

    def stats(self) -> Mapping[str, float]: ...

    def close(self, wait_s: float) -> None: ...
