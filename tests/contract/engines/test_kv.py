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
from asyncrl.generator.engines.transformers.drafts import Drafter

Maker = Callable[[Path, KvAtFlip, float], House]

MAKERS: dict[str, Maker] = {
    "transformers": lambda folder, kv, drain_s: transformers(folder, kv=kv, drain_s=drain_s),
    "transformers at fixed shape": lambda folder, kv, drain_s: transformers(
        folder, fixed_shape=True, kv=kv, drain_s=drain_s
    ),
    "transformers with drafts": lambda folder, kv, drain_s: transformers(
        folder, kv=kv, drain_s=drain_s, drafter=Drafter(8, 64)
    ),
    "sglang": sglang,
}


@pytest.fixture
def drain_s() -> float:
    return 600.0


@pytest.fixture(params=MAKERS.values(), ids=MAKERS.keys())
async def house(
    request: pytest.FixtureRequest, kv: KvAtFlip, drain_s: float, tmp_path: Path
) -> AsyncIterator[House]:
    house: House = request.param(tmp_path, kv, drain_s)
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


@pytest.mark.parametrize(("kv", "drain_s"), [("drain", 0.001)])
async def test_samples_that_still_run_at_the_end_of_a_drain_go_on_as_with_recompute(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    assert house.model is not None
    await in_flight_at_an_update(house.engine, house.model, nudged(house.weights), "recompute")
    assert "4 samples still run 0 s after version 1 came" in caplog.text
