"""An engine behind HTTP: a server that somebody else has started, which this generator alone asks and updates.

    sample ─▸ n samples ─▸ a place (priority_semaphore.py) ─▸ the gate ─▸ server.generate ─▸ piece ─▸ turn
                                                   ▲              │ cut off by a flip: what is missing is asked again
    flip   ─▸ pause ─▸ install ─▸ resume ──────────┘              └ of weights that are not ours: thrown away

    generator.kv   keep: the server stops between two tokens, and goes on with the new weights
                   recompute: the server gives back what it has, and is asked to go on from there
                   drain: nothing new is sent until all samples have ended

Every set of weights gets a label that no other has, and the server says with each token under which label it was made.
So a server that restarts, or is updated by somebody else, is found out before its tokens are believed: the engine then
has NO_VERSION, and sends nothing until the learner's weights are there again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from asyncrl.config.schema import GeneratorConfig
from asyncrl.counter_rng import stream_key
from asyncrl.errors import RunClosedError
from asyncrl.generator.engines.engine import SampleRequest, check_fits
from asyncrl.generator.engines.http.http_link import ServerRefusedError, UnreachableError
from asyncrl.generator.engines.http.priority_semaphore import PrioritySemaphore
from asyncrl.generator.engines.http.server import (
    Install,
    Server,
    ServerChunk,
    ServerLoad,
    ServerRequest,
    check_whole,
)
from asyncrl.generator.engines.receiver import LostWeightsError, WeightReader, WeightReceiver
from asyncrl.telemetry.spans import Spans
from asyncrl.types import NO_VERSION, Finish, Turn, Version

ABORT_AGAIN_S = 0.05
"""An abort that comes before the server knows the request is lost: said again until the request has ended."""

LOAD_S = 0.1
"""Between two looks at how busy the server is, while it has something to do."""

TRIES = 3
"""Of one sample at a server that fails at it and yet is there."""

SEED_BITS = 31


@dataclass(eq=False)
class _Sample:
    request: SampleRequest
    index: int
    most_tokens: int
    place: asyncio.Future[None] | None = None
    name: str | None = None  # under which the server knows it now
    aborted: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)

    @property
    def missing(self) -> int:
        return self.most_tokens - len(self.token_ids)

    def turn(self, finish: Finish) -> Turn:
        return Turn(
            prompt_ids=np.asarray(self.request.prompt_ids, np.int64),
            output_ids=np.array(self.token_ids, np.int64),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            finish=finish,
        )


class HttpEngine:
    """See `Engine`. version: what the server starts with; for tests."""

    def __init__(self, server: Server, config: GeneratorConfig, version: Version = NO_VERSION) -> None:
        self._server, self._kv = server, config.kv
        self._slots, self._max_length = config.slots, config.max_length
        self._nonce, self._labels = secrets.token_hex(4), count()
        self._version = version
        self._label = self._new_label(version)  # of the weights that the server has
        self._flips = 0
        self._flipping = False
        self._lost: str | None = None  # why, until the follower knows
        self._gate = asyncio.Event()
        self._places = PrioritySemaphore(config.slots)
        self._samples: dict[str, list[_Sample]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()  # all that must end with the engine
        self._asked: set[asyncio.Task[ServerChunk]] = set()
        self._names = count()
        self._finished_tokens = 0
        self._load = ServerLoad()
        self._before = 0.0  # tokens that the server had made, or made before it restarted
        self._changed = asyncio.Event()
        self._spans = Spans()
        self._started = self._closed = False

    @property
    def version(self) -> Version:
        return self._version

    async def start(self) -> None:
        await self._server.start()
        await self._server.set_label(self._label)
        if self._version != NO_VERSION:
            self._gate.set()
        self._load = await self._look()
        self._before = -self._load.tokens
        self._started = True
        self._background(self._account())
        self._background(self._watch())

    async def sample(self, request: SampleRequest) -> list[Turn]:
        self._alive()
        check_fits(request, self._slots, self._max_length)
        if request.request_id in self._samples:
            raise ValueError(f"request {request.request_id} is in flight already")
        alike = request.sampling.temperature == 0  # n greedy samples are one, n times
        most = min(request.sampling.max_tokens, self._max_length - len(request.prompt_ids))
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
            if sample.place is not None and not sample.place.done():
                sample.place.cancel()
        while request_id in self._samples:
            for name in [s.name for s in self._samples[request_id] if s.name is not None]:
                await self._server.abort(name)
            await asyncio.sleep(ABORT_AGAIN_S)

    def receiver(self, reader: WeightReader) -> WeightReceiver:
        return self._server.receiver(self, reader)

    async def flip(self, version: Version, install: Install) -> float:
        """See `ServedEngine`."""
        self._alive()
        self._flipping = True
        self._flips += 1
        self._changed.set()
        try:
            if self._kv != "keep":
                self._gate.clear()
            while self._kv == "drain" and self._asked:
                await asyncio.wait(self._asked)
            begun, label = time.perf_counter(), self._new_label(version)
            await self._server.pause(keep=self._kv == "keep")
            await install(label)
            self._version, self._label, self._lost = version, label, None
            await self._server.resume()
            self._gate.set()
            return time.perf_counter() - begun
        except (UnreachableError, ServerRefusedError) as error:
            self._lose(f"the flip to version {version} failed: {error}")
            raise self._loss() from error
        finally:
            self._flipping = False
            self._changed.set()

    async def present(self) -> None:
        """See `ServedEngine`."""
        await self._still_ours()
        if self._lost is not None:
            label = self._new_label(NO_VERSION)
            await self._server.set_label(label)  # so that the next restart is seen too
            self._label = label
            raise self._loss()

    def stats(self) -> dict[str, float]:
        at_server = self._places.taken
        queued = min(at_server, self._load.waiting)
        return {
            "tokens": max(float(self._finished_tokens), self._before + self._load.tokens),
            "running": float(at_server - queued),
            "waiting": float(queued + self._places.waiting),
            "kv_usage": self._load.kv_usage,
            "preemptions": self._load.preemptions,
            **{f"seconds/{name}": value for name, value in self._spans.take().items()},
        }

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.close()

    # ---- one sample

    async def _make(self, sample: _Sample) -> Turn:
        sample.place = self._places.ask(sample.request.ordinal)
        try:
            await sample.place
        except asyncio.CancelledError:
            self._places.leave(sample.place)
            if sample.aborted:
                return sample.turn("abort")
            raise
        try:
            return await self._finish(sample)
        finally:
            self._places.give_back()

    async def _finish(self, sample: _Sample) -> Turn:
        while True:
            await self._gate.wait()
            if sample.aborted:
                return sample.turn("abort")
            flips = self._flips
            piece = await self._piece(sample)
            if piece is None:
                continue
            sample.token_ids += piece.token_ids
            sample.logprobs += piece.logprobs
            for label, start, end in piece.labels:
                sample.versions += [_version_of(label)] * (end - start)
            if piece.finish != "abort" or sample.aborted:
                return sample.turn(piece.finish)
            if not sample.missing:
                return sample.turn("length")
            if flips == self._flips:
                raise RuntimeError(f"the server gave {sample.name} up by itself")

    async def _piece(self, sample: _Sample) -> ServerChunk | None:
        """None: the weights were not ours; the gate is closed until they are."""
        failure = ""
        for _ in range(TRIES):
            try:
                piece = await self._ask(sample)
            except UnreachableError as error:
                failure = str(error)
            else:
                check_whole(piece)
                if all(self._is_flipped(label) for label, _, _ in piece.labels):
                    return piece
                failure = f"it was said by weights {[label for label, _, _ in piece.labels]}"
            if not await self._still_ours():
                return None
        raise RuntimeError(f"the server failed at a sample {TRIES} times: {failure}")

    async def _ask(self, sample: _Sample) -> ServerChunk:
        """Cancelled, it tells the server, whose answer is still counted."""
        request, made = sample.request, len(sample.token_ids)
        key = int(stream_key(request.sampling.seed, request.ordinal, sample.index, made))
        sample.name = f"{request.request_id}/{sample.index}/{next(self._names)}."
        answer = self._background(
            self._server.generate(
                ServerRequest(
                    sample.name,
                    [*request.prompt_ids.tolist(), *sample.token_ids],
                    request.sampling,
                    sample.missing,
                    key % (1 << SEED_BITS),
                    self._label,
                )
            )
        )
        self._asked.add(answer)
        self._changed.set()
        answer.add_done_callback(self._answered)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if answer.cancelled() and not _cancelled():
                raise UnreachableError("its weights were lost meanwhile") from None
            if not self._closed:
                self._background(self._tell_off(sample.name, answer))
            raise
        finally:
            sample.name = None

    async def _tell_off(self, name: str, answer: asyncio.Task[ServerChunk]) -> None:
        with contextlib.suppress(UnreachableError, ServerRefusedError):
            while not answer.done():
                await self._server.abort(name)
                await asyncio.wait({answer}, timeout=ABORT_AGAIN_S)

    def _answered(self, answer: asyncio.Task[ServerChunk]) -> None:
        self._asked.discard(answer)
        self._changed.set()
        if not answer.cancelled() and answer.exception() is None:
            self._finished_tokens += len(answer.result().token_ids)

    # ---- which weights

    def _new_label(self, version: Version) -> str:
        """Unlike any other of this or another generator: lineages number their versions alike."""
        return f"{self._nonce}.{next(self._labels)}.{version}"

    def _is_flipped(self, label: str) -> bool:
        """Whether it is of weights that this engine was flipped to."""
        return label.startswith(self._nonce) and _version_of(label) != NO_VERSION

    async def _still_ours(self) -> bool:
        expected = self._label
        try:
            label = await self._server.label()
        except ServerRefusedError as error:
            label = str(error)
        if not self._flipping and label != expected == self._label:
            self._lose(f"it has weights {label!r}, not {expected!r}: it restarted, or somebody updated it")
        return self._version != NO_VERSION

    def _lose(self, reason: str) -> None:
        self._lost, self._version = reason, NO_VERSION
        self._gate.clear()
        self._changed.set()
        for answer in self._asked:  # of a host that is gone, none would ever come
            answer.cancel()

    def _loss(self) -> LostWeightsError:
        reason, self._lost = self._lost, None
        return LostWeightsError(reason)

    # ---- time

    async def _account(self) -> None:
        while True:
            self._changed.clear()
            busy = "compute" if self._asked else "wait/tasks"
            with self._spans("wait/weights" if self._flipping or not self._gate.is_set() else busy):
                await self._changed.wait()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOAD_S)
            if self._asked:
                load = await self._look()
                if load.tokens < self._load.tokens:
                    self._before += self._load.tokens
                self._load = load

    async def _look(self) -> ServerLoad:
        """How busy the server is; as before where it does not say."""
        with contextlib.suppress(UnreachableError, ServerRefusedError):
            return await self._server.load()
        return self._load

    def _background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _alive(self) -> None:
        if self._closed:
            raise RunClosedError("the engine was closed")
        if not self._started:
            raise RuntimeError("the engine was not started")


def _cancelled() -> bool:
    """Whether somebody wants the running task to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _version_of(label: str) -> Version:
    """
    >>> _version_of("0f9a.3.12")
    12
    """
    return int(label.rpartition(".")[2])
