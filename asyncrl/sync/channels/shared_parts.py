"""Tensors in a shared segment as numbers: where each begins, and its strides. The other process knows their shapes and
dtypes, maps the segment, and reads them where they lie.

    described(parts)  [byte of the first part in the segment, its strides in elements, byte of the second, …]
    views(…)          the same tensors over the other process's mapping
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.sync.channels.shared_memory import SharedSegment, located


def described(parts: Sequence[torch.Tensor]) -> tuple[SharedSegment, list[int]] | None:
    """(the segment that all of them lie in, the numbers); None if one does not."""
    found = located(parts[0][(0,) * parts[0].dim()])
    if found is None:
        return None
    segment, numbers = found[0], []
    for part in parts:
        offset = part.data_ptr() - segment.start
        if not 0 <= offset <= segment.size - _span(part.shape, part.stride()) * part.element_size():
            return None
        numbers += [offset, *part.stride()]
    return segment, numbers


def views(memory: torch.Tensor, like: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[torch.Tensor]:
    """Over `memory` [bytes] uint8, of the shapes and dtypes of `like`.

    Raises WeightSyncError for numbers that are not of as many tensors, or lead out of the memory.
    """
    if len(numbers) != sum(1 + tensor.dim() for tensor in like):
        raise WeightSyncError(f"{len(numbers)} numbers came for the places of {len(like)} tensors")
    elements = {dtype: _elements(memory, dtype) for dtype in {tensor.dtype for tensor in like}}
    found, at = [], 0
    for tensor in like:
        offset, *strides = numbers[at : at + 1 + tensor.dim()]
        at += 1 + tensor.dim()
        item, span = tensor.element_size(), _span(tensor.shape, strides)
        if min(offset, *strides, 0) < 0 or offset % item or offset + span * item > len(memory):
            raise WeightSyncError(
                f"a tensor at byte {offset} with strides {strides} of a segment of {len(memory)}"
            )
        found.append(elements[tensor.dtype].as_strided(tensor.shape, strides, offset // item))
    return found


def _elements(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
