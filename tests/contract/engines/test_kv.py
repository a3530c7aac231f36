"""`generator.kv`: what becomes of samples in flight at an update, on every engine that starts within a second. The same
cases run on vLLM in test_vllm_weights.py and test_vllm_server.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from engine_cases import (
    House,
    in_flight_at_an_update,
    nudged,
    sglang,
    transformers,
    waiting_at_a_drain,
)

from asyncrl.config.sections.generator import KvAtFlip

Maker = Callable[[Path, KvAtFlip], House]

MAKERS: dict[str, Maker] = {
    "transformers": lambda folder, kv: transformers(folder, kv=kv),
    "transformers at fixed shape": lambda folder, kv: transformers(folder, fixed_shape=True, kv=kv),
    "sglang": sglang,
}


@pytest.fixture(params=MAKERS.values(), ids=MAKERS.keys())
async def house(request: pytest.FixtureRequest, kv: KvAtFlip, tmp_path: Path) -> AsyncIterator[House]:
    house: House = request.param(tmp_path, kv)
    await house.engine.start()
    yield house
    await house.engine.close()


@pytest.mark.parametrize("kv", ["keep", "recompute", "drain"])
async def test_samples_in_flight_at_an_update(house: House, kv: KvAtFlip) -> None:
    assert house.model is not None
    await in_flight_at_an_update(house.engine, house.model, nudged(house.weights), kv)


@pytest.mark.parametrize("kv", ["drain"])
async def test_what_has_not_begun_when_a_drain_begins_is_of_the_new_weights(house: House) -> None:
    assert house.model is not None
    await waiting_at_a_drain(house.engine, house.model, nudged(house.weights))
