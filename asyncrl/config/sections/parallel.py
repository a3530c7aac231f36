"""The keys of the section `learner.parallel`: how every model of the learner is spread over its processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from asyncrl.config.limits import Processes
from asyncrl.config.sections.rules import Section, key


@dataclass(frozen=True)
class ParallelConfig(Section):
    """The processes beyond these axes shard parameters, gradients and optimizer (FSDP)."""

    tensor: Processes = key(1, "processes that share each matrix; they learn from the same groups")
    sequence: bool = key(True, "with tensor > 1: what stands between the matrices is shared too, by tokens")
    context: Processes = key(1, "processes that share the tokens of each micro-batch")
    context_way: Literal["ulysses", "all_gather"] = key(
        "ulysses", "tokens for heads and back, or all keys to everybody"
    )
    expert: Processes = key(1, "processes that share the experts of each layer")
    pipeline: Processes = key(1, "processes one after another, each with some of the layers")
    pipeline_schedule: Literal["1f1b", "interleaved"] = key(
        "1f1b", "interleaved: each has several runs of layers"
    )
    pipeline_stages_per_rank: Processes = key(2, "how many; interleaved only")
    replicate: Processes = key(1, "copies of the sharded model, each with groups of its own (HSDP)")

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
