"""An engine with no model: its tokens are a function of (ordinal, sample). For tests, and to load a queue.

sample ─▸ in flight ──┐
                      ├─▸ _run: one token for every sample in flight, then yields to the event loop
flip ─────────────────┘   nothing in flight: _run waits for a request
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from asyncrl.counter_rng import stream_key
from asyncrl.errors import RunClosedError
from asyncrl.generator.engines.engine import Pieces, SampleRequest, check_complete, check_fits, span_seconds
from asyncrl.generator.engines.receiver import LocalReceiver, WeightReader, WeightReceiver
from asyncrl.telemetry.spans import Spans
from asyncrl.types import NO_VERSION, Finish, Turn, Version

Script = Callable[[int, int], Sequence[int]]
"""(ordinal, sample) -> the tokens that the sample consists of, the end token included."""

LOGPROB = -0.5
"""The log-prob of every scripted token."""


def hashed_script(vocabulary: int, longest: int) -> Script:
    """1 to `longest` tokens below `vocabulary`, all of them fixed by (ordinal, sample)."""

    def script(ordinal: int, sample: int) -> list[int]:
        key = int(stream_key(0, ordinal, sample))
        return np.random.default_rng(key).integers(0, vocabulary, 1 + key % longest).tolist()

    return script


@dataclass(slots=True)
class _InFlight:
    request: SampleRequest
    scripts: list[list[int]]
    result: asyncio.Future[list[Turn]]
    versions: list[Version] = field(default_factory=list)
    """The versions of the tokens made so far, the same for all samples."""

    @property
    def longest(self) -> int:
        return min(max(len(script) for script in self.scripts), self.request.sampling.max_tokens)

    @property
    def unfinished(self) -> int:
        return sum(len(script) > len(self.versions) for script in self.scripts)

    def give_pieces(self, pieces: Pieces) -> None:
        made = len(self.versions)
        for sample, script in enumerate(self.scripts):
            if made == len(script):
                pieces.take(sample, self.turn(script))
            elif made < len(script) and made % pieces.every == 0:
                pieces.take(sample, replace(self.turn(script), finish="abort"))

    def turn(self, script: list[int]) -> Turn:
        made = script[: min(len(self.versions), self.request.sampling.max_tokens)]
        finish: Finish = "stop" if len(made) == len(script) else "length"
        return self.request.turn(made, [LOGPROB] * len(made), self.versions[: len(made)], finish)


class ScriptedEngine:
    """See `Engine`. targets: the parameters that `flip` writes to; they have no influence on the tokens."""

    def __init__(
        self,
        script: Script,
        *,
        slots: int = 256,
        max_length: int = 1024,
        targets: Mapping[str, Tensor] | None = None,
        version: Version = NO_VERSION,
    ) -> None:
        self._version = version
        self._script, self._slots, self._max_length = script, slots, max_length
        self.targets = dict(targets) if targets is not None else {"weight": torch.zeros(4)}
        self._in_flight: dict[str, _InFlight] = {}
        self._wake = asyncio.Event()
        self._spans = Spans("engine")
        self._tokens = 0
        self._runner: asyncio.Task[None] | None = None

    @property
    def version(self) -> Version:
        return self._version

    async def start(self) -> None:
        self._runner = asyncio.create_task(self._run(), name="engine")

    async def sample(self, request: SampleRequest) -> list[Turn]:
        check_fits(request, self._slots, self._max_length)
        result: asyncio.Future[list[Turn]] = asyncio.get_running_loop().create_future()
        samples = range(request.first, request.first + request.n)
        scripts = [self._rest(request, list(self._script(request.ordinal, sample))) for sample in samples]
        self._in_flight[request.request_id] = _InFlight(request, scripts, result)
        self._wake.set()
        try:
            return await result
        finally:
            self._in_flight.pop(request.request_id, None)

    def _rest(self, request: SampleRequest, script: list[int]) -> list[int]:
        return script[request.made : None if request.stop is None else request.stop.length(np.array(script))]

    async def flip(self, staged: Mapping[str, Tensor], version: Version) -> float:
        start = time.perf_counter()
        check_complete(self.targets, staged, version)
        for name, target in self.targets.items():
            target.data.copy_(staged[name])
        self._version = version
        return time.perf_counter() - start

    def receiver(self, reader: WeightReader) -> WeightReceiver:
        return LocalReceiver(self.targets, self.flip, reader)

    def stats(self) -> dict[str, float]:
        running = sum(flight.unfinished for flight in self._in_flight.values())
        return {
            "tokens": float(self._tokens),
            "running": float(running),
            "waiting": 0.0,
            **span_seconds(self._spans),
        }

    async def close(self) -> None:
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        for flight in self._in_flight.values():
            if not flight.result.done():
                flight.result.set_exception(RunClosedError("the engine was closed"))

    async def _run(self) -> None:
        while True:
            if not self._in_flight:
                self._wake.clear()
                with self._spans("wait/tasks"):
                    await self._wake.wait()
            with self._spans("compute"):
                self._step()
                await asyncio.sleep(0)

    def _step(self) -> None:
        for request_id, flight in list(self._in_flight.items()):
            if flight.result.done():
                continue
            flight.versions.append(self.version)
            self._tokens += sum(len(script) >= len(flight.versions) for script in flight.scripts)
            if len(flight.versions) >= flight.longest:
                flight.result.set_result([flight.turn(script) for script in flight.scripts])
                self._in_flight.pop(request_id, None)
            elif flight.request.pieces is not None:
                flight.give_pieces(flight.request.pieces)
