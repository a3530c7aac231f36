"""An engine behind HTTP: a server that the user has started, and that this generator alone uses and updates.

    sample ─▸ n samples ─▸ a slot (priority_semaphore.py) ─▸ the gate ─▸ server.generate ─▸ chunk ─▸ turn
                                                   ▲              │ cut off by a flip: the rest is requested again
    flip   ─▸ pause ─▸ install ─▸ resume ──────────┘              └ of weights that are not ours: thrown away

    generator.kv   keep: the server stops between two tokens, and goes on with the new weights
                   recompute: the server returns its tokens so far, and gets a request that continues them
                   drain: no request is sent until all samples have ended

`served_weights.py` has the gate, the flips, and the labels by which weights that are not ours are noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from asyncrl.config.schema import GeneratorConfig
from asyncrl.counter_rng import stream_key
from asyncrl.errors import RunClosedError
from asyncrl.generator.engines.engine import SampleRequest, check_fits, span_seconds
from asyncrl.generator.engines.http.http_link import ServerRefusedError, UnreachableError
from asyncrl.generator.engines.http.priority_semaphore import PrioritySemaphore
from asyncrl.generator.engines.http.served_weights import ServedWeights, version_of
from asyncrl.generator.engines.http.server import (
    Install,
    Server,
    ServerChunk,
    ServerLoad,
    ServerRequest,
    check_whole,
)
from asyncrl.generator.engines.receiver import WeightReader, WeightReceiver
from asyncrl.telemetry.spans import Spans
from asyncrl.types import NO_VERSION, Finish, Turn, Version

ABORT_AGAIN_S = 0.05
"""An abort that comes before the server knows the request is lost: repeated until the request has ended."""

LOAD_S = 0.1
"""Between two requests for the server's load, while it has something to do."""

TRIES = 3
"""Of one sample at a server that fails at it and yet is there."""

SEED_BITS = 31


@dataclass(eq=False)
class _Sample:
    request: SampleRequest
    index: int
    most_tokens: int
    slot: asyncio.Future[None] | None = None
    name: str | None = None  # by which the server knows it now
    aborted: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)

    @property
    def missing(self) -> int:
        return self.most_tokens - len(self.token_ids)

    def add(self, chunk: ServerChunk) -> None:
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        for label, start, end in chunk.labels:
            self.versions += [version_of(label)] * (end - start)

    def turn(self, finish: Finish) -> Turn:
        return self.request.turn(self.token_ids, self.logprobs, self.versions, finish)


class _LoadMeter:
    """The server's load, polled while it has requests, and the tokens that it has made for this engine."""

    def __init__(self, server: Server) -> None:
        self.load = ServerLoad()
        self.finished_tokens = 0
        """Of requests that have ended, for servers that report none."""
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
            if load.tokens < self.load.tokens:
                self._before += self.load.tokens
            self.load = load

    async def _request(self) -> ServerLoad:
        """The load as before where the server does not report it."""
        with contextlib.suppress(UnreachableError, ServerRefusedError):
            return await self._server.load()
        return self.load


class HttpEngine:
    """See `Engine`. version: what the server starts with; for tests."""

    def __init__(self, server: Server, config: GeneratorConfig, version: Version = NO_VERSION) -> None:
        self._server, self._config = server, config
        self._changed = asyncio.Event()
        self._weights = ServedWeights(
            server, config.kv, version, changed=self._changed.set, lost=self._cancel_requests
        )
        self._meter = _LoadMeter(server)
        self._semaphore = PrioritySemaphore(config.slots)
        self._samples: dict[str, list[_Sample]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()  # all that must end with the engine
        self._requests: set[asyncio.Task[ServerChunk]] = set()
        self._names = count()
        self._spans = Spans()
        self._started = self._closed = False

    @property
    def version(self) -> Version:
        return self._weights.version

    async def start(self) -> None:
        await self._server.start()
        await self._weights.start()
        await self._meter.start()
        self._started = True
        self._background(self._account())
        self._background(self._meter.run(self._requests))

    async def sample(self, request: SampleRequest) -> list[Turn]:
        self._check_running()
        check_fits(request, self._config.slots, self._config.max_length)
        if request.request_id in self._samples:
            raise ValueError(f"request {request.request_id} is in flight already")
        alike = request.sampling.temperature == 0  # n greedy samples are one, n times
        most = min(request.sampling.max_tokens, self._config.max_length - len(request.prompt_ids))
        samples = [_Sample(request, index, most) for index in range(1 if alike else request.n)]
        self._samples[request.request_id] = samples
        tasks = [self._background(self._make(sample)) for sample in samples]
        try:
            turns = await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            if self._closed:
                raise RunClosedError("the engine was closed") from None
            raise
        finally:
            for task in tasks:
                task.cancel()
            del self._samples[request.request_id]
        return turns * request.n if alike else turns

    async def abort(self, request_id: str) -> None:
        for sample in self._samples.get(request_id, ()):
            sample.aborted = True
            if sample.slot is not None and not sample.slot.done():
                sample.slot.cancel()
        while request_id in self._samples:
            for name in [s.name for s in self._samples[request_id] if s.name is not None]:
                await self._server.abort(name)
            await asyncio.sleep(ABORT_AGAIN_S)

    def receiver(self, reader: WeightReader) -> WeightReceiver:
        return self._server.receiver(reader, self.flip, self.check_weights)

    async def flip(self, version: Version, install: Install) -> float:
        """See `server.Flip`."""
        self._check_running()

        async def drained() -> None:
            while self._requests:
                await asyncio.wait(self._requests)

        return await self._weights.flip(version, install, drained)

    async def check_weights(self) -> None:
        """See `server.CheckWeights`."""
        await self._weights.check()

    def stats(self) -> dict[str, float]:
        at_server, load = self._semaphore.taken, self._meter.load
        queued = min(at_server, load.waiting)
        return {
            "tokens": self._meter.tokens,
            "running": float(at_server - queued),
            "waiting": float(queued + self._semaphore.waiting),
            "kv_usage": load.kv_usage,
            "preemptions": load.preemptions,
            **span_seconds(self._spans),
        }

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.close()

    # ---- one sample

    async def _make(self, sample: _Sample) -> Turn:
        sample.slot = self._semaphore.request(sample.request.ordinal)
        try:
            await sample.slot
        except asyncio.CancelledError:
            self._semaphore.cancel(sample.slot)
            if sample.aborted:
                return sample.turn("abort")
            raise
        try:
            return await self._finish(sample)
        finally:
            self._semaphore.release()

    async def _finish(self, sample: _Sample) -> Turn:
        while True:
            await self._weights.gate.wait()
            if sample.aborted:
                return sample.turn("abort")
            flips = self._weights.flips
            chunk = await self._usable_chunk(sample)
            if chunk is None:
                continue
            sample.add(chunk)
            if chunk.finish != "abort" or sample.aborted:
                return sample.turn(chunk.finish)
            if not sample.missing:
                return sample.turn("length")
            if flips == self._weights.flips:
                raise RuntimeError(f"the server gave {sample.name} up by itself")

    async def _usable_chunk(self, sample: _Sample) -> ServerChunk | None:
        """None: the weights were not ours; the gate is closed until they are."""
        failure = ""
        for _ in range(TRIES):
            try:
                chunk = await self._generate(sample)
            except UnreachableError as error:
                failure = str(error)
            else:
                check_whole(chunk)
                if all(self._weights.is_flipped(label) for label, _, _ in chunk.labels):
                    return chunk
                failure = f"it was said by weights {[label for label, _, _ in chunk.labels]}"
            if not await self._weights.still_ours():
                return None
        raise RuntimeError(f"the server failed at a sample {TRIES} times: {failure}")

    async def _generate(self, sample: _Sample) -> ServerChunk:
        """Request the rest of a sample. If cancelled, aborts the request, whose tokens are still counted."""
        request, made = sample.request, len(sample.token_ids)
        key = int(stream_key(request.sampling.seed, request.ordinal, sample.index, made))
        sample.name = f"{request.request_id}/{sample.index}/{next(self._names)}."
        of_server = ServerRequest(
            sample.name,
            [*request.prompt_ids.tolist(), *sample.token_ids],
            request.sampling,
            sample.missing,
            key % (1 << SEED_BITS),
            self._weights.label,
        )
        answer = self._background(self._server.generate(of_server))
        self._requests.add(answer)
        self._changed.set()
        answer.add_done_callback(self._answered)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if answer.cancelled() and not _is_cancelled():
                raise UnreachableError("its weights were lost meanwhile") from None
            if not self._closed:
                self._background(self._abort_request(sample.name, answer))
            raise
        finally:
            sample.name = None

    async def _abort_request(self, name: str, answer: asyncio.Task[ServerChunk]) -> None:
        with contextlib.suppress(UnreachableError, ServerRefusedError):
            while not answer.done():
                await self._server.abort(name)
                await asyncio.wait({answer}, timeout=ABORT_AGAIN_S)

    def _answered(self, answer: asyncio.Task[ServerChunk]) -> None:
        self._requests.discard(answer)
        self._changed.set()
        if not answer.cancelled() and answer.exception() is None:
            self._meter.finished_tokens += len(answer.result().token_ids)

    def _cancel_requests(self) -> None:
        """A host that is gone would never answer them."""
        for answer in self._requests:
            answer.cancel()

    # ---- background

    async def _account(self) -> None:
        while True:
            self._changed.clear()
            busy = "compute" if self._requests else "wait/tasks"
            with self._spans(busy if self._weights.usable else "wait/weights"):
                await self._changed.wait()

    def _background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _check_running(self) -> None:
        if self._closed:
            raise RunClosedError("the engine was closed")
        if not self._started:
            raise RuntimeError("the engine was not started")


def _is_cancelled() -> bool:
    """Whether the running task itself is cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
