"""How near an engine's log-probs come to the learner's in bfloat16: python -m bench.generator.half FOLDER ENGINE HEAD.

HEAD is `model.head_dtype`. Both have the weights in FOLDER/model. Prints the gap of the tokens of some answers as JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from asyncrl.config.schema import Config
from asyncrl.generator.engines.engine import Engine, SampleRequest
from asyncrl.generator.process import load_engine
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.models.loading import load_tokenizer
from asyncrl.types import Group, Rollout, Sampling
from bench.generator.model import LONG, config_of, task_at

TASKS, TOKENS = 8, 64
"""Prompts, with as many answers each as `LONG` has, and tokens of an answer."""


def main() -> None:
    folder, engine, head = sys.argv[1:]
    torch.set_num_threads(1)
    config = config_of(Path(folder), engine)
    model = dataclasses.replace(config.model, dtype="bfloat16", head_dtype=cast(Any, head))
    config = dataclasses.replace(config, model=model)
    batch = MicroBatch.of(asyncio.run(_groups(config)))
    apart = (FsdpBackend(config).policy.predict(batch) - batch.behaviour_N)[batch.loss_mask_N].abs()
    print(json.dumps({"mean": float(apart.mean()), "max": float(apart.max())}))


async def _groups(config: Config) -> list[Group]:
    engine = load_engine(config, load_tokenizer(config.model), "half", load_weights=True)
    await engine.start()
    groups = await asyncio.gather(*(_group(engine, ordinal) for ordinal in range(TASKS)))
    await engine.close()
    return groups


async def _group(engine: Engine, ordinal: int) -> Group:
    task, sampling = task_at(ordinal), Sampling(max_tokens=TOKENS)
    prompt = np.array([1 + int(digit) for digit in str(task.prompt)], np.int64)
    turns = await engine.sample(SampleRequest(f"half/{ordinal}", prompt, sampling, ordinal, LONG.group))
    return Group.from_rollouts(task, sampling, [Rollout.from_turn(turn) for turn in turns])


if __name__ == "__main__":
    main()
