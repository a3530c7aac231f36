"""For `generator.own_engine` and `reward.function`: an engine of long answers, and reports of what is made and kept of
them, as lines of JSON."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from asyncrl.config.schema import Config
from asyncrl.generator.agents.trajectory import Trajectory
from asyncrl.generator.agents.trajectory_entries import PolicyEntry
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.engines.transformers.transformers_engine import (
    TransformersEngine,
    load_transformers_engine,
)
from asyncrl.queue.client.client import QueueClient
from asyncrl.types import Rollout, Task

HELD_AT = 72
"""Once all answers have so many tokens, the engine of the generator `first` stands still: 48 of each are kept then,
also if one row of a task is ahead of the other."""


def load(config: Config, tokenizer: PreTrainedTokenizerBase, name: str) -> TransformersEngine:
    """The embedded engine without end tokens."""
    engine, folder = load_transformers_engine(config, tokenizer), Path(config.run.dir)
    engine.batch._end_ids = engine.batch._end_ids[:0]
    _report_requests(engine, folder)
    _report_progress(folder)
    if name == "first":
        step, rows = engine.batch.step, engine.batch._rows

        def held_step(admit: bool = True) -> Any:
            if rows.used_R.all() and (rows.known_R - rows.prompt_R).min() >= HELD_AT:
                threading.Event().wait()
            return step(admit)

        engine.batch.step = held_step  # type: ignore[method-assign]
    return engine


def report_length(task: Task, text: str, rollout: Rollout) -> float:
    """A reward that differs within a group, and is the same for the same rollout."""
    made = rollout.loss_mask == 1
    _write(
        Path(os.environ["ASYNCRL_REPORTS"]),
        kind="rollout",
        ordinal=task.ordinal,
        ids=rollout.token_ids[made].tolist(),
        logprobs=rollout.logprobs[made].tolist(),
        versions=rollout.versions[made].tolist(),
    )
    return float(rollout.token_ids[made].sum() % 97)


def _report_requests(engine: TransformersEngine, folder: Path) -> None:
    plain = engine.sample

    async def sample(request: SampleRequest) -> Any:
        if not request.request_id.startswith("probe"):
            _write(folder, kind="request", ordinal=request.ordinal, n=request.n, made=request.made)
        return await plain(replace(request))

    engine.sample = sample  # type: ignore[method-assign]


def _report_progress(folder: Path) -> None:
    plain = QueueClient.progress

    async def progress(self: QueueClient, stream: str, lease: Any, frames: Sequence[bytes]) -> None:
        await plain(self, stream, lease, frames)
        kept = [Trajectory.unpack(frame) for frame in frames[1:]]
        _write(
            folder,
            kind="kept",
            ordinal=lease.task.ordinal,
            answers=[one.last_words.tolist() for one in kept],
            logprobs=[_joined(one).tolist() for one in kept],
        )

    QueueClient.progress = progress  # type: ignore[method-assign]


def _joined(trajectory: Trajectory) -> np.ndarray:
    pieces = [entry.logprobs for entry in trajectory.entries if isinstance(entry, PolicyEntry)]
    return np.concatenate([np.empty(0, np.float32), *pieces])


def _write(folder: Path, **entry: Any) -> None:
    with (folder / "reports").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), **entry}) + "\n")
