"""The engines that the contract holds for, a small model for them, and a learner that publishes weights."""

from __future__ import annotations

import asyncio
import copy
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from processes import free_port
from sglang_stand_in import SglangStandIn
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen2Config
from waiting import eventually

from asyncrl.config.schema import BatchConfig, Config, GeneratorConfig, ModelConfig, SyncConfig
from asyncrl.config.sections.generator import KvAtFlip, ServerConfig
from asyncrl.generator.engines.engine import Engine, SampleRequest
from asyncrl.generator.engines.http.http_engine import HttpEngine
from asyncrl.generator.engines.receiver import Learner, WeightReader
from asyncrl.generator.engines.scripted_engine import ScriptedEngine
from asyncrl.generator.engines.transformers.drafts import Drafter
from asyncrl.generator.engines.transformers.kv_cache import ATTENTION
from asyncrl.generator.engines.transformers.transformers_engine import TransformersEngine
from asyncrl.generator.engines.vllm.vllm_engine import VllmEngine
from asyncrl.generator.process import load_server
from asyncrl.learner.ranks import process_group
from asyncrl.models.loading import checkpoint_tensors
from asyncrl.sync.stream.publisher import Publisher
from asyncrl.sync.tensors.quantization import QuantizedShards
from asyncrl.sync.tensors.shards import Shards, layout_of
from asyncrl.system.signals import die_with_parent
from asyncrl.types import Sampling, Turn

SLOTS, MAX_LENGTH, VOCABULARY = 8, 400, 16
END = VOCABULARY - 1
"""The end token, which the model never draws unless its weights are those of `always_stops`."""

SYNC = SyncConfig(bucket_mb=0.01, deadline_s=30.0)

# Of models small enough for vLLM to start on in seconds, and how near its log-probs come to others'.
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CLOSE = {"atol": 2e-4, "rtol": 0}


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


def transformers(
    folder: Path,
    fixed_shape: bool = False,
    kv: KvAtFlip = "keep",
    drain_s: float = 600.0,
    drafter: Drafter | None = None,
) -> House:
    reference = tiny_qwen2()
    engine = TransformersEngine(
        tiny_qwen2(),
        slots=SLOTS,
        max_length=MAX_LENGTH,
        end_ids=(END,),
        version=0,
        fixed_shape=fixed_shape,
        kv=kv,
        drain_s=drain_s,
        drafter=drafter,
    )
    return House(engine, weights_of(reference), reference)


def vllm(folder: Path) -> House:
    reference = tiny_qwen2()
    reference.save_pretrained(folder)
    engine = VllmEngine(vllm_config(folder), "generator-0", (END,), load_weights=True)
    return House(engine, weights_of(reference), reference)


def server_config(path: Path, **generator: object) -> Config:
    return Config(
        model=ModelConfig(path=str(path)),
        batch=BatchConfig(groups=4, group_size=2),
        generator=GeneratorConfig(
            slots=SLOTS,
            max_tokens=MAX_LENGTH - 1,
            **{"max_length": MAX_LENGTH, **generator},  # type: ignore[arg-type]
        ),
    )


class HostedSglang(HttpEngine):
    """The engine, and with it the server that it asks."""

    def __init__(
        self, folder: Path, kv: KvAtFlip, *, spans: bool = True, version: int = 0, **generator: Any
    ) -> None:
        model, port = tiny_qwen2(), free_port()
        model.save_pretrained(folder)
        inner = TransformersEngine(model, slots=SLOTS, max_length=MAX_LENGTH, end_ids=(END,), version=0)
        self.stand_in = SglangStandIn(inner, port, spans=spans)
        ours = ServerConfig([f"http://127.0.0.1:{port}"], folder=str(folder / "versions"), deadline_s=5.0)
        config = server_config(folder, engine="sglang", kv=kv, server=ours, **generator)
        super().__init__(load_server(config, "generator-0", [END]), config.generator, version, VOCABULARY)

    async def start(self) -> None:
        await self.stand_in.start()
        await super().start()

    async def close(self) -> None:
        await super().close()
        await self.stand_in.close()


class HostedVllm(HttpEngine):
    """The engine, and with it the process of the server that it asks."""

    def __init__(self, folder: Path, kv: KvAtFlip = "keep", max_length: int = MAX_LENGTH) -> None:
        self.port, self.folder = free_port(), folder
        self._process: subprocess.Popen[bytes] | None = None
        ours = ServerConfig([f"http://127.0.0.1:{self.port}"], deadline_s=300.0)
        config = server_config(folder, engine="vllm_server", kv=kv, server=ours, max_length=max_length)
        super().__init__(load_server(config, "generator-0", [END]), config.generator, version=0)

    def serve(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("vllm_serve.py")), str(self.folder)]
        command += [str(self.port), str(SLOTS), str(MAX_LENGTH)]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
            )

    async def start(self) -> None:
        self.serve()
        await super().start()

    def kill(self) -> None:
        """And what it started, which has then seen to its own end."""
        if self._process is not None:
            children = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            self._process.wait()
            psutil.wait_procs(children, timeout=30)
            self._process = None

    async def close(self) -> None:
        await super().close()
        self.kill()


def sglang(folder: Path, kv: KvAtFlip, drain_s: float = 600.0) -> House:
    reference = tiny_qwen2()
    engine = HostedSglang(folder, kv, spans=kv == "keep", drain_deadline_s=drain_s)
    return House(engine, weights_of(reference), reference)


def vllm_server(folder: Path) -> House:
    reference = tiny_qwen2()
    reference.save_pretrained(folder)
    return House(HostedVllm(folder), weights_of(reference), reference)


MAKERS: dict[str, Callable[[Path], House]] = {
    "scripted": scripted,
    "transformers": transformers,
    "transformers at fixed shape": lambda folder: transformers(folder, fixed_shape=True),
    "transformers with drafts": lambda folder: transformers(folder, drafter=Drafter(8, 64)),
    "vllm": vllm,
    "vllm server": vllm_server,
    "sglang": lambda folder: sglang(folder, "keep"),
    "sglang, recompute": lambda folder: sglang(folder, "recompute"),
}


@contextmanager
def learner(
    weights: Mapping[str, Tensor], version: int, lineage: int = 0, quantization: str | None = None
) -> Iterator[Learner]:
    """One rank that has published these weights."""
    shards = Shards(layout_of(weights), weights)
    live = shards if quantization is None else QuantizedShards(shards, quantization, process_group)
    publisher = Publisher(0, 1, live, SYNC, lineage)
    publisher.publish(version)
    try:
        yield Learner((publisher.endpoint,), lineage)
    finally:
        publisher.close(5.0)


@asynccontextmanager
async def staged(
    engine: Engine, weights: Mapping[str, Tensor], quantization: str | None = None
) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """These weights lie beside the live ones; call to make them live as the engine's next version, the answer."""
    reader = WeightReader("run", "generator-0", SYNC, quantization=quantization)
    receiver, version = engine.receiver(reader), engine.version + 1
    with learner(weights, version, quantization=quantization) as source:
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


async def update(engine: Engine, weights: Mapping[str, Tensor], quantization: str | None = None) -> int:
    """Bring these weights into the engine as its next version, which it returns."""
    async with staged(engine, weights, quantization) as flip:
        return await flip()


async def in_flight_at_an_update(
    engine: Engine, model: PreTrainedModel, weights: Mapping[str, Tensor], kv: KvAtFlip, atol: float = 2e-5
) -> None:
    """What `generator.kv` promises of samples that are in flight when the engine's weights, the model's, become these.

    Each token's log-prob is that of a plain model that reads the tokens before it with the weights that `kv` says.
    """
    old, before, after = engine.version, copy.deepcopy(model), with_weights(copy.deepcopy(model), weights)
    async with staged(engine, weights) as flip:
        sampling = asyncio.ensure_future(engine.sample(request("a", n=4, max_tokens=300)))
        await until_tokens(engine, 40)
        flipping = asyncio.ensure_future(flip())
        late = asyncio.ensure_future(engine.sample(request("b", n=2, max_tokens=20)))
        turns = await sampling
        new = await flipping
    for turn in turns:
        assert len(turn.output_ids) == 300
        assert (turn.versions[0], turn.versions[-1]) == (old, old if kv == "drain" else new)
    for turn in [*turns, *await late]:
        by_old = int((turn.versions == old).sum())
        assert turn.versions.tolist() == [old] * by_old + [new] * (len(turn.versions) - by_old)
        if kv == "drain":
            assert by_old in (0, len(turn.versions))
        expected = log_probs_over_an_update(before, after, turn, by_old, kv)
        np.testing.assert_allclose(turn.logprobs, expected, atol=atol, rtol=0)


async def waiting_at_a_drain(
    engine: Engine, model: PreTrainedModel, weights: Mapping[str, Tensor], atol: float = 2e-5
) -> None:
    """Slots fall free while the last samples of the old weights, the model's, go on: nobody takes them. What waits has
    nothing of the old weights behind it, though it begins with the prompt of those that they have answered."""
    old, after = engine.version, with_weights(copy.deepcopy(model), weights)

    def asked(name: str, max_tokens: int, ordinal: int) -> asyncio.Future[list[Turn]]:
        of = request(name, ordinal=ordinal, n=SLOTS // 2, max_tokens=max_tokens, prompt=40)
        return asyncio.ensure_future(engine.sample(of))

    async with staged(engine, weights) as flip:
        running = [asked("short", 150, 0), asked("long", 300, 1)]
        await until_tokens(engine, 4 * SLOTS)
        waiting = asked("waiting", 10, 2)
        flipping = asyncio.ensure_future(flip())
        await asyncio.sleep(0)
        late = asked("late", 10, 3)
        new = await flipping
    for turns in await asyncio.gather(*running):
        assert {int(v) for turn in turns for v in turn.versions} == {old}
    for turns in await asyncio.gather(waiting, late):
        assert {int(v) for turn in turns for v in turn.versions} == {new}
        for turn in turns:
            np.testing.assert_allclose(turn.logprobs, log_probs(after, turn), atol=atol, rtol=0)


def log_probs_over_an_update(
    before: PreTrainedModel, after: PreTrainedModel, turn: Turn, by_old: int, kv: KvAtFlip
) -> np.ndarray:
    """[T] of the turn's output tokens, the first `by_old` by the old weights. keep: the new ones read what they draw
    from on, and find the keys and values that the old ones made of everything before."""
    of_old, of_new = log_probs(before, turn)[:by_old], log_probs(after, turn)[by_old:]
    if kv == "keep" and 0 < by_old < len(turn.output_ids):
        ids = torch.from_numpy(np.concatenate([turn.prompt_ids, turn.output_ids]))
        first = len(turn.prompt_ids) + by_old - 1  # column of the first token that the new weights read
        with torch.no_grad():
            cache = before(ids[None, :first], use_cache=True).past_key_values
            logits = after(ids[None, first:-1], past_key_values=cache).logits[0].float()
        of_new = logits.log_softmax(-1).gather(1, ids[first + 1 :, None])[:, 0].numpy()
    return np.concatenate([of_old, of_new])


def request(
    name: str, *, ordinal: int = 0, n: int = 1, max_tokens: int = 5, prompt: int = 3, temperature: float = 1.0
) -> SampleRequest:
    prompt_ids = np.arange(prompt, dtype=np.int64) % END
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens, seed=1)
    return SampleRequest(name, prompt_ids, sampling, ordinal, n)


async def until_tokens(engine: Engine, at_least: int) -> None:
    """The engine has made so many more tokens than now."""
    start = engine.stats()["tokens"]
    await eventually(lambda: engine.stats()["tokens"] >= start + at_least)


def log_probs(model: PreTrainedModel, turn: Turn, temperature: float = 1.0) -> np.ndarray:
    """[T] of the turn's output tokens, by one forward pass over the whole sequence."""
    ids = torch.from_numpy(np.concatenate([turn.prompt_ids, turn.output_ids]))
    model.set_attn_implementation("eager")
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
