"""Projections in 8 bits, each row of a matrix with a scale of its own.

    learner  w [N, K] ── snapshot ──▸ q [N, K], s [N, 1] ──▸ buckets, deltas, relays, stores ──▸ generator

    s_n = max_k |w_nk| / G      q_nk = w_nk / s_n, rounded to nearest      w ≈ s · q      G: 127 of int8, 448 of fp8

The learner quantizes as it takes a snapshot, so that all behind it moves, compares and hashes tensors as before, with a
quarter of the bytes of float32. Ranks that hold parts of one row agree on its maximum, so that q and s do not depend on
how the learner is cut.

Sources: symmetric int8 by rows of the output, arXiv 2004.09602, 3.1 and 3.3; fp8 (E4M3), arXiv 2209.05433.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncrl.device import accelerator
from asyncrl.sync.layout.layout import Box
from asyncrl.sync.layout.quantized import (
    DTYPES,
    SCALE,
    check_projections,
    is_quantized,
    quantized_layout,
    scale_box,
)
from asyncrl.sync.tensors.shards import Shards

CHUNK, GPU_CHUNK = 1 << 19, 1 << 26
"""Elements that are computed at once, on a CPU and on an accelerator."""

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""G: the largest element of a row, as it is quantized."""


class Collectives(Protocol):
    """Those of the ranks of a learner: `learner.ranks.process_group`."""

    def exchange(self, value: Any) -> list[Any]: ...

    def all_max(self, tensor: Tensor) -> None: ...


class QuantizedShards:
    """The live shards of one rank as generators take them: a snapshot copies the quantized ones.

    Every rank makes one, and copies at the same versions, as ranks that hold parts of a row exchange maxima. Raises
    ConfigError for a model without such projections.
    """

    def __init__(self, live: Shards, quantization: str, ranks: Collectives) -> None:
        self._live, self._ranks = live, ranks
        self.layout = quantized_layout(live.layout, quantization)
        self._names = [name for name in live.tensors if is_quantized(name, live.layout[name].shape)]
        self._plain = [name for name in live.tensors if name not in {*self._names}]
        mine = {name: live.layout[name].shape[0] for name in self._names}
        cut = any(
            box.shape[1] < live.layout[name].shape[1] for name in mine for box in live.layout[name].boxes
        )
        every = ranks.exchange([mine, cut])
        self._cut = any(is_cut for _, is_cut in every)
        everywhere = {name: rows for there, _ in every for name, rows in there.items()}
        check_projections(everywhere, quantization)
        self._rows = everywhere if self._cut else mine

    @property
    def device(self) -> torch.device:
        return self._live.device

    @torch.no_grad()
    def copy_to(self, copy: Shards) -> None:
        """Quantize into `copy`, which has this layout, on this thread's stream."""
        live = self._live
        targets = [part for name in self._plain for part in copy.tensors[name]]
        sources = [part for name in self._plain for part in live.tensors[name]]
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        maxima = self._row_maxima()
        for name, box, part in self._parts():
            q = copy.view(name, box)
            scale = scales(_rows(maxima[name], box), q.dtype)
            quantize(part, scale, q)
            copy.view(name + SCALE, scale_box(box)).copy_(scale, non_blocking=True)

    def _row_maxima(self) -> dict[str, Tensor]:
        """By parameter, max |w| of its rows that a rank holds a part of, [N, 1] float32."""
        flat = torch.zeros(sum(self._rows.values()), 1, device=self.device)
        names = sorted(self._rows)
        maxima = dict(zip(names, flat.split([self._rows[name] for name in names]), strict=True))
        for name, box, part in self._parts():
            rows = _rows(maxima[name], box)
            torch.maximum(rows, row_maxima(part), out=rows)
        if self._cut:
            # Of a number and NaN, gloo takes either as the largest.
            self._ranks.all_max(flat.nan_to_num_(nan=torch.inf, posinf=torch.inf))
        return maxima

    def _parts(self) -> list[tuple[str, Box, Tensor]]:
        layout, tensors = self._live.layout, self._live.tensors
        return [
            (name, box, part)
            for name in self._names
            for box, part in zip(layout[name].boxes, tensors[name], strict=True)
        ]


def _rows(of_all_N1: Tensor, box: Box) -> Tensor:
    return of_all_N1[box.offsets[0] : box.offsets[0] + box.shape[0]]


def row_maxima(w_NK: Tensor) -> Tensor:
    """max |w| of each row, [N, 1] float32."""
    found = torch.empty(len(w_NK), 1, device=w_NK.device)
    for rows, chunk in _in_chunks(w_NK):
        torch.amax(chunk.copy_(w_NK[rows]).abs_(), 1, keepdim=True, out=found[rows])
    return found


def scales(maxima_N1: Tensor, dtype: torch.dtype) -> Tensor:
    """s of rows by their largest magnitudes, float32. A row of zeros has the smallest of normal numbers."""
    return (maxima_N1 / LARGEST[dtype]).clamp_(min=torch.finfo(torch.float32).tiny)


def quantize(w_NK: Tensor, s_N1: Tensor, into_NK: Tensor) -> None:
    """Write q of a matrix whose rows have these scales, in the dtype of `into_NK`."""
    most = LARGEST[into_NK.dtype]
    for rows, chunk in _in_chunks(w_NK):
        torch.div(w_NK[rows], s_N1[rows], out=chunk)
        if into_NK.dtype == torch.int8:
            chunk.round_()
        into_NK[rows].copy_(chunk.clamp_(-most, most), non_blocking=True)


def write_out(q_NK: Tensor, s_N1: Tensor, into_NK: Tensor) -> None:
    """Write s · q, rounded to the dtype of `into_NK`."""
    for rows, chunk in _in_chunks(q_NK):
        into_NK[rows].copy_(chunk.copy_(q_NK[rows]).mul_(s_N1[rows]))


def _in_chunks(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some rows of a matrix after others, with float32 memory of their shape: fresh memory for all of a matrix takes a
    CPU longer than the arithmetic."""
    rows, columns = matrix.shape
    step = max(1, (GPU_CHUNK if accelerator.is_accelerator(matrix.device) else CHUNK) // max(1, columns))
    memory = torch.empty(min(step, rows), columns, device=matrix.device)
    for first in range(0, rows, step):
        yield slice(first, first + step), memory[: min(step, rows - first)]


def dequantize(staged: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    """Write each parameter that has scales in `staged` over the tensor of its name."""
    for name, scale in staged.items():
        if name.endswith(SCALE):
            weight = name.removesuffix(SCALE)
            write_out(staged[weight], scale, into[weight])


def round_trip(weights: Mapping[str, Tensor], quantization: str | None) -> Mapping[str, Tensor]:
    """Whole parameters as an engine multiplies with them under generator.quantization, in their own dtype."""
    if quantization is None:
        return weights
    found, dtype = dict(weights), getattr(torch, DTYPES[quantization])
    for name, weight in weights.items():
        if is_quantized(name, tuple(weight.shape)):
            scale = scales(row_maxima(weight), dtype)
            quantize(weight, scale, into := torch.empty_like(weight, dtype=dtype))
            found[name] = torch.empty_like(weight)
            write_out(into, scale, found[name])
    return found
