"""The named axes of the learner's processes, outermost first:

    pp           pipeline stages: different layers                             the same rows
    replicate    copies of the whole model                                     different rows
    shard        FSDP: parts of parameters, gradients, optimizer state         different rows
    cp           different tokens of the same micro-batch; part of FSDP too    the same rows
    tp           parts of each matrix                                          the same rows

Experts (`ep`) have no axis of their own: the ranks of shard × cp, which all have tokens of their own, form a second
grid part × ep. Neighbours along ep have different experts, and each expert is sharded along `part`.

A *data rank* is all ranks with the same rows: they claim the same groups and make the same calls. Its *leader* is the
one whose values are summed or counted over rows: the one that has the loss, on the last stage, at cp 0 and tp 0.
Leaders in rank order are in the order of their data ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from asyncrl.config.rules import require
from asyncrl.config.sections.learner import ParallelConfig

PIPELINE: Final = "pp"
REPLICATE: Final = "replicate"
SHARD: Final = "shard"
CONTEXT: Final = "cp"
TENSOR: Final = "tp"
AXES: Final = (PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR)
PART: Final = "part"
EXPERT: Final = "ep"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a model that limit the axes; a dense model has 0 experts."""

    heads: int
    key_heads: int
    layers: int
    experts: int = 0

    @staticmethod
    def of(config: Any) -> ModelShape:
        """The shape in a transformers configuration."""
        text = config.get_text_config()
        key_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        experts = next((n for key in _EXPERTS if (n := getattr(text, key, None))), 0)
        return ModelShape(text.num_attention_heads, key_heads, text.num_hidden_layers, experts)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def axis_sizes(parallel: ParallelConfig, world: int, model: ModelShape | None = None) -> dict[str, int]:
    """The size of each axis for `world` processes. Raises ConfigError if the sizes do not divide the processes, or do
    not fit the model, if one is given."""
    require(
        world % parallel.processes == 0,
        "learner.parallel",
        " · ".join(
            f"{key} {getattr(parallel, key)}" for key in ("pipeline", "replicate", "context", "tensor")
        ),
        f"takes multiples of {parallel.processes} processes, and the learner has {world}",
        f"set learner.processes={parallel.processes} or a multiple, or smaller axes",
    )
    sizes = {
        PIPELINE: parallel.pipeline,
        REPLICATE: parallel.replicate,
        SHARD: world // parallel.processes,
        CONTEXT: parallel.context,
        TENSOR: parallel.tensor,
    }
    spread = sizes[SHARD] * sizes[CONTEXT]
    rule = f"must divide the {spread} processes of shard × context that hold one copy of a layer"
    remedy = f"set learner.parallel.expert to a divisor of {spread}, or add processes"
    require(spread % parallel.expert == 0, "learner.parallel.expert", parallel.expert, rule, remedy)
    if model is not None:
        _check_model(parallel, model)
    return sizes


def _check_model(parallel: ParallelConfig, model: ModelShape) -> None:
    """Rules between the axes and the model's shape."""
    check_stages(parallel, model.layers)
    for what, count in (("attention heads", model.heads), ("key heads", model.key_heads)):
        rule = f"must divide the {count} {what} of the model"
        remedy = f"set learner.parallel.tensor to a divisor of {math.gcd(model.heads, model.key_heads)}"
        require(count % parallel.tensor == 0, "learner.parallel.tensor", parallel.tensor, rule, remedy)
    check_context(parallel, model.heads // parallel.tensor)
    rule = f"must divide the {model.experts} experts of the model"
    remedy = f"set learner.parallel.expert to a divisor of {model.experts}"
    require(model.experts % parallel.expert == 0, "learner.parallel.expert", parallel.expert, rule, remedy)


def check_stages(parallel: ParallelConfig, layers: int) -> None:
    """Raises ConfigError unless each stage gets a layer."""
    rule = f"makes {parallel.stages} stages of the model's {layers} layers"
    remedy = "set learner.parallel.pipeline or learner.parallel.pipeline_stages_per_rank lower"
    require(parallel.stages <= layers, "learner.parallel.pipeline", parallel.pipeline, rule, remedy)


def check_context(parallel: ParallelConfig, heads: int) -> None:
    """Raises ConfigError unless the processes of a context can share out the attention heads that each has."""
    require(
        parallel.context_way != "ulysses" or heads % parallel.context == 0,
        "learner.parallel.context",
        parallel.context,
        f"must divide the {heads} attention heads that each process of learner.parallel.tensor has, for ulysses",
        f"set learner.parallel.context to a divisor of {heads}, or learner.parallel.context_way=all_gather",
    )


def layers_of(stage: int, stages: int, layers: int) -> range:
    """The layers of a stage: equally many on each, the remainder on the first ones, since the last one has the head.

    >>> [list(layers_of(stage, 3, 5)) for stage in range(3)]
    [[0, 1], [2, 3], [4]]
    """
    each, left = divmod(layers, stages)
    start = stage * each + min(stage, left)
    return range(start, start + each + (stage < left))


class Mesh:
    """This process's place on the axes, and the device meshes. All ranks make it at the same time.

    device_mesh  of parameters: `shard`, which includes cp, and all other axes with several ranks; None for one process
    """

    def __init__(
        self, sizes: Mapping[str, int], rank: int, device_type: str = "cpu", experts: int = 1
    ) -> None:
        """experts: the number of ranks that share the experts of a layer."""
        self._sizes, self._at = dict(sizes), coordinates(sizes, rank)
        self.device_mesh: DeviceMesh | None = None
        self._contexts: DeviceMesh | None = None
        self._experts: DeviceMesh | None = None
        outer, tensor = {axis: sizes[axis] for axis in (PIPELINE, REPLICATE)}, {TENSOR: sizes[TENSOR]}
        shards = sizes[SHARD] * sizes[CONTEXT]
        if math.prod(sizes.values()) > 1:
            self.device_mesh = _device_mesh(device_type, outer | {SHARD: shards} | tensor)
        if sizes[CONTEXT] > 1:
            self._contexts = _device_mesh(device_type, sizes)
        if experts > 1:
            again = {PART: shards // experts, EXPERT: experts}
            self._experts = _device_mesh(device_type, outer | again | tensor)

    def size(self, axis: str) -> int:
        return self._sizes[axis]

    def index(self, axis: str) -> int:
        """This rank's index along the axis."""
        return self._at[axis]

    def axis(self, axis: str) -> DeviceMesh | None:
        """The mesh of one axis; None if it has a single rank."""
        mesh = self._contexts if axis in (CONTEXT, SHARD) and self._contexts is not None else self.device_mesh
        return mesh[axis] if mesh is not None and self.size(axis) > 1 else None

    @property
    def fsdp(self) -> DeviceMesh | None:
        """The argument of `fully_shard`: (replicate, shard) or shard; None for one process."""
        return self._sharding(self.device_mesh, SHARD)

    @property
    def experts(self) -> DeviceMesh | None:
        """The ranks that share the experts of a layer: ep, or (ep, tp) where tp has several ranks; None if every rank
        holds all experts."""
        if self._experts is None:
            return None
        return self._experts[(EXPERT, TENSOR) if self.size(TENSOR) > 1 else EXPERT]

    @property
    def expert_fsdp(self) -> DeviceMesh | None:
        """The argument of `fully_shard` for spread experts."""
        return self._sharding(self._experts, PART)

    def _sharding(self, mesh: DeviceMesh | None, axis: str) -> DeviceMesh | None:
        if mesh is None:
            return None
        return mesh[(REPLICATE, axis) if self.size(REPLICATE) > 1 else axis]

    @property
    def data_rank(self) -> int:
        """The index among the data ranks."""
        return self.index(REPLICATE) * self.size(SHARD) + self.index(SHARD)

    @property
    def data_leaders(self) -> list[int]:
        """The leader of each data rank, in order."""
        ranks = range(math.prod(self._sizes.values()))
        return [rank for rank in ranks if is_data_leader(self._sizes, coordinates(self._sizes, rank))]


def _device_mesh(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """The mesh of the axes that have more than one rank or shard parameters."""
    axes = tuple(axis for axis, size in sizes.items() if size > 1 or axis in (SHARD, PART))
    return init_device_mesh(device_type, tuple(sizes[axis] for axis in axes), mesh_dim_names=axes)


def coordinates(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """The index of `rank` on each axis: the last one changes fastest.

    >>> coordinates({"pp": 1, "replicate": 1, "shard": 2, "cp": 1, "tp": 2}, 3)
    {'pp': 0, 'replicate': 0, 'shard': 1, 'cp': 0, 'tp': 1}
    """
    at = {}
    for axis in reversed(AXES):
        rank, at[axis] = divmod(rank, sizes[axis])
    return {axis: at[axis] for axis in AXES}


def is_data_leader(sizes: Mapping[str, int], at: Mapping[str, int]) -> bool:
    """Whether the rank at these coordinates leads its data rank."""
    return at[PIPELINE] == sizes[PIPELINE] - 1 and at[CONTEXT] == 0 and at[TENSOR] == 0


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, differentiable; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
