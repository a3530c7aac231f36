"""vLLM behind the `Engine` protocol: its AsyncLLM in this process, the model in processes that it starts.

    sample ─▸ generate ─▸ engine core of a replica ─▸ its ranks       n samples of one replica share the prompt's KV
    flip   ─▸ pause ─▸ every rank of all replicas copies its staged version ─▸ forget prefixes, label ─▸ resume

Between pause and resume no step runs, so each token's version is the label of the step that made it.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import psutil

from asyncrl.config.schema import Config
from asyncrl.counter_rng import stream_key
from asyncrl.device import accelerator
from asyncrl.errors import ProcessDiedError, RunClosedError
from asyncrl.generator.engines.engine import SampleRequest, check_fits, span_seconds
from asyncrl.generator.engines.lost_requests import LostRequests, lost_error
from asyncrl.generator.engines.receiver import WeightReader, WeightReceiver
from asyncrl.generator.engines.vllm.vllm_broadcast import BroadcastReceiver
from asyncrl.generator.engines.vllm.vllm_plugin import FORGET_PREFIXES
from asyncrl.generator.engines.vllm.vllm_start import check_vllm, has_stop_texts, policy_adapter, start_vllm
from asyncrl.generator.engines.vllm.vllm_weights import VllmReceiver, values_of
from asyncrl.telemetry.spans import Spans
from asyncrl.types import COLUMNS, NO_VERSION, UNROUTED, Array, Finish, Turn, Version

log = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Longest wait for vLLM's processes to end by themselves."""

LOOK_S = 1.0
"""Between two looks for requests that vLLM has lost."""

SEED_BITS = 62
"""Bits of a request's seed; sample i has the seed + i, which must stay within an int64."""


class _Counters:
    """Receives vLLM's counters after each step of a replica, as the StatLoggerBase of all of them."""

    def __init__(self) -> None:
        self.tokens = self.preemptions = 0
        self._load: dict[int, tuple[int, int, float]] = {}  # by replica

    @property
    def running(self) -> int:
        return sum(running for running, _, _ in self._load.values())

    @property
    def waiting(self) -> int:
        return sum(waiting for _, waiting, _ in self._load.values())

    @property
    def kv_usage(self) -> float:
        """The fullest replica's."""
        return max((usage for _, _, usage in self._load.values()), default=0.0)

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> _Counters:
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            now = scheduler_stats
            self._load[engine_idx] = (now.num_running_reqs, now.num_waiting_reqs, now.kv_cache_usage)
        if iteration_stats is not None:
            self.tokens += iteration_stats.num_generation_tokens
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None: ...


class VllmEngine:
    """See `Engine`. It has more attributes than other classes: state of requests, of flips, and of the tasks that
    watch both; most methods are the protocol's.

    name: of the generator, for errors · load_weights: begin with those of model.path, as version 0
    """

    def __init__(self, config: Config, name: str, end_ids: Sequence[int], load_weights: bool = False) -> None:
        check_vllm()
        self._config, self._name, self._load_weights = config, name, load_weights
        self._end_ids = list(end_ids)
        self._reads_texts = has_stop_texts(config)
        self._version: Version = 0 if load_weights else NO_VERSION
        self._flipped = 0
        self._adapter: Any = None  # none before the first version
        self._llm: Any = None
        self._by_priority = False  # generator.vllm.extra may say otherwise
        self._counters = _Counters()
        self._in_flight: dict[str, tuple[int, asyncio.Task[list[Turn]]]] = {}
        self._flipping: asyncio.Task[float] | None = None
        self._changed = asyncio.Event()
        self._spans = Spans("engine")
        self._accounting: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._lost = LostRequests[asyncio.Task[Any]](config.generator.progress_deadline_s)
        self._closed = False

    @property
    def version(self) -> Version:
        return self._version

    async def start(self) -> None:
        """Blocks the event loop until vLLM is up. Raises ConfigError."""
        self._llm = start_vllm(self._config, [self._counters], self._load_weights)
        self._by_priority = self._llm.vllm_config.scheduler_config.policy == "priority"
        await self._llm.engine_core.set_weight_version_async(str(self._version))
        self._accounting = asyncio.create_task(self._account(), name="engine")
        self._looking = asyncio.create_task(self._look_for_lost(), name="lost requests")

    async def sample(self, request: SampleRequest) -> list[Turn]:
        self._check_running()
        check_fits(request, self._config.generator.slots, self._config.generator.max_length)
        if request.request_id in self._in_flight:
            raise ValueError(f"request {request.request_id} is in flight already")
        task = asyncio.create_task(self._generate(request))
        self._in_flight[request.request_id] = (request.n, task)
        self._changed.set()
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed:
                raise RunClosedError("the engine was closed") from None
            raise
        finally:
            del self._in_flight[request.request_id]
            self._changed.set()

    def receiver(self, reader: WeightReader) -> WeightReceiver:
        if reader.sync.backend == "vllm":
            ours = self._config.generator.vllm
            ranks = ours.tensor_parallel * ours.data_parallel
            return BroadcastReceiver(reader, ranks, self.call, self.flip)
        return VllmReceiver(reader, self._config.model, self.call, self.flip)

    async def call(self, method: str, *args: Any) -> list[Any]:
        """The result of `WeightsExtension.<method>` on each rank of each replica. Raises the error of one of them."""
        self._check_running()
        # vLLM's own collective_rpc returns the results of the first replica alone.
        called = self._llm.engine_core.call_utility_all_async("collective_rpc", method, None, args, None)
        return values_of([report for of in await self._called(called) for report in of], self._name)

    async def flip(self, version: Version, install: Callable[[], Awaitable[Any]] | None = None) -> float:
        """install: makes the version live; by default the one that all ranks have staged. Where it fails, the engine
        stays paused, and is of no version. If the caller is cancelled, the flip goes on: vLLM would stay paused."""
        self._check_running()
        self._flipping = asyncio.create_task(
            self._flip(version, install or partial(self.call, "asyncrl_flip", version)), name="flip"
        )
        self._flipping.add_done_callback(lambda _: self._changed.set())
        self._changed.set()
        try:
            return await asyncio.shield(self._flipping)
        except asyncio.CancelledError:
            if self._closed:
                raise RunClosedError("the engine was closed") from None
            raise

    async def sleep(self) -> None:
        """See `SleepingEngine`. vLLM's sleep of level 1; its build for CPUs has none, and keeps its memory."""
        if accelerator.count():
            await self._called(self._llm.sleep(level=1))

    async def wake(self) -> None:
        if accelerator.count():
            await self._called(self._llm.wake_up())

    def stats(self) -> dict[str, float]:
        samples = sum(n for n, _ in self._in_flight.values())
        running = min(samples, self._counters.running)
        return {
            "tokens": float(self._counters.tokens),
            "running": float(running),
            "waiting": float(min(samples - running, self._counters.waiting)),
            "kv_usage": self._counters.kv_usage,
            "preemptions": float(self._counters.preemptions),
            **span_seconds(self._spans),
        }

    async def close(self) -> None:
        self._closed = True
        tasks: list[asyncio.Task[Any]] = [task for _, task in self._in_flight.values()]
        tasks += [task for task in (self._accounting, self._looking, self._flipping) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._llm is not None:
            self._llm.output_handler.cancel()  # it would report the end of the core as a failure
            await asyncio.to_thread(_shut_down, self._llm)
            self._llm = None

    # ---- sampling

    async def _generate(self, request: SampleRequest) -> list[Turn]:
        """vLLM reports the versions of tokens at the end of a request alone, so a piece ends where its request ends."""
        pieces, most = request.pieces, _most_tokens(request, self._config)
        if pieces is None or pieces.every >= most:
            return await self._whole(request, most)
        begun = await self._whole(request, pieces.every)
        return await asyncio.gather(*(self._rest(request, *of) for of in enumerate(begun)))

    async def _rest(self, request: SampleRequest, index: int, turn: Turn) -> Turn:
        """The whole sample, in pieces, of which `turn` is the first."""
        assert request.pieces is not None
        most = _most_tokens(request, self._config)
        while turn.finish == "length" and (left := most - len(turn.output_ids)) > 0:
            request.pieces.take(index, replace(turn, finish="abort"))
            ids = np.concatenate([request.prompt_ids, turn.output_ids])
            made = request.made + len(turn.output_ids)
            name, first = f"{request.request_id}/{index}/{made}", request.first + index
            goes_on = replace(request, request_id=name, prompt_ids=ids, n=1, first=first, made=made)
            (more,) = await self._whole(goes_on, min(left, request.pieces.every))
            turn = request.turn(
                np.concatenate([turn.output_ids, more.output_ids]),
                np.concatenate([turn.logprobs, more.logprobs]),
                np.concatenate([turn.versions, more.versions]),
                more.finish,
                _continued(turn.experts, more.experts),
            )
        request.pieces.take(index, turn)
        return turn

    async def _whole(self, request: SampleRequest, most_tokens: int) -> list[Turn]:
        from vllm.inputs import tokens_input

        prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=f"{self._version}.{self._flipped}")
        outputs = self._llm.generate(
            prompt,
            _sampling_params(request, most_tokens, self._end_ids, self._reads_texts),
            request.request_id,
            lora_request=self._adapter,
            priority=request.ordinal if self._by_priority else 0,
        )
        last = await self._or_died(self._answer(request, outputs, most_tokens))
        turns = [_turn(request, of) for of in sorted(last.outputs, key=lambda of: of.index)]
        return turns * request.n if len(turns) < request.n else turns

    async def _answer(self, request: SampleRequest, outputs: Any, most_tokens: int) -> Any:
        """Raises SampleLostError if vLLM has lost the request, and aborts it if it ends here otherwise."""
        answer = asyncio.create_task(_last(outputs))
        self._lost.begin(answer, time.monotonic(), request.n * most_tokens)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._lost.take_lost(answer):
                deadline_s = self._config.generator.progress_deadline_s
                raise lost_error("vLLM", request.request_id, deadline_s) from None
            raise
        finally:
            self._lost.end(answer)

    async def _look_for_lost(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            counters = self._counters
            for answer in self._lost.look(time.monotonic(), counters.tokens, counters.waiting > 0):
                answer.cancel()

    # ---- time and versions

    async def _account(self) -> None:
        while True:
            self._changed.clear()
            flips = self._flipping is not None and not self._flipping.done()
            busy = "compute" if self._in_flight else "wait/tasks"
            with self._spans("wait/weights" if flips else busy):
                await self._changed.wait()

    async def _flip(self, version: Version, install: Callable[[], Awaitable[Any]]) -> float:
        core, kv = self._llm.engine_core, self._config.generator.kv
        begun = time.perf_counter()
        if kv == "drain" and await self._drained(version):
            begun = time.perf_counter()  # samples went on until now
        else:
            # Waiting samples find the prompts of their siblings in the cache, unless that is cleared.
            await self._or_died(core.pause_scheduler_async(mode="keep", clear_cache=kv != "keep"))
        try:
            await install()
        except Exception:
            self._version = NO_VERSION
            raise
        self._version = version
        self._flipped += 1
        if self._config.model.lora.travels:
            self._adapter = policy_adapter()
        # Requests made before the flip that begin after it look for prefixes under the old salt.
        await self._or_died(core.call_utility_async(FORGET_PREFIXES))
        await self._or_died(core.set_weight_version_async(str(version)))
        await self._or_died(core.resume_scheduler_async())
        return time.perf_counter() - begun

    async def _drained(self, version: Version) -> bool:
        """Pause once no sample runs. Returns False if some still run after generator.drain_deadline_s."""
        deadline_s = self._config.generator.drain_deadline_s
        pause = self._llm.engine_core.pause_scheduler_async(mode="wait", clear_cache=True)
        drained = asyncio.ensure_future(self._or_died(pause))
        try:
            await asyncio.wait({drained}, timeout=deadline_s)
            if drained.done():
                await drained
                return True
            log.warning(
                "%s: %d samples still run %.0f s after version %d came: they go on with it, as with "
                "generator.kv=recompute",
                self._name,
                self._counters.running,
                deadline_s,
                version,
            )
            return False
        finally:
            drained.cancel()

    def _check_running(self) -> None:
        if self._closed:
            raise RunClosedError("the engine was closed")
        if self._accounting is None:
            raise RuntimeError("the engine was not started")

    async def _called(self, called: Awaitable[Any]) -> Any:
        """As `_or_died`, for calls that vLLM leaves without an answer when a process dies meanwhile."""
        answer, handler = asyncio.ensure_future(self._or_died(called)), self._llm.output_handler
        try:
            await asyncio.wait({answer, handler}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ProcessDiedError(f"{self._name}: vLLM's engine process has ended")
            return answer.result()
        finally:
            answer.cancel()

    async def _or_died(self, answer: Any) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            return await answer
        except (EngineDeadError, EngineGenerateError) as error:
            raise ProcessDiedError(f"{self._name}: vLLM's engine process failed: {error}") from error


def _shut_down(llm: Any) -> None:
    """Also wait for the end of processes that vLLM kills. It stops, with an error, at one that has just ended: kill the
    others here."""
    cores = [child for child in multiprocessing.active_children() if child.name.startswith("EngineCore")]
    with suppress(psutil.NoSuchProcess):
        llm.shutdown(CLOSE_S)
    for core in cores:
        core.join(CLOSE_S)
        if core.is_alive():
            core.kill()  # its ranks notice
            core.join(CLOSE_S)


async def _last(outputs: Any) -> Any:
    last = None
    async for output in outputs:
        last = output
    return last


def _sampling_params(
    request: SampleRequest, most_tokens: int, end_ids: list[int], reads_texts: bool = False
) -> Any:
    """vLLM gives sample i the seed + i, and each sample its own random generator. One that goes on from tokens gets
    numbers that none of the others has. reads_texts: vLLM has a tokenizer, and can end samples at texts"""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = request.sampling
    greedy = sampling.temperature == 0
    apart = (request.first, request.made) if request.made else ()
    key = int(stream_key(sampling.seed, request.ordinal, *apart)) % (1 << SEED_BITS)
    if not apart:
        key = (key + request.first) % (1 << SEED_BITS)
    return SamplingParams(
        n=1 if greedy else request.n,  # n greedy samples are one, n times
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=most_tokens,
        seed=None if greedy else key,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        stop_token_ids=end_ids,
        ignore_eos=True,  # the end tokens are named above
        stop=list(request.stop.texts) if request.stop and reads_texts else None,
        detokenize=request.stop is not None and reads_texts,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _turn(request: SampleRequest, made: Any) -> Turn:
    versions = np.empty(len(made.token_ids), np.int32)
    for span in made.weight_versions:
        versions[span.start : span.end] = int(span.version)
    logprobs = [made.logprobs.logprobs[at] for at in made.logprobs.start_indices] if len(versions) else []
    finish: Finish = made.finish_reason if made.finish_reason in ("stop", "length") else "abort"
    return request.turn(made.token_ids, logprobs, versions, finish, _experts(request, made))


def _experts(request: SampleRequest, made: Any) -> Array | None:
    """[P + T, W]: as vLLM recorded them, [P + T - 1, layers, k]; the last token has not run."""
    if made.routed_experts is None:
        return None
    rows = made.routed_experts.astype(COLUMNS["experts"])
    tokens = len(request.prompt_ids) + len(made.token_ids)
    experts = np.full((tokens, rows[0].size), UNROUTED, COLUMNS["experts"])
    experts[: len(rows)] = rows.reshape(len(rows), -1)
    experts[tokens - 1 :] = UNROUTED
    return experts


def _continued(before: Array | None, after: Array | None) -> Array | None:
    """Experts of a sample of which `before` is known; its last token ran in the request that continued it."""
    if before is None or after is None:
        return None
    return np.concatenate([before[:-1], after[len(before) - 1 :]])


def _most_tokens(request: SampleRequest, config: Config) -> int:
    return min(request.sampling.max_tokens, config.generator.max_length - len(request.prompt_ids))
