"""Engines under generator.quantization draw with the learner's projections in 8 bits: the embedded one with s · q, and
real vLLM on the CPU with int8 products, of activations that it quantizes for each token."""

from __future__ import annotations

import copy
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import (
    EXPERTS,
    SIZES,
    SYNC,
    from_config,
    learner,
    log_probs,
    nudged,
    request,
    staged,
    transformers,
    update,
    vllm_config,
    weights_of,
    with_weights,
)
from missing import needs_vllm
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from asyncrl.config.sections.generator import VllmConfig
from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.generator.engines.receiver import LocalReceiver, WeightReader
from asyncrl.generator.engines.vllm.vllm_engine import VllmEngine
from asyncrl.generator.engines.vllm.vllm_start import engine_arguments
from asyncrl.sync.layout.quantized import is_quantized
from asyncrl.sync.tensors.quantization import round_trip

UP = "model.layers.0.mlp.up_proj.weight"
CLOSE = {"atol": 2e-5, "rtol": 0}


# ---- the embedded engine


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
async def test_the_embedded_engine_multiplies_with_what_8_bits_say(quantization: str, tmp_path: Path) -> None:
    house = transformers(tmp_path)
    engine, model = house.engine, house.model
    assert model is not None
    await engine.start()
    for seed in (1, 2):
        weights = nudged(house.weights, seed)
        await update(engine, weights, quantization)
        whole = copy.deepcopy(with_weights(model, weights))
        with_weights(model, dict(round_trip(weights, quantization)))
        for turn in await engine.sample(request("a", n=3, max_tokens=40, prompt=40)):
            np.testing.assert_allclose(turn.logprobs, log_probs(model, turn), **CLOSE)
            assert np.abs(turn.logprobs - log_probs(whole, turn)).max() > 10 * CLOSE["atol"]
    await engine.close()


@pytest.mark.parametrize("name", [UP, "model.norm.weight"])
async def test_a_flip_that_leaves_other_parameters_is_noticed(name: str, tmp_path: Path) -> None:
    """A quantized one, and one that travels whole."""
    house = transformers(tmp_path)
    await house.engine.start()
    async with staged(house.engine, nudged(house.weights), "int8") as flip:
        flipping = house.engine.batch.flip

        def flip_and_spoil(*arguments: object) -> None:
            flipping(*arguments)
            house.engine.targets[name].view(-1)[0] += 0.001

        house.engine.batch.flip = flip_and_spoil
        with pytest.raises(WeightSyncError, match="after the flip to version 1"):
            await flip()
    await house.engine.close()


@pytest.mark.parametrize("quantization", [None, "int8"])
async def test_parameters_without_elements_take_no_part(quantization: str | None) -> None:
    """Neither in staging nor in the checksum."""
    live = {
        UP: torch.zeros(3, 4),
        "model.layers.1.mlp.up_proj.weight": torch.zeros(0, 4),
        "b": torch.zeros(0),
    }
    coming = {name: torch.ones_like(tensor) for name, tensor in live.items()}

    async def flip(staged: Mapping[str, Tensor], version: int) -> float:
        for name, tensor in live.items():
            tensor.copy_(staged[name])
        return 0.0

    receiver = LocalReceiver(live, flip, WeightReader("run", "generator-0", SYNC, quantization=quantization))
    with learner(coming, 1, quantization=quantization) as source:
        await receiver.open(source)
        await receiver.stage(1)
        await receiver.flip(1)
        await receiver.verify()
        await receiver.close()
    torch.testing.assert_close(live[UP], coming[UP])


# ---- vLLM


@dataclass(frozen=True)
class Case:
    config: PretrainedConfig
    ranks: int = 1


CASES = {
    "qwen3": Case(Qwen3Config(**SIZES)),
    "qwen2 tied, two ranks": Case(
        Qwen2Config(**{**SIZES, "hidden_size": 128}, tie_word_embeddings=True), ranks=2
    ),
    "qwen3 moe, whose experts stay whole": Case(Qwen3MoeConfig(**SIZES, **EXPERTS)),
}


@dataclass
class House:
    case: Case
    engine: VllmEngine
    model: PreTrainedModel


class Int8Linear(nn.Module):
    """x · wᵀ, both rounded to int8: each row of w, and each token of x, by a scale of its own. parts: of the columns,
    at ranks that quantize their own."""

    def __init__(self, of: nn.Linear, parts: int) -> None:
        super().__init__()
        self.weight, self.bias, self._parts = of.weight, of.bias, parts

    def forward(self, x: Tensor) -> Tensor:
        parts = [_rounded(part) for part in x.chunk(self._parts, -1)]
        return nn.functional.linear(torch.cat(parts, -1), _rounded(self.weight), self.bias)


def _rounded(rows: Tensor) -> Tensor:
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (rows / scale).round() * scale


def in_int8(model: PreTrainedModel, ranks: int) -> PreTrainedModel:
    copied = copy.deepcopy(model)
    for name, module in list(copied.named_modules()):
        if isinstance(module, nn.Linear) and is_quantized(f"{name}.weight", tuple(module.weight.shape)):
            parts = ranks if name.endswith(("o_proj", "down_proj")) else 1
            copied.set_submodule(name, Int8Linear(module, parts))
    return copied


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
async def house(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[House]:
    case = request.param
    model = from_config(case.config, tmp_path)
    ours = VllmConfig(tensor_parallel=case.ranks)
    engine = VllmEngine(vllm_config(tmp_path, vllm=ours, quantization="int8"), "generator-0", ())
    await engine.start()
    yield House(case, engine, model)
    await engine.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
@needs_vllm
async def test_vllm_multiplies_in_int8_after_each_update(house: House) -> None:
    """Where a sum falls between two steps of an activation, its order decides: so most tokens are compared, not all."""
    weights = weights_of(house.model)
    for seed in (1, 2):
        weights = nudged(weights, seed)
        await update(house.engine, weights, "int8")
        expected = in_int8(with_weights(house.model, weights), house.case.ranks)
        turns = await house.engine.sample(request("a", n=3, max_tokens=40, prompt=40))
        off = np.median([np.abs(turn.logprobs - log_probs(expected, turn)) for turn in turns])
        of_whole = np.median([np.abs(turn.logprobs - log_probs(house.model, turn)) for turn in turns])
        assert off < of_whole / 5


@needs_vllm
def test_vllm_never_takes_the_kernels_for_amx() -> None:
    """They multiply activations in bfloat16 alone, and keep weights in a form of their own. Not every CPU has them, so
    that vLLM's choice is looked at: no module of it may have the function that it came with."""
    import asyncrl.generator.engines.vllm.vllm_worker  # noqa: F401  (a worker imports it before it makes a model)

    choices = {
        name: module.check_cpu_sgl_kernel
        for name, module in list(sys.modules.items())
        if name.startswith("vllm.") and hasattr(module, "check_cpu_sgl_kernel")
    }
    assert len(choices) >= 2
    assert {name for name, choice in choices.items() if choice.__module__.startswith("vllm.")} == set()
    assert not any(choice(256, 256, torch.int8) for choice in choices.values())


@needs_vllm
def test_fp8_needs_a_gpu_for_vllm(tmp_path: Path) -> None:
    from_config(CASES["qwen3"].config, tmp_path)
    with pytest.raises(ConfigError, match="vLLM's build for CPUs multiplies no fp8"):
        engine_arguments(vllm_config(tmp_path, quantization="fp8"))
