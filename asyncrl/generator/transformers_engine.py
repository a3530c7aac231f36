"""The embedded engine: a transformers model decoded in this process, on one thread of its own.

  event loop                                      engine thread
  ──────────                                      ─────────────
  sample ─▸ inbox ──┐ read between two visits
  abort  ─▸ inbox ──┤                    visit
                    └▸ _run ─────────────────────▸ steps, until a request finishes or the inbox has something
  sample ◂─ turns ────── ◂───────────────────────
  flip   ─▸ _run, before the next visit ─────────▸ copy staged over live
  nothing to do: _run waits for the inbox

Only `_run` visits the thread, one visit at a time: the batch needs no lock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, RunClosedError
from asyncrl.generator.engine import SampleRequest
from asyncrl.generator.kv_cache import ATTENTION, UnsupportedAttentionError
from asyncrl.generator.receiver import Reader, WeightReceiver, local_receiver
from asyncrl.generator.slots import SlotBatch
from asyncrl.models import checkpoint_tensors, load_causal_lm
from asyncrl.telemetry.spans import Spans
from asyncrl.types import NO_VERSION, Sampling, Turn, Version

STEPS_A_VISIT = 32
"""Most steps before the thread reports back although nothing happened: bounds the wait of an abort."""

Result = TypeVar("Result")


class TransformersEngine:
    """See `Engine`. Makes a causal LM's tokens with continuous batching (`SlotBatch`)."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int,
        max_length: int,
        end_ids: Sequence[int],
        version: Version = NO_VERSION,
        fixed_shape: bool = False,
    ) -> None:
        self._targets = checkpoint_tensors(model)
        check_attention(model, max_length)
        self._batch = SlotBatch(
            model,
            slots=slots,
            max_length=max_length,
            end_ids=end_ids,
            version=version,
            fixed_shape=fixed_shape,
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._inbox: list[Callable[[], None]] = []
        self._flips: list[tuple[Mapping[str, Tensor], Version, asyncio.Future[float]]] = []
        self._results: dict[str, asyncio.Future[list[Turn]]] = {}
        self._wake = asyncio.Event()
        self._spans = Spans()
        self._runner: asyncio.Task[None] | None = None

    @property
    def version(self) -> Version:
        return self._batch.version

    async def start(self) -> None:
        self._runner = asyncio.create_task(self._run(), name="engine")

    async def sample(self, request: SampleRequest) -> list[Turn]:
        self._alive()
        if request.request_id in self._results:
            raise ValueError(f"request {request.request_id} is in flight already")
        result: asyncio.Future[list[Turn]] = asyncio.get_running_loop().create_future()
        self._results[request.request_id] = result
        self._put(lambda: self._add(request, result))
        try:
            return await result
        except asyncio.CancelledError:
            self._put(lambda: self._remove(request.request_id))
            raise

    async def abort(self, request_id: str) -> None:
        self._put(lambda: self._remove(request_id))

    def weight_targets(self) -> dict[str, Tensor]:
        return dict(self._targets)

    async def flip(self, staged: Mapping[str, Tensor], version: Version) -> float:
        self._alive()
        missing = sorted(self._targets.keys() - staged.keys())
        if missing:
            raise ValueError(f"flip to version {version} lacks {len(missing)} parameters, e.g. {missing[0]}")
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._flips.append((staged, version, done))
        self._wake.set()
        return await done

    def receiver(self, reader: Reader) -> WeightReceiver:
        return local_receiver(self, reader)

    def stats(self) -> dict[str, float]:
        seconds = {f"seconds/{name}": value for name, value in self._spans.take().items()}
        return {
            "tokens": float(self._batch.tokens_made),
            "running": float(self._batch.running),
            "waiting": float(self._batch.waiting),
            "kv_usage": self._batch.running / self._batch.slots,
            "preemptions": 0.0,
            **seconds,
        }

    async def close(self) -> None:
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        self._end(RunClosedError("the engine was closed"))
        self._thread.shutdown()

    async def _run(self) -> None:
        try:
            while True:
                for act in self._inbox:
                    act()
                self._inbox.clear()
                if self._flips:
                    with self._spans("wait/weights"):
                        await self._flip_next()
                elif self._batch.idle:
                    self._wake.clear()
                    with self._spans("wait/tasks"):
                        await self._wake.wait()
                else:
                    with self._spans("compute"):
                        finished = await self._visit(self._steps)
                    for request_id, turns in finished:
                        self._finish(request_id, turns)
        except Exception as error:
            self._end(error)
            raise

    def _steps(self) -> list[tuple[str, list[Turn]]]:
        for _ in range(STEPS_A_VISIT):
            finished = self._batch.step()
            if finished or self._inbox or self._flips or self._batch.idle:
                return finished
        return []

    async def _flip_next(self) -> None:
        staged, version, done = self._flips.pop(0)
        start = time.perf_counter()
        try:
            await self._visit(lambda: self._batch.flip(staged, self._targets, version))
        except (RuntimeError, KeyError) as error:
            _settle(done, error=error)
        else:
            _settle(done, time.perf_counter() - start)

    def _add(self, request: SampleRequest, result: asyncio.Future[list[Turn]]) -> None:
        if result.done():
            return
        try:
            self._batch.add(request)
        except ValueError as error:
            self._results.pop(request.request_id)
            _settle(result, error=error)

    def _remove(self, request_id: str) -> None:
        turns = self._batch.remove(request_id)
        self._finish(request_id, turns or [])

    def _finish(self, request_id: str, turns: list[Turn]) -> None:
        result = self._results.pop(request_id, None)
        if result is not None:
            _settle(result, turns)

    def _put(self, act: Callable[[], None]) -> None:
        self._inbox.append(act)
        self._wake.set()

    async def _visit(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _alive(self) -> None:
        if self._runner is None:
            raise RuntimeError("the engine was not started")
        if self._runner.done():
            failure = None if self._runner.cancelled() else self._runner.exception()
            raise failure or RunClosedError("the engine was closed")

    def _end(self, error: Exception) -> None:
        for result in self._results.values():
            _settle(result, error=error)
        for _, _, done in self._flips:
            _settle(done, error=error)
        self._results.clear()
        self._flips.clear()


def _settle(
    future: asyncio.Future[Result], value: Result | None = None, error: Exception | None = None
) -> None:
    """Unless whoever waited has given up."""
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)  # type: ignore[arg-type]


def check_attention(model: PreTrainedModel, max_length: int) -> None:
    """Run two tokens through the model. Raises ConfigError unless all layers attend by `attend`."""
    probe = SlotBatch(model, slots=1, max_length=max_length, end_ids=(), version=NO_VERSION)
    path = model.config._name_or_path or type(model).__name__
    try:
        probe.add(SampleRequest("probe", np.zeros(1, np.int64), Sampling(max_tokens=2), ordinal=0))
        probe.step()
        layers = model.config.get_text_config().num_hidden_layers
        if probe.layers != layers:
            raise UnsupportedAttentionError(
                f"{layers - probe.layers} of {layers} layers without plain attention"
            )
    except UnsupportedAttentionError as error:
        raise ConfigError(
            "model.path",
            path,
            f"the embedded engine cannot run {type(model).__name__}: it uses {error}",
            "use a model with full causal attention in every layer, e.g. Qwen2, Qwen3, Llama or GPT-2",
        ) from error


def end_ids_of(*sources: object) -> list[int]:
    """Every token id that the generation config, the model's config or the tokenizer calls the end."""
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return sorted(found)


def load_transformers_engine(config: Config, tokenizer: PreTrainedTokenizerBase) -> TransformersEngine:
    """The engine that the config asks for, on the GPU if this process sees one."""
    model = load_causal_lm(config.model, config.run.seed, ATTENTION)
    return TransformersEngine(
        model.to("cuda" if torch.cuda.is_available() else "cpu"),  # type: ignore[arg-type]
        slots=config.generator.slots,
        max_length=config.generator.max_length,
        end_ids=end_ids_of(model.generation_config, model.config, tokenizer),
        fixed_shape=config.fixed_shape,
    )
