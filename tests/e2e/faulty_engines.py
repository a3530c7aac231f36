"""Engines that are wrong, for `generator.own_engine`: the embedded one, and what somebody's own may do to it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from asyncrl.config.schema import Config
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.engines.receiver import LocalReceiver, WeightReader, WeightReceiver
from asyncrl.generator.engines.transformers.transformers_engine import (
    TransformersEngine,
    load_transformers_engine,
)
from asyncrl.types import Turn, Version

SPOILT = 2
"""The first version that is flipped to in the wrong way."""


class Wrapped:
    """The embedded engine, as it is."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def receiver(self, reader: WeightReader) -> WeightReceiver:
        return LocalReceiver(self.targets, self.flip, reader)


class Heavier(Wrapped):
    """One number of one parameter is not the learner's, from version SPOILT on."""

    async def flip(self, staged: Mapping[str, Tensor], version: Version) -> float:
        pause_s = await self.engine.flip(staged, version)
        if version >= SPOILT:
            self.engine.targets["model.layers.0.mlp.down_proj.weight"][3, 5] += 1.0
        return pause_s


class Hotter(Wrapped):
    """Draws at a temperature that is not the one it was asked for, and that the rollouts have on record."""

    async def sample(self, request: SampleRequest) -> list[Turn]:
        sampling = dataclasses.replace(request.sampling, temperature=1.3 * request.sampling.temperature)
        return await self.engine.sample(dataclasses.replace(request, sampling=sampling))


class Hanging(Wrapped):
    """Its 30th step never ends, once in a run."""

    def __init__(self, engine: TransformersEngine, mark: Path) -> None:
        super().__init__(engine)
        step, steps = engine.batch.step, count(1)

        def hanging_step(admit: bool = True) -> Any:
            if next(steps) == 30 and not mark.exists():
                mark.touch()
                threading.Event().wait()
            return step(admit)

        engine.batch.step = hanging_step  # type: ignore[method-assign]


def hanging(config: Config, tokenizer: PreTrainedTokenizerBase, name: str) -> Hanging:
    return Hanging(load_transformers_engine(config, tokenizer), Path(config.run.dir) / "hangs")


def heavier(config: Config, tokenizer: PreTrainedTokenizerBase, name: str) -> Heavier:
    return Heavier(load_transformers_engine(config, tokenizer))


def hotter(config: Config, tokenizer: PreTrainedTokenizerBase, name: str) -> Hotter:
    return Hotter(load_transformers_engine(config, tokenizer))
