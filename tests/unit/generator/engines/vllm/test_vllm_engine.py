"""Flips of the vLLM engine whose caller, or the engine itself, ends meanwhile; replicas. vLLM is a stand-in."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import numpy as np
import psutil
import pytest
from missing import needs_vllm
from waiting import eventually

from asyncrl.config.schema import Config, GeneratorConfig, ModelConfig
from asyncrl.errors import RunClosedError, WeightSyncError
from asyncrl.generator.engines.engine import SampleLostError, SampleRequest
from asyncrl.generator.engines.vllm import vllm_engine
from asyncrl.generator.engines.vllm.vllm_engine import VllmEngine
from asyncrl.types import Sampling

pytestmark = needs_vllm


class StandIn:
    """An AsyncLLM that is paused once `may_pause` is set."""

    def __init__(self) -> None:
        self.may_pause = asyncio.Event()
        self.engine_core = AsyncMock()
        self.engine_core.pause_scheduler_async.side_effect = self._pause
        self.engine_core.call_utility_all_async.return_value = [[{"value": 0.0}]]
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(policy="fcfs"))
        self.output_handler, self.shutdown = Mock(), Mock()

    async def _pause(self, **_: object) -> None:
        await self.may_pause.wait()

    def is_pausing(self) -> bool:
        return bool(self.engine_core.pause_scheduler_async.called)

    def has_resumed(self) -> bool:
        return bool(self.engine_core.resume_scheduler_async.called)


async def started(
    monkeypatch: pytest.MonkeyPatch, progress_deadline_s: float = 60.0
) -> tuple[VllmEngine, StandIn]:
    llm = StandIn()
    monkeypatch.setattr(vllm_engine, "start_vllm", lambda *_: llm)
    generator = GeneratorConfig(engine="vllm", progress_deadline_s=progress_deadline_s)
    config = Config(model=ModelConfig(path="x"), generator=generator)
    engine = VllmEngine(config, "generator-0", ())
    await engine.start()
    return engine, llm


async def test_a_flip_whose_caller_is_cancelled_resumes_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, llm = await started(monkeypatch)
    try:
        flip = asyncio.create_task(engine.flip(3))
        await eventually(llm.is_pausing)
        flip.cancel()
        await asyncio.gather(flip, return_exceptions=True)
        assert flip.cancelled()
        llm.may_pause.set()
        await eventually(llm.has_resumed)
        assert engine.version == 3
    finally:
        await engine.close()


async def test_closing_ends_a_flip_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, llm = await started(monkeypatch)
    flip = asyncio.create_task(engine.flip(3))
    await eventually(llm.is_pausing)
    await engine.close()
    async with asyncio.timeout(30):
        with pytest.raises(RunClosedError, match="the engine was closed"):
            await flip
    assert not llm.has_resumed()


async def test_closing_kills_an_engine_process_that_vllm_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM stops killing at a process that ended between two of its looks."""
    core = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), name="EngineCore_DP0")
    core.start()
    monkeypatch.setattr(vllm_engine, "CLOSE_S", 0.05)
    llm = Mock(shutdown=Mock(side_effect=psutil.NoSuchProcess(1)))
    await asyncio.to_thread(vllm_engine._shut_down, llm)
    await asyncio.to_thread(core.join, 60)
    assert core.exitcode == -signal.SIGKILL


async def test_a_call_has_the_results_of_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own collective_rpc has those of the first: a version would flip before the second replica has it."""
    engine, llm = await started(monkeypatch)
    answers = llm.engine_core.call_utility_all_async
    try:
        answers.return_value = [[{"value": 1}, {"value": 2}], [{"value": None}, {"value": 4}]]
        assert await engine.call("asyncrl_staged") == [1, 2, None, 4]
        answers.return_value = [[{"value": 1}], [{"error": "broken", "detail": "no memory"}]]
        with pytest.raises(WeightSyncError, match="rank 1: no memory"):
            await engine.call("asyncrl_staged")
    finally:
        await engine.close()


async def test_a_request_that_vllm_has_lost_is_aborted_while_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM may have 5 tokens of each of two samples: 10. It makes 4 times as many of others."""
    monkeypatch.setattr(vllm_engine, "LOOK_S", 0.0)
    engine, llm = await started(monkeypatch, progress_deadline_s=0.001)
    aborted = asyncio.Event()

    async def silent(*_: object, **__: object) -> AsyncIterator[None]:
        try:
            await asyncio.Event().wait()
            yield
        finally:
            aborted.set()

    llm.generate = silent
    request = SampleRequest("lost", np.ones(3, np.int64), Sampling(max_tokens=5), ordinal=0, n=2)
    sample = asyncio.create_task(engine.sample(request))
    try:
        await asyncio.sleep(0.01)  # longer than the deadline, and no token
        assert not sample.done()
        async with asyncio.timeout(30):
            for _ in range(39):
                engine._counters.tokens += 1
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            assert not sample.done()
            engine._counters.tokens += 1
            await aborted.wait()
        with pytest.raises(SampleLostError, match="has not answered lost after"):
            await sample
    finally:
        await engine.close()


def test_figures_are_those_of_all_replicas() -> None:
    counters = vllm_engine._Counters()
    for replica, (running, waiting, usage) in enumerate([(3, 0, 0.25), (1, 2, 0.5)]):
        load = SimpleNamespace(num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=usage)
        made = SimpleNamespace(num_generation_tokens=10, num_preempted_reqs=1)
        counters.record(load, made, engine_idx=replica)
    assert (counters.running, counters.waiting, counters.kv_usage) == (4, 2, 0.5)
    assert (counters.tokens, counters.preemptions) == (20, 2)
