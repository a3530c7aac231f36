"""Connections between clients and the broker, as ZeroMQ over TCP has them.

A connection keeps the order of its messages and doubles none. When it breaks, those that have not arrived are lost,
but a first part of them may have left the sender already: these still arrive, maybe after what the next connection
brings. A silent one loses everything and breaks later. The client hears of a new connection, not of every loss.
"""

from __future__ import annotations

import random
from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from asyncrl.queue.client.link import Listener

from .loop import VirtualLoop

Frames = list[bytes]
LONGEST = 40
"""Of a delay, in mean ones."""

RETRY_S = (0.05, 0.5)


class Host(Protocol):
    """The machine of the broker."""

    @property
    def up(self) -> bool: ...

    def arrive(self, identity: bytes, frames: Frames) -> None: ...


class Network:
    """passed: called with every message that arrives anywhere, before its receiver has it."""

    def __init__(
        self, loop: VirtualLoop, rng: random.Random, latency_s: float, passed: Callable[[], None]
    ) -> None:
        self.loop, self.rng, self.passed = loop, rng, passed
        self.latency_s = latency_s
        self.links: dict[bytes, SimLink] = {}
        self.host: Host

    def latency(self) -> float:
        """Mostly short, now and then long, but never so long that a calm network alone costs somebody a lease."""
        drawn = self.rng.expovariate(1 / self.latency_s) * (20 if self.rng.random() < 0.03 else 1)
        return min(drawn, LONGEST * self.latency_s)

    def send(self, identity: bytes, frames: Sequence[Any]) -> bool:
        """From the broker. Returns False if it finds no connection."""
        link = self.links.get(identity)
        if link is None or link.connection is None:
            return False
        link.connection.to_client.send([bytes(frame) for frame in frames])
        return True

    def break_all(self) -> None:
        """The broker is gone."""
        for link in list(self.links.values()):
            link.drop()


class Lane:
    """One direction of a connection."""

    def __init__(self, network: Network, arrive: Callable[[Frames], None]) -> None:
        self._network, self._arrive = network, arrive
        self._under_way: deque[TimerHandle] = deque()
        self._last = 0.0
        self.silent = False

    def send(self, frames: Frames) -> None:
        if self.silent:
            return
        loop = self._network.loop
        self._last = max(self._last, loop.time() + self._network.latency())
        self._under_way.append(loop.call_at(self._last, self._deliver, frames))

    def cut(self) -> None:
        """What is sent from now on is lost, and some of what is under way."""
        left = 0 if self.silent else self._network.rng.randint(0, len(self._under_way))
        for handle in list(self._under_way)[left:]:
            handle.cancel()
        self.silent = True

    def end(self) -> None:
        """What has not come by now never comes."""
        for handle in self._under_way:
            handle.cancel()
        self._under_way.clear()

    def _deliver(self, frames: Frames) -> None:
        self._under_way.popleft()
        self._network.passed()
        self._arrive(frames)


class Connection:
    def __init__(self, network: Network, identity: bytes, heard: Callable[[Frames], None]) -> None:
        self.to_broker = Lane(network, lambda frames: network.host.arrive(identity, frames))
        self.to_client = Lane(network, heard)

    def cut(self) -> None:
        self.to_broker.cut()
        self.to_client.cut()


class SimLink:
    """A client's end: see `asyncrl.queue.client.link.Link`."""

    address = "the simulated broker"

    def __init__(self, network: Network, identity: bytes) -> None:
        self._network, self._identity = network, identity
        self._listener: Listener | None = None
        self.connection: Connection | None = None
        self._broken: Connection | None = None

    def open(self, listener: Listener) -> None:
        self._listener = listener
        self._network.links[self._identity] = self
        self._retry()

    def send(self, frames: Sequence[Any]) -> None:
        if self.connection is not None:
            # Copied, as a wire would: a sender may reuse its arrays.
            self.connection.to_broker.send([bytes(frame) for frame in frames])

    def renew(self) -> None:
        self.drop()

    def close(self) -> None:
        """Also when the process is killed: what it has sent may still arrive, nothing reaches it any more."""
        self._listener = None
        self._network.links.pop(self._identity, None)
        if self.connection is not None:
            self.connection.cut()
            self.connection = None

    # ------------------------------------------------------------------ what may happen to it

    def drop(self) -> None:
        if self.connection is not None:
            self.connection.cut()
            self._broken, self.connection = self.connection, None
            self._retry()

    def swallow(self, seconds: float) -> None:
        """Nothing gets through any more, and nobody notices for so long."""
        if self.connection is not None:
            broken = self.connection
            broken.to_broker.silent = broken.to_client.silent = True
            self._network.loop.call_later(seconds, lambda: self.connection is broken and self.drop())

    def _retry(self) -> None:
        self._network.loop.call_later(self._network.rng.uniform(*RETRY_S), self._connect)

    def _connect(self) -> None:
        if self._listener is None or self.connection is not None:
            return
        if not self._network.host.up:
            self._retry()
            return
        if self._broken is not None:
            self._broken.to_client.end()  # a link reads all that has come before it says that it is connected again
        self.connection = Connection(self._network, self._identity, self._heard)
        self._listener.connected()

    def _heard(self, frames: Frames) -> None:
        if self._listener is not None:
            self._listener.received(frames)
