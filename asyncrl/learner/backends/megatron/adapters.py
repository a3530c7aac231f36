"""LoRA adapters beside Megatron's linear maps, which hold several matrices of the checkpoint at once, cut over tp.

    linear_qkv, linear_fc1    x ─▸ A of q, k, v ─▸ h [N, r each] ─▸ B, this rank's rows of q, k, v ─▸ + outputs
    linear_proj, linear_fc2   x, this rank's columns ─▸ A ─▸ summed over tp ─▸ h [N, r] ─▸ B ─▸ + outputs
    maps to latents           x ─▸ A ─▸ h ─▸ B ─▸ + outputs, of the tokens of this rank

Under sequence parallelism h travels between the ranks in place of x or of the outputs. A hook adds the sums, so the
frozen parameters keep their names. Each adapter has the name and the coordinates of the other backend's.

Axes:  N tokens · I inputs · O outputs, all as this rank has them · r rank · k adapters of one linear map
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel as tp
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn

from asyncrl.config.rules import require
from asyncrl.config.sections.models import LoraConfig, ModelConfig
from asyncrl.learner.backends.megatron.layers import WholeLinear
from asyncrl.models.adapters import DOWN, UP, adapt, read_adapters
from asyncrl.models.loading import empty_causal_lm
from asyncrl.sync.layout.layout import Box
from asyncrl.sync.layout.megatron import Gpt, MegatronPart, MegatronPlace

TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
)
CHILD = ".adapters."
"""Between the name of a linear map and that of its adapter's target."""

PartsOf = Callable[[str], Sequence[MegatronPart]]
"""The name of a local parameter → the checkpoint boxes that it consists of."""


class RowRange(NamedTuple):
    """Outputs [start, stop) of a target's, on this rank. name: of the checkpoint's matrix, without `.weight`"""

    name: str
    start: int
    stop: int

    @property
    def target(self) -> str:
        return self.name.rpartition(".")[2]


class Factors(nn.Module):
    """A and B of one matrix, as this rank has them."""

    def __init__(self, rank: int, weight_OI: Tensor, outputs: int) -> None:
        super().__init__()
        self.down = nn.Parameter(weight_OI.new_empty(rank, weight_OI.shape[1]))
        self.up = nn.Parameter(weight_OI.new_empty(outputs, rank))


class LinearAdapters(nn.ModuleDict):
    """The adapters of one linear map, by target. `on` false: it computes as if there were none."""

    def __init__(self, linear: nn.Module, rows: Sequence[RowRange], lora: LoraConfig, sequence: bool) -> None:
        """rows: all outputs of the map in order, also those without an adapter. sequence: whether the ranks of tp share
        out tokens between the maps"""
        lengths: dict[str, int] = {}
        for each in rows:
            lengths[each.target] = max(each.stop, lengths.get(each.target, 0))
        found = {target: length for target, length in lengths.items() if target in lora.targets}
        super().__init__({key: Factors(lora.rank, linear.weight, n) for key, n in found.items()})  # type: ignore[arg-type]
        self.on, self._scale, self._rows = True, lora.alpha / lora.rank, rows
        self._sequence, self._cuts_inputs = sequence, isinstance(linear, RowParallelLinear)
        self._cuts_nothing = isinstance(linear, WholeLinear)
        for factors in self._factors():
            cut, axis = (factors.down, 1) if self._cuts_inputs else (factors.up, 0)
            whole = [factors.up if self._cuts_inputs else factors.down]
            if self._cuts_nothing:
                whole.append(cut)
            else:
                set_tensor_model_parallel_attributes(cut, True, axis, 1)
            for each in whole:
                # Then a rank's gradient is that of some tokens, and Megatron adds those of all.
                cast(Any, each).sequence_parallel = sequence

    def forward(self, x_N1I: Tensor) -> Tensor:
        """alpha/r · B A x, to be added to the outputs."""
        down_krI = torch.cat([factors.down for factors in self._factors()])
        h_N1kr = self._carried(F.linear(x_N1I, down_krI))
        parts = h_N1kr.split(h_N1kr.shape[-1] // len(self), -1)
        added = {
            target: F.linear(h_N1r, factors.up)
            for target, factors, h_N1r in zip(self, self._factors(), parts, strict=True)
        }
        empty = h_N1kr.new_zeros(1).expand(*h_N1kr.shape[:-1], max(r.stop for r in self._rows))
        return self._scale * torch.cat(
            [added.get(r.target, empty)[..., r.start : r.stop] for r in self._rows], -1
        )

    @torch.no_grad()
    def merged(self, weight_OI: Tensor) -> Tensor:
        """W + alpha/r · B A, summed in float32."""
        merged_OI, start = weight_OI.to(torch.float32, copy=True), 0
        for target, first, last in ((r.target, r.start, r.stop) for r in self._rows):
            here = slice(start, start + last - first)
            if target in self:
                factors: Any = self[target]
                merged_OI[here] += self._scale * factors.up[first:last].float() @ factors.down.float()
            start = here.stop
        return merged_OI.to(weight_OI.dtype)

    def _factors(self) -> list[Any]:
        return list(self.values())

    def _carried(self, h_N1r: Tensor) -> Tensor:
        """A x of all tokens and inputs that the map gets; in the backward pass, the sum over the ranks that use it."""
        if self._cuts_nothing:
            return h_N1r
        if self._cuts_inputs:
            if self._sequence:
                return tp.reduce_scatter_to_sequence_parallel_region(h_N1r)
            return tp.reduce_from_tensor_model_parallel_region(h_N1r)
        if self._sequence:
            return tp.gather_from_sequence_parallel_region(h_N1r)
        return tp.copy_to_tensor_model_parallel_region(h_N1r)


def add_adapters(chunk: nn.Module, lora: LoraConfig, parts_of: PartsOf, sequence: bool) -> None:
    """Freeze a model chunk and put adapters, still empty, beside its maps."""
    chunk.requires_grad_(False)
    for name, linear in [*chunk.named_modules()]:
        is_map = isinstance(linear, ColumnParallelLinear | RowParallelLinear | WholeLinear)
        if not is_map or not name.startswith("decoder.layers."):
            continue
        rows = _rows(parts_of(f"{name}.weight"))
        if any(each.target in lora.targets for each in rows):
            linear.adapters = LinearAdapters(linear, rows, lora, sequence)
            linear.register_forward_hook(_added)


def _rows(parts: Sequence[MegatronPart]) -> list[RowRange]:
    rows, lengths = [], dict[str, int]()
    for part in parts:
        name, start = part.name.removesuffix(".weight"), lengths.get(part.name, 0)
        lengths[part.name] = start + part.box.shape[0]
        rows.append(RowRange(name, start, lengths[part.name]))
    return rows


def _added(linear: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor | None]) -> Any:
    """A forward hook."""
    if not linear.adapters.on:
        return outputs
    return outputs[0] + linear.adapters(inputs[0]), outputs[1]


def adapter_parts(name: str, shape: Sequence[int], parts_of: PartsOf) -> list[MegatronPart]:
    """The boxes of an adapter's parameter of this local shape, in the other backend's names. parts_of: of frozen
    parameters"""
    linear, _, own = name.partition(CHILD)
    target, _, kind = own.rpartition(".")
    beside = [p for p in parts_of(f"{linear}.weight") if p.name.endswith(f".{target}.weight")]
    first = beside[0]
    named = first.name.removesuffix(".weight") + f".{kind}"
    if f".{kind}" == DOWN:
        return [MegatronPart(named, (shape[0], first.shape[1]), Box((0, first.box.offsets[1]), tuple(shape)))]
    return [
        MegatronPart(
            named, (first.shape[0], shape[1]), Box((p.box.offsets[0], 0), (p.box.shape[0], shape[1]))
        )
        for p in beside
    ]


def merged_weights(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, the weight with its adapters) of each adapted map."""
    for name, module in chunk.named_modules():
        if isinstance(module, LinearAdapters):
            linear = name.removesuffix(CHILD.rstrip("."))
            yield f"{linear}.weight", module.merged(chunk.get_parameter(f"{linear}.weight"))


def adapters_at_start(model: ModelConfig, seed: int, gpt: Gpt, place: MegatronPlace) -> Mapping[str, Tensor]:
    """All adapters of the model, whole, as the other backend begins with. Raises ConfigError for targets that this
    backend does not adapt, or that leave a pipeline stage without any, and as `adapt` and `read_adapters`."""
    lora = model.lora
    other = sorted(set(lora.targets) - {*TARGETS})
    rule, remedy = f"learner.backend=megatron adapts {', '.join(TARGETS)} alone", "leave the others out"
    require(not other, "model.lora.targets", other, rule, remedy)
    causal_lm = empty_causal_lm(model)
    adapt(causal_lm, lora, seed)
    if lora.path is not None:
        read_adapters(causal_lm, lora)
    found = {name: p.detach() for name, p in causal_lm.named_parameters() if name.endswith((DOWN, UP))}
    for stage in range(place.pp[1]):
        for chunk in range(place.vpp[1]):
            layers = replace(place, pp=(stage, place.pp[1]), vpp=(chunk, place.vpp[1])).layers(gpt)
            adapted = any(name.startswith(f"model.layers.{layer}.") for name in found for layer in layers)
            rule = (
                f"leaves layers {layers.start} to {layers.stop - 1} without an adapter, which one stage has"
            )
            require(adapted, "model.lora.targets", lora.targets, rule, "add o_proj")
    return found
