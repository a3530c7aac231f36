"""Real vLLM on the CPU computes with the learner's weights after each update: dense and experts, one rank and two."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from engine_cases import (
    CLOSE,
    EXPERTS,
    SIZES,
    from_config,
    in_flight_at_an_update,
    learner,
    log_probs,
    nudged,
    request,
    staged,
    until_tokens,
    update,
    vllm_config,
    waiting_at_a_drain,
    weights_of,
    with_weights,
)
from missing import needs_vllm
from transformers import PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from asyncrl.config.sections.generator import KvAtFlip, VllmConfig
from asyncrl.generator.engines.vllm.vllm_engine import VllmEngine
from asyncrl.generator.engines.vllm.vllm_plugin import BACKEND

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.timeout(400),  # an engine starts in seconds, or in minutes where many share the cores
    needs_vllm,
]


@dataclass(frozen=True)
class Case:
    config: PretrainedConfig
    ranks: int = 1
    kv: KvAtFlip = "keep"
    kv_cache_mb: int | None = None


CASES = {
    "qwen3, a small cache, recompute": Case(Qwen3Config(**SIZES), kv="recompute", kv_cache_mb=1),
    "qwen3 moe, drain": Case(Qwen3MoeConfig(**SIZES, **EXPERTS), kv="drain"),
    "qwen2 tied, two ranks": Case(
        Qwen2Config(**{**SIZES, "hidden_size": 128}, tie_word_embeddings=True), ranks=2
    ),
}


@dataclass
class House:
    case: Case
    engine: VllmEngine
    model: PreTrainedModel


@pytest.fixture(params=CASES.values(), ids=CASES.keys(), scope="module")
async def house(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[House]:
    case, folder = request.param, tmp_path_factory.mktemp("model")
    model = from_config(case.config, folder)
    extra = {"weight_transfer_config": {"backend": BACKEND}}
    ours = VllmConfig(tensor_parallel=case.ranks, kv_cache_mb=case.kv_cache_mb, extra=extra)
    config = vllm_config(folder, kv=case.kv, vllm=ours)
    engine = VllmEngine(config, "generator-0", (), load_weights=True)
    await engine.start()
    yield House(case, engine, model)
    await engine.close()


async def test_log_probs_are_those_of_transformers_before_and_after_each_update(house: House) -> None:
    model, engine = house.model, house.engine
    weights = weights_of(model)
    for seed in (None, 1, 2):
        if seed is not None:
            weights = nudged(weights, seed)
            await update(engine, weights)
            with_weights(model, weights)
        for turn in await engine.sample(request("a", n=3, max_tokens=40, prompt=40)):
            np.testing.assert_allclose(turn.logprobs, log_probs(model, turn), **CLOSE)
            assert (turn.versions == engine.version).all()


async def test_samples_in_flight_at_an_update(house: House) -> None:
    weights = nudged(weights_of(house.model), 3)
    await in_flight_at_an_update(house.engine, house.model, weights, house.case.kv, CLOSE["atol"])
    after = with_weights(house.model, weights)
    (fresh,) = await house.engine.sample(request("a", max_tokens=30, prompt=40))
    np.testing.assert_allclose(fresh.logprobs, log_probs(after, fresh), **CLOSE)


async def test_what_waits_at_a_drain(house: House) -> None:
    if house.case.kv != "drain":
        pytest.skip("only kv: drain has requests wait")
    weights = nudged(weights_of(house.model), 5)
    await waiting_at_a_drain(house.engine, house.model, weights, CLOSE["atol"])
    with_weights(house.model, weights)


async def test_samples_that_still_run_at_the_end_of_a_drain_go_on_as_with_recompute(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    if house.case.kv != "drain":
        pytest.skip("only kv: drain waits")
    config = house.engine._config
    short = replace(config, generator=replace(config.generator, drain_deadline_s=0.001))
    monkeypatch.setattr(house.engine, "_config", short)
    weights = nudged(weights_of(house.model), 7)
    await in_flight_at_an_update(house.engine, house.model, weights, "recompute", CLOSE["atol"])
    with_weights(house.model, weights)


async def test_a_sample_that_begins_after_an_update_finds_nothing_of_the_old_weights(house: House) -> None:
    """Though it was asked for before, when others had read the same prompt."""
    engine, drains = house.engine, house.case.kv == "drain"
    weights = nudged(weights_of(house.model), 5)
    async with staged(engine, weights) as flip:
        first = asyncio.ensure_future(engine.sample(request("a", n=8, max_tokens=300, prompt=70)))
        await until_tokens(engine, 16)
        waiting = asyncio.ensure_future(engine.sample(request("b", ordinal=1, n=4, max_tokens=20, prompt=70)))
        await until_tokens(engine, 16)
        new = await flip()
        turns = await waiting
        await first
    of_old = [log_probs(house.model, turn) for turn in turns]
    after = with_weights(house.model, weights)
    for turn, old in zip(turns, of_old, strict=True):
        assert (turn.versions == new).all() or drains
        expected = log_probs(after, turn) if turn.versions[0] == new else old
        np.testing.assert_allclose(turn.logprobs, expected, **CLOSE)


async def test_samples_that_lose_their_cache_are_none_the_worse(house: House) -> None:
    engine, before = house.engine, house.engine.stats()["preemptions"]
    turns = await engine.sample(request("a", n=8, max_tokens=340, prompt=40))
    for turn in turns:
        np.testing.assert_allclose(turn.logprobs, log_probs(house.model, turn), **CLOSE)
        assert len(turn.output_ids) == 340
        assert (turn.versions == engine.version).all()
    assert (engine.stats()["preemptions"] > before) == (house.case.kv_cache_mb is not None)


async def test_the_stream_is_there_behind_the_verbs_of_vllm(house: House) -> None:
    """As another program would use a vLLM server that it has started."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

    llm, weights = house.engine._llm, nudged(weights_of(house.model), 4)
    with learner(weights, version=900, lineage=7) as source:
        await llm.init_weight_transfer_engine(
            WeightTransferInitRequest(
                {
                    "run": "run",
                    "who": "server",
                    "endpoints": list(source.endpoints),
                    "lineage": 7,
                    "dtype": "float32",
                }
            )
        )
        await llm.pause_generation(mode="keep", clear_cache=True)
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest({"version": 900}))
        await llm.finish_weight_update("900")
        await llm.resume_generation()
        await llm.shutdown_weight_transfer_engine()
    model = with_weights(house.model, weights)
    (turn,) = await house.engine.sample(request("a", max_tokens=30, prompt=40))
    np.testing.assert_allclose(turn.logprobs, log_probs(model, turn), **CLOSE)
    assert (turn.versions == 900).all()


ORPHANS = """
import asyncio, sys
sys.path[:0] = ["tests/helpers/processes", "tests/contract/engines"]
from pathlib import Path
import psutil
from engine_cases import vllm_config
from asyncrl.config.sections.generator import (VllmConfig)
from asyncrl.generator.engines.vllm.vllm_engine import VllmEngine

async def main():
    ours = VllmConfig(tensor_parallel=int(sys.argv[2]), data_parallel=int(sys.argv[3]))
    engine = VllmEngine(vllm_config(Path(sys.argv[1]), vllm=ours), "generator-0", ())
    await engine.start()
    print("children", *[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (1, 2)])
async def test_a_generator_that_is_killed_leaves_no_process(
    ranks: int, replicas: int, tmp_path: Path
) -> None:
    from_config(CASES["qwen3, a small cache, recompute"].config, tmp_path)
    command = [sys.executable, "-c", ORPHANS, str(tmp_path), str(ranks), str(replicas)]
    generator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert generator.stdout is not None
    line = next(line for line in generator.stdout if line.startswith("children"))
    children = [psutil.Process(int(pid)) for pid in line.split()[1:]]
    assert len(children) >= ranks * replicas
    generator.kill()
    generator.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
