"""An engine behind HTTP: a server that the user has started, and that this generator alone uses and updates.

    sample ─▸ n samples ─▸ a slot (`PrioritySemaphore`) ─▸ the gate ─▸ server.generate ─▸ chunk ─▸ turn
                                                   ▲              │ cut off by a flip: the rest is requested again
    flip   ─▸ pause ─▸ install ─▸ resume ──────────┘              └ of weights that are not ours: thrown away

    generator.kv   keep: the server stops between two tokens, and goes on with the new weights
                   recompute: the server returns its tokens so far, and gets a request that continues them
                   drain: no request is sent until all samples have ended, or generator.drain_deadline_s is over;
                   those that still run then go on as with recompute

`served_weights.py` has the gate, the flips, and the labels by which weights that are not ours are noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from asyncrl.config.schema import GeneratorConfig
from asyncrl.counter_rng import stream_key
from asyncrl.errors import RunClosedError
from asyncrl.generator.engines.engine import SampleLostError, SampleRequest, check_fits, span_seconds
from asyncrl.generator.engines.http.http_link import ServerRefusedError, UnreachableError
from asyncrl.generator.engines.http.served_weights import ServedWeights, version_in
from asyncrl.generator.engines.http.server import (
    Install,
    LoadMeter,
    Server,
    ServerChunk,
    ServerRequest,
    check_whole,
)
from asyncrl.generator.engines.lost_requests import LostRequests, lost_error
from asyncrl.generator.engines.receiver import WeightReader, WeightReceiver
from asyncrl.telemetry.spans import Spans
from asyncrl.types import NO_VERSION, Finish, Turn, Version

log = logging.getLogger(__name__)

ABORT_AGAIN_S = 0.05
"""An abort that comes before the server has the request is lost: repeated until the request has ended."""

TRIES = 3
"""Tries of one sample, at a server that fails at it and yet is there."""

SEED_BITS = 31

STOP_TOKENS = 64
"""Tokens of one request of a sample that texts may end: servers of token ids do not know them."""


@dataclass
class _Sample:
    request: SampleRequest
    index: int
    most_tokens: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)

    @property
    def missing(self) -> int:
        return self.most_tokens - len(self.token_ids)

    @property
    def next_tokens(self) -> int:
        """The most tokens of the next chunk: a piece ends where its request ends."""
        pieces, stop = self.request.pieces, self.request.stop
        bounds = [self.missing, *([pieces.every] if pieces else []), *([STOP_TOKENS] if stop else [])]
        return min(bounds)

    def give_piece(self) -> None:
        if self.request.pieces is not None:
            self.request.pieces.take(self.index, self.turn("abort"))

    def add(self, chunk: ServerChunk) -> None:
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        for label, start, end in chunk.labels:
            self.versions += [version_in(label)] * (end - start)

    def turn(self, finish: Finish) -> Turn:
        return self.request.turn(self.token_ids, self.logprobs, self.versions, finish)


class HttpEngine:
    """See `Engine`. version: what the server starts with; for tests · vocabulary: tokens that an answer may have"""

    def __init__(
        self,
        server: Server,
        config: GeneratorConfig,
        version: Version = NO_VERSION,
        vocabulary: int = 1 << 31,
    ) -> None:
        self._server, self._config, self._vocabulary = server, config, vocabulary
        self._changed = asyncio.Event()
        self._weights = ServedWeights(
            server, config.kv, version, changed=self._changed.set, lost=self._cancel_requests
        )
        self._meter = LoadMeter(server, self._look_for_lost)
        self._lost = LostRequests[asyncio.Task[ServerChunk]](config.progress_deadline_s)
        self._semaphore = PrioritySemaphore(config.slots)
        self._tasks: set[asyncio.Task[Any]] = set()  # all that must end with the engine
        self._requests: set[asyncio.Task[ServerChunk]] = set()
        self._names = count()
        self._spans = Spans("engine")
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
        alike = request.sampling.temperature == 0  # n greedy samples are one, n times
        most = min(request.sampling.max_tokens, self._config.max_length - len(request.prompt_ids))
        samples = [_Sample(request, index, most) for index in range(1 if alike else request.n)]
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
        return turns * request.n if alike else turns

    def receiver(self, reader: WeightReader) -> WeightReceiver:
        return self._server.receiver(reader, self.flip, self.check_weights)

    async def flip(self, version: Version, install: Install) -> float:
        """See `server.Flip`."""
        self._check_running()

        async def drained() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.drain_deadline_s):
                    while self._requests:
                        await asyncio.wait(self._requests)
                    return
            log.warning(
                "%d samples still run %.0f s after version %d came: they go on with it, as with generator.kv=recompute",
                len(self._requests),
                self._config.drain_deadline_s,
                version,
            )

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
            "uncounted": 0.0 if load.at_once else float(self._lost.longest),
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
        async with self._semaphore.slot(sample.request.ordinal):
            turn = await self._finish(sample)
        if sample.request.pieces is not None and sample.request.n > 1:
            sample.request.pieces.take(sample.index, turn)
        return turn

    async def _finish(self, sample: _Sample) -> Turn:
        while True:
            await self._weights.gate.wait()
            flips, wanted = self._weights.flips, sample.next_tokens
            chunk = await self._usable_chunk(sample)
            if chunk is None:
                continue
            sample.add(chunk)
            if sample.request.stop is not None and (turn := sample.turn("abort")).finish == "stop":
                return turn
            if chunk.finish == "length" and sample.missing and len(chunk.token_ids) == wanted:
                sample.give_piece()
                continue
            if chunk.finish != "abort":
                return sample.turn(chunk.finish)
            if not sample.missing:
                return sample.turn("length")
            if flips == self._weights.flips:
                raise SampleLostError(f"the server gave {sample.request.request_id} up by itself")

    async def _usable_chunk(self, sample: _Sample) -> ServerChunk | None:
        """None: the weights were not ours; the gate is closed until they are."""
        failure = ""
        for _ in range(TRIES):
            try:
                chunk = await self._generate(sample)
                check_whole(chunk, sample.next_tokens, self._vocabulary)
            except (UnreachableError, ValueError) as error:
                failure = str(error)
            else:
                if all(self._weights.is_flipped(label) for label, _, _ in chunk.labels):
                    return chunk
                failure = f"it was said by weights {[label for label, _, _ in chunk.labels]}"
            if not await self._weights.still_ours():
                return None
        who = sample.request.request_id
        raise SampleLostError(f"the server failed at a sample of {who} {TRIES} times: {failure}")

    async def _generate(self, sample: _Sample) -> ServerChunk:
        """Request the rest of a sample. If cancelled, aborts the request, whose tokens are still counted."""
        request, made = sample.request, len(sample.token_ids)
        index = request.first + sample.index
        key = int(stream_key(request.sampling.seed, request.ordinal, index, request.made + made))
        name = f"{request.request_id}/{sample.index}/{next(self._names)}."
        of_server = ServerRequest(
            name,
            [*request.prompt_ids.tolist(), *sample.token_ids],
            request.sampling,
            sample.next_tokens,
            key % (1 << SEED_BITS),
            self._weights.label,
        )
        answer = self._background(self._server.generate(of_server))
        self._requests.add(answer)
        self._lost.begin(answer, time.monotonic(), sample.next_tokens)
        self._changed.set()
        answer.add_done_callback(self._answered)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if self._lost.take_lost(answer):
                self._background(_abort_once(self._server, name))
                raise lost_error("the server", name, self._config.progress_deadline_s) from None
            if answer.cancelled() and not _is_cancelled():
                raise UnreachableError("its weights were lost meanwhile") from None
            if not self._closed:
                self._background(self._abort_request(name, answer))
            raise

    async def _abort_request(self, name: str, answer: asyncio.Task[ServerChunk]) -> None:
        with contextlib.suppress(UnreachableError, ServerRefusedError):
            while not answer.done():
                await self._server.abort(name)
                await asyncio.wait({answer}, timeout=ABORT_AGAIN_S)

    def _look_for_lost(self) -> None:
        lost = self._lost.look(time.monotonic(), self._meter.tokens, self._meter.load.waiting > 0)
        for answer in lost:
            answer.cancel()

    def _answered(self, answer: asyncio.Task[ServerChunk]) -> None:
        self._requests.discard(answer)
        self._lost.end(answer)
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


async def _abort_once(server: Server, name: str) -> None:
    with contextlib.suppress(UnreachableError, ServerRefusedError):
        await server.abort(name)


def _is_cancelled() -> bool:
    """Whether the running task itself is cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class PrioritySemaphore:
    """Slots, granted to the waiter of the lowest priority first."""

    def __init__(self, slots: int) -> None:
        self._free = self._all = slots
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = count()

    @property
    def taken(self) -> int:
        return self._all - self._free

    @property
    def waiting(self) -> int:
        return sum(not slot.done() for _, _, slot in self._waiting)

    @contextlib.asynccontextmanager
    async def slot(self, priority: int) -> AsyncIterator[None]:
        """Wait for a slot, and hold it within the block."""
        if self._free:
            self._free -= 1
        else:
            granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (priority, next(self._numbers), granted))
            try:
                await granted
            except asyncio.CancelledError:
                if not granted.cancelled():  # it was granted meanwhile
                    self._release()
                raise
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        while self._waiting:
            _, _, slot = heapq.heappop(self._waiting)
            if not slot.done():
                slot.set_result(None)
                return
        self._free += 1
