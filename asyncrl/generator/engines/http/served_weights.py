"""Which weights a server has, and whether samples may begin.

Every set of weights gets a label that no other has, and the server returns with each token the label of the weights
that made it. So a server that restarts, or that another process updates, is noticed before its tokens are used: then
the version is NO_VERSION, and the gate stays closed until the server has the learner's weights again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from itertools import count

from asyncrl.config.sections.generator import KvAtFlip
from asyncrl.generator.engines.http.http_link import ServerRefusedError, UnreachableError
from asyncrl.generator.engines.http.server import Install, Server
from asyncrl.generator.engines.receiver import LostWeightsError
from asyncrl.types import NO_VERSION, Version


class ServedWeights:
    """The weights of one server.

    gate     set while samples may begin
    flips    flips begun so far
    label    of the weights that the server should have
    changed  called when the gate, or whether a flip is under way, has changed
    lost     called when the server turns out to have other weights
    """

    def __init__(
        self,
        server: Server,
        kv: KvAtFlip,
        version: Version,
        *,
        changed: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        self.version, self.flips, self.gate = version, 0, asyncio.Event()
        self._server, self._kv = server, kv
        self._changed, self._lost = changed, lost
        self._nonce, self._numbers = secrets.token_hex(4), count()
        self.label = self._new_label(version)
        self._flipping = False
        self._loss: str | None = None
        """Until `check` has raised it."""

    @property
    def usable(self) -> bool:
        return self.gate.is_set() and not self._flipping

    async def start(self) -> None:
        await self._server.set_label(self.label)
        if self.version != NO_VERSION:
            self.gate.set()

    async def flip(self, version: Version, install: Install, drained: Callable[[], Awaitable[None]]) -> float:
        """See `server.Flip`. drained: waits for the samples in flight, up to a deadline."""
        self._flipping = True
        self.flips += 1
        self._changed()
        try:
            if self._kv != "keep":
                self.gate.clear()
            if self._kv == "drain":
                await drained()
            begun, label = time.perf_counter(), self._new_label(version)
            await self._server.pause(keep=self._kv == "keep")
            await install(label)
            self.version, self.label, self._loss = version, label, None
            await self._server.resume()
            self.gate.set()
            return time.perf_counter() - begun
        except (UnreachableError, ServerRefusedError) as error:
            self._lose(f"the flip to version {version} failed: {error}")
            raise self._take_loss() from error
        finally:
            self._flipping = False
            self._changed()

    async def check(self) -> None:
        """See `server.CheckWeights`."""
        await self.still_ours()
        if self._loss is not None:
            label = self._new_label(NO_VERSION)
            await self._server.set_label(label)  # so that the next restart is noticed too
            self.label = label
            raise self._take_loss()

    async def still_ours(self) -> bool:
        """Whether the server has the weights of the last flip. Closes the gate if not."""
        expected = self.label
        try:
            label = await self._server.label()
        except (ServerRefusedError, UnreachableError) as error:
            label = str(error)
        if not self._flipping and label != expected == self.label:
            self._lose(f"it has weights {label!r}, not {expected!r}: it restarted, or somebody updated it")
        return self.version != NO_VERSION

    def is_flipped(self, label: str) -> bool:
        """Whether the label is of weights that this engine was flipped to."""
        return label.startswith(self._nonce) and version_in(label) != NO_VERSION

    def _new_label(self, version: Version) -> str:
        """Unlike any other of this or another generator: lineages number their versions alike."""
        return f"{self._nonce}.{next(self._numbers)}.{version}"

    def _lose(self, reason: str) -> None:
        self._loss, self.version = reason, NO_VERSION
        self.gate.clear()
        self._changed()
        self._lost()

    def _take_loss(self) -> LostWeightsError:
        reason, self._loss = self._loss, None
        return LostWeightsError(reason)


def version_in(label: str) -> Version:
    """
    >>> version_in("0f9a.3.12")
    12
    """
    return int(label.rpartition(".")[2])
