"""The axes of the learner's ranks on Megatron-core, and the rules between them.

    pp   pipeline stages, outermost     different layers, the same rows
    dp   data ranks                     different rows; they share the optimizer (DistributedOptimizer)
    tp   parts of each matrix           the same rows

Experts are spread over the ranks dp × tp of one stage, each whole on one rank. If they are not spread (expert: 1),
their matrices are cut over tp like the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.rules import require
from asyncrl.config.sections.learner import ParallelConfig
from asyncrl.sync.layout.megatron import Gpt, MegatronPlace


@dataclass(frozen=True, slots=True)
class Grid:
    """This rank, and the sizes of the axes. chunks: runs of layers of each stage, several if interleaved."""

    rank: int
    pipeline: int
    data: int
    tensor: int
    expert: int = 1
    chunks: int = 1
    sequence: bool = False

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor % self.data

    @property
    def stage(self) -> int:
        return self.rank // (self.tensor * self.data)

    @property
    def expert_rank(self) -> int:
        return self.rank % (self.tensor * self.data) % self.expert

    @property
    def expert_tensor(self) -> int:
        """The number of ranks that share the matrices of one expert."""
        return self.tensor if self.expert == 1 else 1

    @property
    def data_leaders(self) -> list[int]:
        """The rank of each data rank that has its losses: on the last stage, the first that shares matrices."""
        first = (self.pipeline - 1) * self.data * self.tensor
        return [first + data * self.tensor for data in range(self.data)]

    def place(self, chunk: int) -> MegatronPlace:
        """The place of a model chunk of this rank."""
        return MegatronPlace(
            tp=(self.tensor_rank, self.tensor),
            pp=(self.stage, self.pipeline),
            vpp=(chunk, self.chunks),
            ep=(self.expert_rank, self.expert),
            expert_tp=(self.rank % self.expert_tensor, self.expert_tensor),
        )


def make_grid(parallel: ParallelConfig, rank: int, world: int) -> Grid:
    """The grid of `learner.parallel` for `world` processes. Raises ConfigError if Megatron cannot make it."""
    for key, why in (
        ("context", "needs TransformerEngine's attention, which is not used here"),
        ("replicate", "is not built for Megatron's optimizer"),
    ):
        size = getattr(parallel, key)
        require(size == 1, f"learner.parallel.{key}", size, why, f"set {key}=1, or learner.backend=fsdp")
    width = parallel.pipeline * parallel.tensor
    require(
        world % width == 0,
        "learner.parallel",
        f"pipeline {parallel.pipeline} · tensor {parallel.tensor}",
        f"takes multiples of {width} processes, and the learner has {world}",
        f"set learner.processes={width} or a multiple, or smaller axes",
    )
    interleaved = parallel.pipeline > 1 and parallel.pipeline_schedule == "interleaved"
    found = Grid(
        rank,
        parallel.pipeline,
        world // width,
        parallel.tensor,
        parallel.expert,
        parallel.pipeline_stages_per_rank if interleaved else 1,
        parallel.sequence and parallel.tensor > 1,
    )
    require(
        found.data * found.tensor % parallel.expert == 0,
        "learner.parallel.expert",
        parallel.expert,
        f"must divide the {found.data * found.tensor} ranks of a pipeline stage",
        "set a divisor of learner.processes / pipeline",
    )
    return found


def check_model(found: Grid, gpt: Gpt) -> None:
    """Raises ConfigError unless the grid can divide the model."""
    layers = found.pipeline * found.chunks
    _divides("pipeline", layers, "layers", gpt.layers)
    _divides("tensor", found.tensor, "key heads", gpt.key_heads)
    _divides("tensor", found.tensor, "rows of a feed-forward layer", gpt.ffn)
    experts = gpt.mixture.experts if gpt.mixture is not None else 0
    rule, remedy = "shares out experts, and the model has none", "set learner.parallel.expert=1"
    require(found.expert == 1 or experts > 0, "learner.parallel.expert", found.expert, rule, remedy)
    if gpt.mixture is not None:
        _divides("expert", found.expert, "experts", experts)
        _divides("tensor", found.expert_tensor, "rows of an expert", gpt.mixture.ffn)
        _divides("tensor", found.tensor, "rows of the shared expert", gpt.mixture.shared)
        rule = "must be true in a model with experts whose matrices are shared: Megatron requires it"
        remedy = "set learner.parallel.sequence=true"
        require(found.tensor == 1 or found.sequence, "learner.parallel.sequence", False, rule, remedy)


def _divides(key: str, parts: int, what: str, count: int) -> None:
    rule = f"must divide the {count} {what} of the model"
    remedy = f"set learner.parallel.{key} to a divisor of {count} (of its chunks, if interleaved)"
    require(count % parts == 0, f"learner.parallel.{key}", parts, rule, remedy)
