"""The log-probs that the gateway has recorded of programs with tools, against those that the engine returned."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.load import load_config
from asyncrl.generator.engines.engine import Sampler, SampleRequest
from asyncrl.generator.gateway.harness import HarnessAgent
from asyncrl.generator.process import load_engine
from asyncrl.models.prompts import policy_tokenizer
from asyncrl.types import Array, Sampling, Task, Turn


class KeepsLogprobs:
    """An engine's `Sampler`. returned: the log-probs of each task's turns, in order"""

    def __init__(self, engine: Sampler) -> None:
        self._engine = engine
        self.returned = defaultdict[int, list[Array]](list)

    async def sample(self, request: SampleRequest) -> list[Turn]:
        turns = await self._engine.sample(request)
        self.returned[request.ordinal] += [turn.logprobs.copy() for turn in turns]
        return turns


async def compared(path: Path, data: Mapping[str, Any], rollouts: int, tokens: int) -> dict[str, float]:
    """path: of a configuration with a program. data: of its tasks. tokens: of a turn"""
    config = load_config(path)
    tokenizer = policy_tokenizer(config)
    engine = load_engine(config, tokenizer, "bench", load_weights=True)
    await engine.start()
    sampler = KeepsLogprobs(engine)
    player = HarnessAgent(sampler, tokenizer, config)

    async def play(ordinal: int) -> tuple[int, int]:
        """(log-probs, those that differ) of a rollout."""
        record: Any = await player.play(
            Task(ordinal, "123456", data), f"r/{ordinal}", Sampling(max_tokens=tokens)
        )
        rollout, made = record.rollout({}), np.concatenate(sampler.returned[ordinal])
        kept = rollout.logprobs[rollout.loss_mask == 1]
        if len(made) != len(kept):
            return len(made), len(made)
        return len(made), int((kept.view(np.uint32) != made.view(np.uint32)).sum())

    try:
        counts = await asyncio.gather(*map(play, range(rollouts)))
    finally:
        await player.close()
        await engine.close()
    every, unequal = map(sum, zip(*counts, strict=True))
    return {"recorded_logprobs": every, "unequal_logprobs": unequal}
