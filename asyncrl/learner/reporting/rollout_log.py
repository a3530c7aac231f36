"""RUN/rollouts.jsonl: what the policy says, for people to read.

Of every `telemetry.rollouts_every`-th version and of the first: the worst and the best rollout of a few of the groups
that made it, with the rewards that they were trained on.

    {"version": 10, "ordinal": 117, "prompt": "4+5=", "answer": "0,9>9", "reward": 1.0, "parts": {"right": 1.0},
     "tokens": 5, "versions": [8, 9], "finish": "stop"}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.models import load_tokenizer
from asyncrl.telemetry.sinks import JsonlSink
from asyncrl.types import Array, Group, Rollout, Task, Version

FILE = "rollouts.jsonl"
GROUPS = 4
"""Of one version, at most."""

Decode = Callable[[Array], str | list[int]]


class RolloutLog:
    """resume_at: the version that a run goes on from; what was written of later ones is cut off."""

    def __init__(self, run_folder: Path, config: Config, resume_at: Version | None) -> None:
        self._every, self._decode = config.telemetry.rollouts_every, _decoder(config)
        self._sink = JsonlSink(run_folder / FILE, resume_at)

    def write(self, version: Version, groups: Sequence[Group]) -> None:
        """groups: of those that `version` was made from."""
        if version == 1 or version % self._every == 0:
            for group in groups[:GROUPS]:
                for rollout in _worst_and_best(group.rollouts()):
                    self._sink.write({"version": version, **rollout_row(group.task, rollout, self._decode)})

    def close(self) -> None:
        self._sink.close()


def rollout_row(task: Task, rollout: Rollout, decode: Decode) -> dict[str, Any]:
    """prompt, answer: what stands before the policy's first token, and all from there on, whoever said it · tokens,
    versions: how many are the policy's, and the oldest and newest that made one."""
    mine = rollout.loss_mask != 0
    first = int(np.argmax(mine)) if mine.any() else len(mine)
    made = rollout.versions[mine]
    return {
        "ordinal": task.ordinal,
        "prompt": decode(rollout.token_ids[:first]),
        "answer": decode(rollout.token_ids[first:]),
        "reward": float(rollout.reward),
        "parts": {name: float(value) for name, value in rollout.reward_parts.items()},
        "tokens": int(mine.sum()),
        "versions": [int(made.min()), int(made.max())] if len(made) else [],
        "finish": rollout.finish,
    }


def _worst_and_best(rollouts: Iterable[Rollout]) -> Iterator[Rollout]:
    """Two of a group, one where all earn the same."""
    by_reward = sorted(rollouts, key=lambda rollout: rollout.reward)
    yield by_reward[0]
    if by_reward[-1].reward > by_reward[0].reward:
        yield by_reward[-1]


def _decoder(config: Config) -> Decode:
    """With special tokens; token ids where the learner has no tokenizer at hand."""
    try:
        tokenizer = load_tokenizer(config.model)
    except ConfigError:
        return lambda ids: [int(one) for one in ids]
    return lambda ids: str(tokenizer.decode(ids))
