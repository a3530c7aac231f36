"""Batches for the tests of advantages, and several ranks in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from asyncrl.learner.algorithms.registry import Gather
from asyncrl.learner.data.batch import MicroBatch

T = TypeVar("T")


def tokens_batch(
    masks: Sequence[str],
    rewards: Sequence[float],
    groups: Sequence[int] | None = None,
    parts: dict[str, Sequence[float]] | None = None,
    greedy: Sequence[float] | None = None,
    **columns: Sequence[Sequence[float]],
) -> MicroBatch:
    """A rollout per mask ('0110': tokens 1 and 2 are the policy's), all of one group unless `groups` says otherwise.

    Each column has a list of values per rollout; `behaviour` is the recorded log-prob.
    """
    lengths = [len(mask) for mask in masks]
    group_R = torch.tensor(groups or [0] * len(masks))
    given = {name: flat_column(name, values) for name, values in columns.items()}
    total = sum(lengths)
    return MicroBatch(
        token_ids_N=torch.zeros(total, dtype=torch.int64),
        position_ids_N=torch.cat([torch.arange(length) for length in lengths]),
        seq_N=torch.arange(len(masks)).repeat_interleave(torch.tensor(lengths)),
        loss_mask_N=torch.tensor([c == "1" for mask in masks for c in mask]),
        behaviour_N=given.pop("behaviour", torch.zeros(total)),
        versions_N=torch.zeros(total, dtype=torch.int32),
        advantages_N=torch.zeros(total),
        lengths_R=tuple(lengths),
        group_R=group_R,
        rewards_R=torch.tensor(rewards, dtype=torch.float32),
        greedy_R=torch.tensor(greedy if greedy is not None else [torch.nan] * len(masks)),
        ordinals_R=group_R.clone(),
        copies_R=torch.ones(len(masks)),
        temperature_R=torch.ones(len(masks)),
        media_N=torch.full((total,), -1, dtype=torch.int32),
        parts_R={name: torch.tensor(part) for name, part in (parts or {}).items()},
        columns=given,
    )


def flat_column(name: str, values: Sequence[Sequence[float]]) -> Tensor:
    whole = {"step": torch.int32, "anchor": torch.int64}
    return torch.tensor([v for each in values for v in each], dtype=whole.get(name, torch.float32))


def random_batch(seed: int, groups: int = 3, size: int = 3, scale: float = 1.0) -> MicroBatch:
    """Random masks with holes, rewards, parts and every column that an estimator may ask for."""
    random = np.random.default_rng(seed)
    rollouts = groups * size
    lengths = random.integers(3, 9, rollouts)
    masks = ["01" + "".join(random.choice(["0", "1"], length - 2, p=[0.25, 0.75])) for length in lengths]
    rewards, costs = (scale * random.normal(size=(2, rollouts))).astype(np.float32)
    floats = (
        "values",
        "cost_values",
        "reference",
        "reward_model",
        "teacher",
        "proximal",
        "squares",
        "behaviour",
    )
    columns: dict[str, Sequence[Sequence[float]]] = {
        name: [random.normal(size=length).tolist() for length in lengths] for name in floats
    }
    # Steps of two tokens; two states, so that some of them meet.
    columns["step"] = [[i // 2 if c == "1" else -1 for i, c in enumerate(mask)] for mask in masks]
    columns["anchor"] = [[i // 2 % 2 + 7 if c == "1" else 0 for i, c in enumerate(mask)] for mask in masks]
    return tokens_batch(
        masks,
        rewards.tolist(),
        groups=[g for g in range(groups) for _ in range(size)],
        parts={"cost": costs.tolist(), "right": (rewards - costs).tolist()},
        greedy=np.repeat(random.normal(size=groups), size).tolist(),
        **columns,
    )


def on_ranks(ranks: int, work: Callable[[int, Gather], T]) -> list[T]:
    """`work(rank, gather)` on each of `ranks` threads; every call of gather waits for all, 10 s at most."""
    barrier, offered = threading.Barrier(ranks, timeout=10.0), [torch.empty(0)] * ranks

    def run(rank: int) -> T:
        def gather(mine: Tensor) -> list[Tensor]:
            offered[rank] = mine
            barrier.wait()
            everyone = list(offered)
            barrier.wait()
            return everyone

        try:
            return work(rank, gather)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))
