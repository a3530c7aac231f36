"""A generator as it runs: python -m bench.sync.engine. The embedded engine decodes while versions arrive, over a link
that can be slowed, and says how long it stood still for each flip."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from asyncrl.config.schema import SyncConfig
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.engines.receiver import WeightReader
from asyncrl.generator.engines.transformers.kv_cache import ATTENTION
from asyncrl.generator.engines.transformers.transformers_engine import TransformersEngine
from asyncrl.generator.weights import WeightFollower
from asyncrl.sync.channels.channel import SharingChannel, Transfer
from asyncrl.sync.stream import link
from asyncrl.types import Sampling
from bench.process import Talk
from bench.sync.model import HEAD, SHAPES

SLOTS, LENGTH = 4, 2048


Receive = Callable[[Transfer, int, float], None]
"""Waits for a transfer of so many bytes, at most so many seconds."""


@dataclass
class SlowChannel:
    """A channel whose receives take what `receive` takes."""

    channel: SharingChannel
    receive: Receive

    @property
    def device(self) -> torch.device:
        return self.channel.device

    def send(self, data: torch.Tensor) -> Transfer:
        return self.channel.send(data)

    def recv(self, into: torch.Tensor) -> Transfer:
        return SlowTransfer(self.channel.recv(into), into.numel(), self.receive)

    def send_parts(self, parts: Sequence[torch.Tensor]) -> Transfer:
        return self.channel.send_parts(parts)

    def recv_parts(self, into: Sequence[torch.Tensor]) -> Transfer:
        return SlowTransfer(self.channel.recv_parts(into), sum(part.nbytes for part in into), self.receive)

    def fileno(self) -> int:
        return self.channel.fileno()

    def close(self) -> None:
        self.channel.close()


@dataclass
class SlowTransfer:
    transfer: Transfer
    nbytes: int
    receive: Receive

    def wait(self, seconds: float) -> None:
        self.receive(self.transfer, self.nbytes, seconds)


@dataclass
class OneLearner:
    """A directory that knows one learner."""

    endpoints: list[str]

    async def lookup(self, key: str, wait_s: float) -> Any:
        rank = int(key.removeprefix("weights/"))
        return {"endpoint": self.endpoints[rank], "world": len(self.endpoints), "lineage": 1}


def model_of(millions: int) -> PreTrainedModel:
    hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[millions]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD,  # type: ignore[call-arg]  # Qwen2's model reads it all the same
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation=ATTENTION
    ).eval()


async def run(talk: Talk, said: dict[str, Any]) -> None:
    if said["link_bytes_per_s"]:
        opened = link.connect

        def receive(transfer: Transfer, nbytes: int, seconds: float) -> None:
            transfer.wait(seconds)
            time.sleep(nbytes / said["link_bytes_per_s"])

        def open_slow(*of: Any, **more: Any) -> SlowChannel:
            return SlowChannel(cast(SharingChannel, opened(*of, **more)), receive)

        link.connect = cast(Any, open_slow)
    engine = TransformersEngine(
        model_of(said["millions"]), slots=SLOTS, max_length=LENGTH, end_ids=(), version=0, fixed_shape=False
    )
    reader = WeightReader("bench", said["who"], SyncConfig(delta="never"))
    follower = WeightFollower(said["who"], engine.receiver(reader), OneLearner(said["endpoints"]))
    await engine.start()
    tasks = [asyncio.create_task(follower.run()), asyncio.create_task(_decode(engine))]
    talk.tell({"floor_ms": follower.stats()["weights/floor_ms"]})
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, talk.hears) is not None:
        flips = follower.stats()["weights/flips"]
        while (stats := follower.stats())["weights/flips"] == flips:
            await asyncio.sleep(0.01)
        talk.tell({"pause_ms": stats["weights/pauses_ms"][-1], "fetch_ms": stats["weights/fetches_ms"][-1]})
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await engine.close()


async def _decode(engine: TransformersEngine) -> None:
    """All slots, for ever."""

    async def one(slot: int) -> None:
        for number in range(1 << 30):
            request = SampleRequest(
                f"{slot}.{number}", np.ones(8, np.int64), Sampling(max_tokens=LENGTH - 16), slot
            )
            await engine.sample(request)

    await asyncio.gather(*(one(slot) for slot in range(SLOTS)))


def main() -> None:
    torch.set_num_threads(1)
    talk = Talk()
    asyncio.run(run(talk, talk.hears()))


if __name__ == "__main__":
    main()
