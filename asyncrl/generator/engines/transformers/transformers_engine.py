"""The embedded engine: a transformers model decoded in this process, on one thread of its own.

  event loop                                      engine thread
  ──────────                                      ─────────────
  sample ─▸ inbox ───────────────────────────────▸ read between two steps
  abort  ─▸ inbox ───────────────────────────────▸
  sample ◂─ turns ───────────────────────────────── each step that finishes a request
  flip   ─▸ _run ────────────────────────────────▸ copy staged over live
  work   ─▸ _run ────────────────────────────────▸ steps, until nothing is left or a flip waits
  nothing to do: _run waits for the inbox

    generator.kv   keep: samples in flight keep their keys and values
                   recompute: the new weights make them again, while everybody waits
                   drain: no sample begins any more, the flip comes when all have ended, or after
                   generator.drain_deadline_s; those that still run then go on as with recompute

The thread waits for the event loop only when it has nothing to do: however busy the loop is, the next step begins.
Only `_run` uses the thread, one call at a time, and only these calls touch the batch: it needs no lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar, cast

import numpy as np
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from asyncrl.config.rules import require
from asyncrl.config.schema import Config, ModelConfig
from asyncrl.config.sections.generator import KvAtFlip
from asyncrl.device import accelerator
from asyncrl.device.parked import ParkedTensors, storages_of
from asyncrl.device.products import wide_product
from asyncrl.errors import ConfigError, RunClosedError
from asyncrl.generator.engines.engine import Pieces, SampleRequest, check_complete, span_seconds
from asyncrl.generator.engines.receiver import LocalReceiver, WeightReader, WeightReceiver
from asyncrl.generator.engines.transformers.drafts import Drafter
from asyncrl.generator.engines.transformers.kv_cache import ATTENTION, UnsupportedAttentionError
from asyncrl.generator.engines.transformers.slots import SlotBatch
from asyncrl.generator.threads import OneThread
from asyncrl.models.adapters import adapt, live_tensors
from asyncrl.models.loading import delta_nets, load_causal_lm, load_model_config, text_body
from asyncrl.models.routing import ExpertRecorder
from asyncrl.telemetry import decisions
from asyncrl.telemetry.spans import Spans
from asyncrl.telemetry.step_times import DECODE, PREFILL
from asyncrl.types import NO_VERSION, Sampling, Turn, Version

Result = TypeVar("Result")

log = logging.getLogger(__name__)


CLOSE_S = 5.0
"""Longest wait at the end for the step under way."""


class _Flip(NamedTuple):
    """A flip that waits, since `since`."""

    staged: Mapping[str, Tensor]
    version: Version
    done: asyncio.Future[float]
    since: float


class TransformersEngine:
    """See `Engine`. Makes a causal LM's tokens with continuous batching (`SlotBatch`). Most methods are the protocol's.

    targets: the live parameters under their checkpoint names, of tied ones the first name only; of a model with
    adapters these alone
    record_experts: give turns the experts of their tokens, if the model has some

    batch: used by the engine's thread alone, once it has started
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        max_length: int,
        end_ids: Sequence[int],
        version: Version = NO_VERSION,
        fixed_shape: bool = False,
        kv: KvAtFlip = "keep",
        drain_s: float = math.inf,
        record_experts: bool = False,
        drafter: Drafter | None = None,
    ) -> None:
        self._kv, self._drain_s = kv, drain_s
        self.targets = live_tensors(model)
        check_attention(model, max_length)
        self.batch = SlotBatch(
            model,
            slots=slots,
            max_length=max_length,
            end_ids=end_ids,
            version=version,
            fixed_shape=fixed_shape,
            recorder=_recorder(model) if record_experts else None,
            drafter=drafter,
        )
        self._thread = OneThread("engine")
        self._parked = ParkedTensors()
        self._inbox: deque[Callable[[], None]] = deque()
        self._requested = self._added = 0  # samples; the loop changes the first, the thread the other
        self._flips: deque[_Flip] = deque()
        self._results: dict[str, asyncio.Future[list[Turn]]] = {}
        self._wake = asyncio.Event()
        self._spans = Spans("engine")
        self._loop: asyncio.AbstractEventLoop
        self._runner: asyncio.Task[None] | None = None
        self._ended = False

    @property
    def version(self) -> Version:
        return self.batch.version

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._runner = asyncio.create_task(self._run(), name="engine")

    async def sample(self, request: SampleRequest) -> list[Turn]:
        self._check_running()
        if request.request_id in self._results:
            raise ValueError(f"request {request.request_id} is in flight already")
        rule = "feeds prompts token by token, and a task has images, which are read at once"
        remedy = "set generator.fixed_shape=false"
        require(not (request.media and self.batch.fixed_shape), "generator.fixed_shape", True, rule, remedy)
        result: asyncio.Future[list[Turn]] = self._loop.create_future()
        self._results[request.request_id] = result
        self._requested += request.n
        self._put(lambda: self._add(request, result))
        try:
            return await result
        except asyncio.CancelledError:
            await self.abort(request.request_id)
            raise

    async def abort(self, request_id: str) -> None:
        """`sample` of that request returns soon: partial tokens and finish "abort" where it was not done."""
        self._put(lambda: self._remove(request_id))

    async def flip(self, staged: Mapping[str, Tensor], version: Version) -> float:
        self._check_running()
        check_complete(self.targets, staged, version)
        done: asyncio.Future[float] = self._loop.create_future()
        self._flips.append(_Flip(staged, version, done, time.monotonic()))
        self._wake.set()
        return await done

    async def sleep(self) -> None:
        """See `SleepingEngine`."""
        await self._thread(self._park)

    async def wake(self) -> None:
        await self._thread(self._parked.fetch)

    def receiver(self, reader: WeightReader) -> WeightReceiver:
        return LocalReceiver(self.targets, self.flip, reader)

    def stats(self) -> dict[str, float]:
        return {
            "tokens": float(self.batch.tokens_made),
            "running": float(self.batch.running),
            "waiting": float(self._requested - self._added + self.batch.waiting),
            "kv_usage": self.batch.running / self.batch.slots,
            "preemptions": 0.0,
            **self._drafts(),
            **self.batch.decode_times.stats(DECODE),
            **self.batch.prefill_times.stats(PREFILL),
            **span_seconds(self._spans),
        }

    def _drafts(self) -> dict[str, float]:
        drafter = self.batch.drafter
        return (
            {}
            if drafter is None
            else {"drafted": float(drafter.drafted), "accepted": float(drafter.accepted)}
        )

    async def close(self) -> None:
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        self._end(RunClosedError("the engine was closed"))
        if not self._thread.close(CLOSE_S):
            log.warning("a step of the model hangs: its thread ends with the process")

    async def _run(self) -> None:
        try:
            while True:
                if self._may_flip:
                    with self._spans("wait/weights"):
                        await self._flip_next()
                elif self._inbox or not self.batch.idle:
                    with self._spans("compute"):
                        await self._thread(self._steps)
                else:
                    self._wake.clear()
                    with self._spans("wait/tasks"):
                        await self._wake.wait()
        except Exception as error:
            self._end(error)
            raise
        finally:
            self._ended = True

    @property
    def _may_flip(self) -> bool:
        if not self._flips:
            return False
        drains = self._kv == "drain" and self.batch.running > 0
        return not drains or time.monotonic() - self._flips[0].since >= self._drain_s

    async def _flip_next(self) -> None:
        """The flip stays in the list until it is settled: if the engine ends meanwhile, `_end` settles it."""
        flip = self._flips[0]
        start, recompute = time.perf_counter(), self._kv != "keep"
        if self._kv == "drain" and self.batch.running:
            log.warning(
                "%d samples still run %.0f s after version %d came: they go on with it, as with generator.kv=recompute",
                self.batch.running,
                time.monotonic() - flip.since,
                flip.version,
            )
        arguments = flip.staged, self.targets, flip.version, recompute
        decisions.note("flip", recompute)
        try:
            await self._thread(self.batch.flip, *arguments)
        except (RuntimeError, KeyError) as error:
            _settle(flip.done, error)
        else:
            _settle(flip.done, time.perf_counter() - start)
        self._flips.popleft()

    # ---- in the thread

    def _park(self) -> None:
        self._parked.park(storages_of(self.batch.tensors()))
        accelerator.free_cached(self.batch.device)

    def _steps(self) -> None:
        while not self._may_flip and not self._ended:
            while self._inbox:
                self._inbox.popleft()()
            if self.batch.idle:
                return
            admit = not self._flips
            decisions.step(admit)
            finished = self.batch.step(admit)
            pieces = self.batch.take_pieces()
            if pieces or finished:  # one wake-up of the loop, which takes the interpreter from this thread
                self._loop.call_soon_threadsafe(self._hand_out, pieces, finished)

    def _add(self, request: SampleRequest, result: asyncio.Future[list[Turn]]) -> None:
        if not result.done():
            try:
                self.batch.add(request)
                decisions.joined(request.request_id)
            except ValueError as error:
                self._report(request.request_id, error)
        self._added += request.n

    def _remove(self, request_id: str) -> None:
        turns = self.batch.remove(request_id)
        if turns is not None:
            decisions.note("remove", request_id)
        self._report(request_id, turns or [])

    def _report(self, request_id: str, result: list[Turn] | Exception) -> None:
        self._loop.call_soon_threadsafe(self._end_request, request_id, result)

    # ---- on the event loop

    def _hand_out(
        self, pieces: Sequence[tuple[Pieces, int, Turn]], finished: Sequence[tuple[str, list[Turn]]]
    ) -> None:
        # At once: the result of an abort that comes too late must not be the first.
        for request_id, turns in finished:
            self._end_request(request_id, turns)
        for receiver, sample, turn in pieces:
            self._loop.call_soon(receiver.take, sample, turn)

    def _end_request(self, request_id: str, result: list[Turn] | Exception) -> None:
        waiting = self._results.pop(request_id, None)
        if waiting is not None:
            _settle(waiting, result)

    def _put(self, act: Callable[[], None]) -> None:
        self._inbox.append(act)
        self._wake.set()

    def _check_running(self) -> None:
        if self._runner is None:
            raise RuntimeError("the engine was not started")
        if self._runner.done():
            failure = None if self._runner.cancelled() else self._runner.exception()
            raise failure or RunClosedError("the engine was closed")

    def _end(self, error: Exception) -> None:
        for result in self._results.values():
            _settle(result, error)
        for flip in self._flips:
            _settle(flip.done, error)
        self._results.clear()
        self._flips.clear()


def _settle(future: asyncio.Future[Result], result: Result | Exception) -> None:
    """Unless the caller has given up."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def _recorder(model: PreTrainedModel) -> ExpertRecorder | None:
    return ExpertRecorder.of(cast(nn.ModuleList, text_body(model).layers), model.config)


def check_attention(model: PreTrainedModel, max_length: int) -> None:
    """Run two tokens through the model. Raises ConfigError unless all layers use `cached_attention`."""
    probe = SlotBatch(model, slots=1, max_length=max_length, end_ids=(), version=NO_VERSION)
    path = model.config._name_or_path or type(model).__name__
    try:
        probe.add(SampleRequest("probe", np.zeros(1, np.int64), Sampling(max_tokens=2), ordinal=0))
        probe.step()
        layers = model.config.get_text_config().num_hidden_layers
        known = len(probe.cache.layers) + len(probe.cache.recurrent)
        if known != layers:
            raise UnsupportedAttentionError(f"{layers - known} of {layers} layers without plain attention")
    except UnsupportedAttentionError as error:
        rule = f"the embedded engine cannot run {type(model).__name__}: it uses {error}"
        raise ConfigError("model.path", path, rule, "use a family of docs/models.md") from error


def end_ids_of(*sources: object) -> list[int]:
    """All end tokens of the generation config, the model's config and the tokenizer."""
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return sorted(found)


def load_end_ids(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The end tokens of a model that is not loaded here."""
    model = load_model_config(config)
    try:
        generation = GenerationConfig.from_pretrained(config.path, local_files_only=True)
    except OSError:
        generation = GenerationConfig.from_model_config(model)
    return end_ids_of(generation, model, tokenizer)


def widen_head(model: PreTrainedModel) -> None:
    """Let a model of half precision give float32 logits, for `model.head_dtype`. The head has no bias in models
    that the learner trains."""
    head = model.get_output_embeddings()
    head.forward = lambda hidden: wide_product(hidden, head.weight)


def load_transformers_engine(config: Config, tokenizer: PreTrainedTokenizerBase) -> TransformersEngine:
    """The engine by the config, on the GPU if this process sees one."""
    model = load_causal_lm(config.model, config.run.seed, ATTENTION)
    if config.model.lora.travels:
        adapt(model, config.model.lora, config.run.seed)
    if config.model.wide_head:
        widen_head(model)
    return TransformersEngine(
        model.to(accelerator.current_device()),  # type: ignore[arg-type]
        slots=config.generator.slots,
        max_length=config.generator.max_length,
        end_ids=end_ids_of(model.generation_config, model.config, tokenizer),
        fixed_shape=config.fixed_shape,
        kv=config.generator.kv,
        drain_s=config.generator.drain_deadline_s,
        record_experts=config.model.router_replay,
        drafter=_drafter(config, model),
    )


def _drafter(config: Config, model: PreTrainedModel) -> Drafter | None:
    speculation = config.generator.speculation
    if not speculation.tokens:
        return None
    rule = f"cannot be with {type(model).__name__}: its layers have a recurrent state, with no way back from a draft"
    key, remedy = "generator.speculation.tokens", "leave it out"
    require(not delta_nets(model), key, speculation.tokens, rule, remedy)
    return Drafter(speculation.tokens, speculation.ridge_tokens)
