"""The changes between two versions on an accelerator: they are found there, and reach the host in one copy.

    tiles of old, new ─▸ how many elements changed ─── wait ──▸ room for them
                      └▸ positions and steps ─▸ one buffer ─ wait ─▸ Changes on the CPU

Another thread may overwrite a version meanwhile. Then the changes are wrong, and the caller must discard them; their
positions lie inside the tile all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from asyncrl.device import accelerator
from asyncrl.sync.delta.delta import Changes, bits, find_changes
from asyncrl.sync.plan.plan import aligned
from asyncrl.sync.tensors.shards import flat_bytes

Pair = tuple[torch.Tensor, torch.Tensor]
"""A tile of the old version, and that of the new one: same shape, dtype and device."""


def all_changes(pairs: Sequence[Pair]) -> list[Changes]:
    """The changes of each pair, on the CPU. For pairs on an accelerator this thread waits twice in all."""
    if not pairs or not accelerator.is_accelerator(pairs[0][0].device):
        return [find_changes(old, new) for old, new in pairs]
    flat = [(bits(old).reshape(-1), bits(new).reshape(-1)) for old, new in pairs]
    counts = torch.stack([(before != after).sum() for before, after in flat]).tolist()
    found = [part for pair, count in zip(flat, counts, strict=True) for part in _parts(*pair, count)]
    here = iter(_on_host(found))
    changes = []
    for (before, _), count in zip(flat, counts, strict=True):
        positions = None if _dense(before, count) else next(here).to(torch.int64)
        changes.append(Changes(positions, next(here)))
    return changes


def _dense(before: torch.Tensor, count: int) -> bool:
    """Whether positions would cost more than they save."""
    return 2 * count >= before.numel()


def _parts(before: torch.Tensor, after: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Positions as int32, where they are not all, and steps."""
    if _dense(before, count):
        return [after - before]
    at = (before != after).nonzero_static(size=count, fill_value=0).view(-1)
    return [at.to(torch.int32), after.index_select(0, at) - before.index_select(0, at)]


def _on_host(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of vectors on one device."""
    starts = [0, *accumulate(aligned(part.nbytes) for part in parts)]
    buffer = torch.empty(starts[-1], dtype=torch.uint8, device=parts[0].device)
    for start, part in zip(starts, parts, strict=False):
        buffer[start : start + part.nbytes].copy_(flat_bytes(part))
    host = buffer.cpu()
    return [
        host[start : start + part.nbytes].view(part.dtype) for start, part in zip(starts, parts, strict=False)
    ]
