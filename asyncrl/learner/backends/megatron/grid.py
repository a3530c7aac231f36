"""The axes of the learner's ranks on Megatron-core, and the rules between them.

    pp   pipeline stages, outermost     different layers, the same rows
    dp   data ranks                     different rows
    cp   parts of each micro-batch      different tokens of the same rows (`learner/parallel/context.py`)
    tp   parts of each matrix           the same rows

The ranks dp × cp share the optimizer (DistributedOptimizer). Experts are spread over the ranks dp × cp × tp of one
stage, each whole on one rank. If they are not spread (expert: 1), their matrices are cut over tp like the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.rules import require
from asyncrl.config.sections.learner import ParallelConfig
from asyncrl.learner.parallel.mesh import check_context, check_stages, layers_of
from asyncrl.sync.layout.megatron import Gpt, MegatronPlace

ALIGNED = 8
"""Elements of bfloat16 in the 16 bytes whose multiples torch's grouped products take."""


@dataclass(frozen=True, slots=True)
class Grid:
    """This rank, and the sizes of the axes. chunks: runs of layers of each stage, several if interleaved."""

    rank: int
    pipeline: int
    data: int
    context: int
    tensor: int
    expert: int = 1
    chunks: int = 1
    sequence: bool = False

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def data_rank(self) -> int:
        return self.rank // (self.tensor * self.context) % self.data

    @property
    def stage(self) -> int:
        return self.rank // self.stage_ranks

    @property
    def stage_ranks(self) -> int:
        """The number of ranks of one pipeline stage."""
        return self.data * self.context * self.tensor

    @property
    def expert_rank(self) -> int:
        return self.rank % self.stage_ranks % self.expert

    @property
    def expert_tensor(self) -> int:
        """The number of ranks that share the matrices of one expert."""
        return self.tensor if self.expert == 1 else 1

    @property
    def data_leaders(self) -> list[int]:
        """The rank of each data rank that has its losses: on the last stage, the first that shares its tokens and
        matrices."""
        first = (self.pipeline - 1) * self.stage_ranks
        return [first + data * self.context * self.tensor for data in range(self.data)]

    def stages(self, layers: int) -> tuple[int, ...]:
        """The number of layers of each run of layers, in the order of the model."""
        runs = self.pipeline * self.chunks
        return tuple(len(layers_of(run, runs, layers)) for run in range(runs))

    def place(self, chunk: int, layers: int) -> MegatronPlace:
        """The place of a chunk of this rank in a model of this many layers."""
        return MegatronPlace(
            tp=(self.tensor_rank, self.tensor),
            pp=(self.stage, self.pipeline),
            vpp=(chunk, self.chunks),
            ep=(self.expert_rank, self.expert),
            expert_tp=(self.rank % self.expert_tensor, self.expert_tensor),
            stages=self.stages(layers),
        )


def make_grid(parallel: ParallelConfig, rank: int, world: int) -> Grid:
    """The grid of `learner.parallel` for `world` processes. Raises ConfigError if Megatron cannot make it."""
    rule, remedy = "is not built for Megatron's optimizer", "set replicate=1, or learner.backend=fsdp"
    require(parallel.replicate == 1, "learner.parallel.replicate", parallel.replicate, rule, remedy)
    width = parallel.pipeline * parallel.context * parallel.tensor
    require(
        world % width == 0,
        "learner.parallel",
        f"pipeline {parallel.pipeline} · context {parallel.context} · tensor {parallel.tensor}",
        f"takes multiples of {width} processes, and the learner has {world}",
        f"set learner.processes={width} or a multiple, or smaller axes",
    )
    interleaved = parallel.pipeline > 1 and parallel.pipeline_schedule == "interleaved"
    found = Grid(
        rank,
        parallel.pipeline,
        world // width,
        parallel.context,
        parallel.tensor,
        parallel.expert,
        parallel.pipeline_stages_per_rank if interleaved else 1,
        parallel.sequence and parallel.tensor > 1,
    )
    require(
        found.stage_ranks % parallel.expert == 0,
        "learner.parallel.expert",
        parallel.expert,
        f"must divide the {found.stage_ranks} ranks of a pipeline stage",
        "set a divisor of learner.processes / pipeline",
    )
    return found


def check_model(found: Grid, gpt: Gpt, parallel: ParallelConfig) -> None:
    """Raises ConfigError unless the grid of `parallel` can divide the model."""
    check_stages(parallel, gpt.layers)
    _divides("tensor", found.tensor, "key heads", gpt.key_heads)
    _divides("tensor", found.tensor, "rows of a feed-forward layer", gpt.ffn)
    check_context(parallel, gpt.heads // found.tensor)
    experts = gpt.mixture.experts if gpt.mixture is not None else 0
    rule, remedy = "shares out experts, and the model has none", "set learner.parallel.expert=1"
    require(found.expert == 1 or experts > 0, "learner.parallel.expert", found.expert, rule, remedy)
    if gpt.mixture is not None:
        _divides("expert", found.expert, "experts", experts)
        _divides("tensor", found.expert_tensor, "rows of an expert", gpt.mixture.ffn)
        _divides("tensor", found.tensor, "rows of the shared expert", gpt.mixture.shared)
        rows = gpt.mixture.ffn // found.expert_tensor
        rule = f"leaves {rows} of an expert's rows on a process, and torch's grouped_mm takes multiples of {ALIGNED}"
        remedy = "set learner.parallel.expert to share out whole experts, or learner.backend=fsdp"
        require(rows % ALIGNED == 0, "learner.parallel.tensor", found.tensor, rule, remedy)
        rule = "must be true in a model with experts whose matrices are shared: Megatron requires it"
        remedy = "set learner.parallel.sequence=true"
        require(found.tensor == 1 or found.sequence, "learner.parallel.sequence", False, rule, remedy)


def _divides(key: str, parts: int, what: str, count: int) -> None:
    rule = f"must divide the {count} {what} of the model"
    remedy = f"set learner.parallel.{key} to a divisor of {count}"
    require(count % parts == 0, f"learner.parallel.{key}", parts, rule, remedy)
