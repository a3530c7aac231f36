"""Tensor parallelism of a Hugging Face decoder: the ranks of the tp axis share each matrix.

                N/tp tokens          N tokens, some of the heads or columns           N/tp tokens
    stream ──▸ norm ──▸ all-gather ──▸ q k v │ attention │ o      ──▸ reduce-scatter ──▸ + stream
           ──▸ norm ──▸ all-gather ──▸ gate up │ activation │ down ──▸ reduce-scatter ──▸ + stream

The diagram shows sequence parallelism. Without it (`learner.parallel.sequence: false`) every rank has all tokens of the
stream, and the two collectives are a copy and an all-reduce. The model's own `base_model_tp_plan` determines which
matrices are cut by columns and which by rows. Embedding and head are cut by the vocabulary; after the last layer hidden
states are whole again. Experts stay whole: with sequence parallelism each rank computes them for its own tokens.

Parameters are DTensors, for FSDP, checkpoints and layouts; modules compute with their local parts. Parameters that are
whole on each rank but meet only some tokens or heads (norms, biases after a sum, Qwen3's q_norm) sum their gradient
over the ranks. The factor of an adapter that meets the cut axis is cut with it, B by columns and A by rows; the other
one is whole.

Axes:  1 batch · N tokens · D hidden size
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from asyncrl.errors import ConfigError
from asyncrl.learner.parallel.collectives import TensorParallelCollectives, copied
from asyncrl.learner.parallel.mesh import local_part
from asyncrl.models.adapters import Adapted

COLUMNS: Final = "colwise"
ROWS: Final = "rowwise"
BY_HEADS: Final = "replicated_with_grad_allreduce"
"""Styles of transformers' plans: cut by output, cut by input, whole with other heads on each rank."""

LAYERS: Final = "layers.*."
BODY: Final = {"embed_tokens", "layers", "norm", "rotary_emb"}
"""The parts of a decoder that can be parallelized."""


def parallelize(
    network: nn.Module, body: PreTrainedModel, head: Tensor | None, mesh: DeviceMesh, sequence: bool
) -> None:
    """Cut the matrices of a network over a one-dimensional mesh. This comes before FSDP.

    Args:
        body: the decoder in `network`.
        head: the parameter with a row for each token of the vocabulary, if there is one on this rank.
        sequence: whether tokens of the stream are split too; their number must then be a multiple of the ranks.

    Raises:
        ConfigError: The model has no plan, or one with more than columns and rows.
    """
    plan = plan_of(body)
    collectives = TensorParallelCollectives(mesh.get_group(), sequence)
    spread = _Spread(mesh, collectives)
    if head is not None:
        spread.placed[head] = Shard(0)
    if isinstance(body.embed_tokens, nn.Embedding):  # else: on another pipeline stage
        spread.embedding(body.embed_tokens)
    for layer in cast(nn.ModuleList, body.layers):
        if layer._parameters:
            raise _refusal(body, f"parameters of its own in a {type(layer).__name__}")
        for name, child in layer.named_children():
            if _token_by_token(child):
                spread.whole(child, partial=sequence)
            else:
                spread.block(child, _styles(body, plan, name, child))
    norm = cast(nn.Module, body.norm)
    spread.whole(norm, partial=sequence)
    if any(True for _ in norm.parameters()):  # else: on another stage, which gets this rank's tokens only
        norm.register_forward_hook(lambda *call: collectives.replicate(call[-1]))
    spread.whole(network, partial=False)  # modules not handled yet: a value head
    spread.finish(network)


def plan_of(body: PreTrainedModel) -> dict[str, str]:
    """{module within a decoder layer: style} from the model's configuration, without experts."""
    given = getattr(body.config, "base_model_tp_plan", None) or {}
    plan = {
        name.removeprefix(LAYERS): style
        for name, style in given.items()
        if name.startswith(LAYERS) and "experts" not in name
    }
    unknown = {name for name, _ in body.named_children()} - BODY
    odd = set(plan.values()) - {COLUMNS, ROWS, BY_HEADS}
    why = next((f"part {name!r}" for name in sorted(unknown)), None)
    why = why or next((f"style {style!r} in its plan" for style in sorted(odd)), None)
    if "self_attn.o_proj" not in plan:
        why = "no plan for its attention"
    if why is not None:
        raise _refusal(body, why)
    return plan


def _token_by_token(child: nn.Module) -> bool:
    """Whether it is a norm or a module of experts, which are whole on all ranks."""
    norm = type(child).__name__.endswith("Norm")
    return norm or any("experts" in where for where, _ in child.named_modules())


def _styles(
    body: PreTrainedModel, plan: dict[str, str], name: str, child: nn.Module
) -> dict[nn.Module, str | None]:
    """The style of each module inside a part of a decoder layer. Raises ConfigError for one with parameters and no
    style."""
    inside = {where: inner for where, inner in child.named_modules() if where}
    styles = {inner: plan.get(f"{name}.{where}".removesuffix(".base")) for where, inner in inside.items()}
    odd = next(
        (inner for inner, style in {child: None, **styles}.items() if style is None and inner._parameters),
        None,
    )
    if odd is not None:
        raise _refusal(body, f"no style for a {type(odd).__name__} in a {type(child).__name__}")
    return styles


def _refusal(body: PreTrainedModel, why: str) -> ConfigError:
    return ConfigError(
        "learner.parallel.tensor",
        body.config.name_or_path,
        f"is a {type(body).__name__}, which cannot be cut: {why}",
        "set learner.parallel.tensor=1, or use a model like Qwen2, Qwen3, Llama, Gemma, Mistral or Mixtral",
    )


class _Spread:
    """Adds hooks to modules one by one; `finish` turns all parameters into DTensors."""

    def __init__(self, mesh: DeviceMesh, collectives: TensorParallelCollectives) -> None:
        self._mesh, self._collectives = mesh, collectives
        self.placed: dict[Tensor, Shard] = {}
        self._seen: set[nn.Module] = set()

    def embedding(self, module: nn.Embedding) -> None:
        """Each rank looks up the tokens of its own rows; other tokens get 0, and ranks add up."""
        self.placed[module.weight] = Shard(0)
        part = vocabulary_part(module.weight.shape[0], self._mesh)
        padding = module.padding_idx
        module.padding_idx = padding - part.start if padding is not None and padding in part else None
        self._local(module, ())
        look_up, collectives = module.forward, self._collectives

        def forward(ids_1N: Tensor) -> Tensor:
            mine_1N = (ids_1N >= part.start) & (ids_1N < part.stop)
            found_1ND = look_up(torch.where(mine_1N, ids_1N - part.start, 0))
            return collectives.leave(found_1ND.masked_fill(~mine_1N[..., None], 0.0))

        module.forward = forward  # type: ignore[method-assign,assignment]

    def block(self, child: nn.Module, styles: dict[nn.Module, str | None]) -> None:
        """Attention or a dense MLP: cut by columns first, then by rows."""
        child.register_forward_pre_hook(self._entering, with_kwargs=True)
        for module, style in styles.items():
            if style == COLUMNS and isinstance(module, Adapted):
                self.placed[module.up] = Shard(0)
                self._local(module, ("down",))
            elif style == COLUMNS:
                self.placed |= dict.fromkeys(module.parameters(), Shard(0))
                self._local(module, ())
            elif style == ROWS:
                (self._adapted_rows if isinstance(module, Adapted) else self._rows)(module)
            else:
                self._local(module, module._parameters if style == BY_HEADS else ())

    def whole(self, module: nn.Module, partial: bool) -> None:
        """A module whose parameters are whole on every rank. partial: ranks compute it for different tokens."""
        for inner in module.modules():
            if inner not in self._seen:
                self._local(inner, inner._parameters if partial else ())

    def finish(self, network: nn.Module) -> None:
        """Replace parameters by DTensors on the mesh, tied ones once. All ranks have the same values, so none are
        sent."""
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module in network.modules():
            for name, plain in module._parameters.items():
                if plain is None or isinstance(plain, DTensor):  # experts that are spread already
                    continue
                if plain not in made:
                    placement = self.placed.get(plain, Replicate())
                    spread = distribute_tensor(plain.detach(), self._mesh, [placement], src_data_rank=None)
                    made[plain] = nn.Parameter(spread, requires_grad=plain.requires_grad)
                module._parameters[name] = made[plain]

    def _entering(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if args:
            return (self._collectives.enter(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self._collectives.enter(kwargs["hidden_states"])}

    def _adapted_rows(self, module: Any) -> None:
        """The adapter of a map that is cut by rows: A is too, and what it makes is added up before B."""
        self._seen.add(module)
        self.placed[module.down] = Shard(1)
        collectives = self._collectives

        def forward(input: Tensor) -> Tensor:
            base = module.base(input)
            if not module.on:
                return cast(Tensor, base)
            low = collectives.leave(F.linear(input, local_part(module.down)))
            up = local_part(module.up)
            up = copied(up, collectives.group) if collectives.sequence else up
            return base + F.linear(low, up) * module.scale

        module.forward = forward

    def _rows(self, module: Any) -> None:
        """Cut a linear map by rows of its input. The bias is added once, to the sum."""
        self._seen.add(module)
        self.placed[module.weight] = Shard(1)
        collectives = self._collectives

        def forward(input: Tensor) -> Tensor:
            out = collectives.leave(F.linear(input, local_part(module.weight)))
            if module.bias is None:
                return out
            bias = local_part(module.bias)
            return out + (copied(bias, collectives.group) if collectives.sequence else bias)

        module.forward = forward

    def _local(self, module: nn.Module, partial: Collection[str]) -> None:
        """Make `module` compute with the local parts of its own parameters. partial: the names of those whose gradient
        is to be summed over ranks."""
        self._seen.add(module)
        if not module._parameters:
            return
        plain, group = module.forward, self._collectives.group

        def forward(*args: Any, **kwargs: Any) -> Any:
            held = dict(module._parameters)
            for name, parameter in held.items():
                if parameter is not None:
                    part = local_part(parameter)
                    part = copied(part, group) if name in partial else part
                    module._parameters[name] = cast(nn.Parameter, part)
            try:
                return plain(*args, **kwargs)
            finally:
                module._parameters.update(held)

        module.forward = forward


def vocabulary_part(rows: int, mesh: DeviceMesh) -> range:
    """The rows of embedding and head on this rank of the one-dimensional mesh, as `Shard(0)` cuts them."""
    most = -(-rows // mesh.size())
    first = min(rows, most * mesh.get_local_rank())
    return range(first, min(rows, first + most))
