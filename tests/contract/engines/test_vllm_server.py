"""A real vLLM server, asked over HTTP: what the contract does not say of it. One server for all, killed once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
from engine_cases import (
    SYNC,
    HostedVllm,
    in_flight_at_an_update,
    learner,
    log_probs,
    nudged,
    request,
    tiny_qwen2,
    until_tokens,
    weights_of,
    with_weights,
)
from missing import needs_vllm

from asyncrl.errors import ConfigError
from asyncrl.generator.engines.receiver import LostWeightsError, WeightReader
from asyncrl.types import NO_VERSION

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.timeout(400),
    needs_vllm,
]

CLOSE = {"atol": 2e-5, "rtol": 0}


@pytest.fixture(scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HostedVllm]:
    folder = tmp_path_factory.mktemp("model")
    tiny_qwen2().save_pretrained(folder)
    engine = HostedVllm(folder, kv="recompute")
    await engine.start()
    yield engine
    await engine.close()


async def test_samples_in_flight_at_an_update_with_recompute(engine: HostedVllm) -> None:
    model = tiny_qwen2()
    await in_flight_at_an_update(engine, model, nudged(weights_of(model)), "recompute")


async def test_a_server_that_cannot_take_so_long_a_sample_is_refused_by_name(engine: HostedVllm) -> None:
    other = HostedVllm(engine.folder, max_length=401)
    other._server._link.url = engine._server._link.url  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"generator\.max_length = 401.*--max-model-len 400"):
        await other._server.start()
    await other._server.close()


async def test_a_server_that_is_killed_and_comes_back_gets_its_weights_again(engine: HostedVllm) -> None:
    model, version = tiny_qwen2(), engine.version + 1
    weights = nudged(weights_of(model), 5)
    receiver = engine.receiver(WeightReader("run", "generator-0", SYNC))
    with learner(weights, version) as source:
        await receiver.open(source)
        await receiver.stage(version)
        await receiver.flip(version)
        sampling = asyncio.ensure_future(engine.sample(request("a", n=4, max_tokens=390)))
        await until_tokens(engine, 10)
        await asyncio.to_thread(engine.kill)
        engine.serve()
        with pytest.raises(LostWeightsError, match="default"):
            await receiver.newest(version, 0.0)
        assert engine.version == NO_VERSION
        await receiver.open(source)
        assert await receiver.newest(NO_VERSION, 20.0) == version
        await receiver.stage(version)
        await receiver.flip(version)
        await receiver.verify()
        for turn in await sampling:
            assert len(turn.output_ids) == 390
            assert (turn.versions == version).all()
            expected = log_probs(with_weights(model, weights), turn)
            np.testing.assert_allclose(turn.logprobs, expected, **CLOSE)
        await receiver.close()
