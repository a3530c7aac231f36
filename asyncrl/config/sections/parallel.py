"""The keys of the section `learner.parallel`: how every model of the learner is spread over its processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from asyncrl.config.sections.limits import Processes, check_values
from asyncrl.config.sections.rules import require

WAYS = ("ulysses", "all_gather")
SCHEDULES = ("1f1b", "interleaved")


@dataclass(frozen=True)
class ParallelConfig:
    """What these axes leave of the processes shards parameters, gradients and optimizer (FSDP)."""

    # fmt: off
    tensor: Processes = 1  # processes that share each matrix; they learn from the same groups
    sequence: bool = True  # with tensor > 1: what stands between the matrices is shared too, by tokens
    context: Processes = 1  # processes that share the tokens of each micro-batch
    context_way: Literal["ulysses", "all_gather"] = "ulysses"  # tokens for heads and back, or all keys to everybody
    expert: Processes = 1  # processes that share the experts of each layer
    pipeline: Processes = 1  # processes one after another, each with some of the layers
    pipeline_schedule: Literal["1f1b", "interleaved"] = "1f1b"  # interleaved: each has several runs of layers
    pipeline_stages_per_rank: Processes = 2  # how many; interleaved only
    replicate: Processes = 1  # copies of the sharded model, each with groups of its own (HSDP)
    # fmt: on

    def __post_init__(self) -> None:
        check_values("learner.parallel", self)
        for key, value, known in (
            ("context_way", self.context_way, WAYS),
            ("pipeline_schedule", self.pipeline_schedule, SCHEDULES),
        ):
            require(
                value in known, f"learner.parallel.{key}", value, "is not known", f"set {' or '.join(known)}"
            )

    @property
    def stages_per_rank(self) -> int:
        return self.pipeline_stages_per_rank if self.pipeline_schedule == "interleaved" else 1

    @property
    def stages(self) -> int:
        """Runs of layers that the model is cut into."""
        return self.pipeline * self.stages_per_rank if self.pipeline > 1 else 1

    @property
    def processes(self) -> int:
        """The world must be a multiple of this; the quotient is the shard axis."""
        return math.prod((self.pipeline, self.replicate, self.context, self.tensor))
