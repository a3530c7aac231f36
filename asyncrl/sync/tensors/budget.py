"""The memory of a rank, by parts: the arithmetic of `asyncrl sync plan`, and of the share that vLLM may take.

    learner rank     weights ▸ training state ▸ snapshots ▸ buckets ▸ checksum
    generator rank   weights ▸ staging ▸ buckets ▸ checksum ▸ KV cache

Activations, and the memory that drivers and libraries take for themselves, are in none of these parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from asyncrl.config.schema import SyncConfig
from asyncrl.sync.layout.layout import ITEM_BYTES, Layout
from asyncrl.sync.layout.quantized import SCALE
from asyncrl.sync.plan.plan import aligned
from asyncrl.sync.tensors.checksum import DEVICE_BYTES, DEVICE_ROWS, KEY_BYTES, LANES

LEAST_BUCKET = 1 << 20
"""Smallest bucket in bytes. A generator divides its bucket memory by the number of learner ranks, but not below
this."""

SPARE_BYTES = 1 << 30
"""What must stay free on a device beside staging, for it to lie there."""

KV_SHARE = 0.25
"""Share of what vLLM may take that must be left for its KV cache, for staging to lie on the device."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """frees: the key that makes this part smaller, with a value and its price; "" if there is none."""

    name: str
    bytes: int
    frees: str = ""


def copy_bytes(layout: Layout) -> int:
    """Bytes of a `TensorBuffer`: a snapshot, or staging."""
    return sum(
        aligned(box.elements * ITEM_BYTES[param.dtype]) for param in layout.values() for box in param.boxes
    )


def stream_bucket(sync: SyncConfig, learner_ranks: int) -> int:
    """Bytes of a bucket from one of so many learner ranks.

    >>> stream_bucket(SyncConfig(bucket_mb=64), 4) >> 20, stream_bucket(SyncConfig(bucket_mb=64), 512) >> 20
    (16, 1)
    """
    return min(sync.bucket_bytes, max(LEAST_BUCKET, sync.bucket_bytes // learner_ranks))


def checksum_bytes(layout: Layout) -> int:
    """Temporary memory of a hash by rows on a device: its keys, a chunk and a copy of it with zeros, sums of its rows,
    and keys of 64 bits that are being made for the rows of one parameter."""
    rows = max((math.prod(param.shape[:-1]) for param in layout.values()), default=0)
    return KEY_BYTES + 2 * DEVICE_BYTES + 16 * LANES * DEVICE_ROWS + 3 * 8 * rows


def chunks_bytes(layout: Layout, sync: SyncConfig, chunks: int) -> int:
    """The size of `chunks` of sync.backend=vllm, each less than a bucket and a whole parameter; 0 with the others."""
    largest = max((math.prod(p.shape) * ITEM_BYTES[p.dtype] for p in layout.values()), default=0)
    return chunks * (sync.bucket_bytes + largest) if sync.backend == "vllm" else 0


def learner_parts(
    layout: Layout, sent: Layout, trained: bool, sync: SyncConfig, ranks: int, streams: int
) -> list[MemoryPart]:
    """The memory that one rank of the learner needs.

    Args:
        layout: the policy
        sent: what it publishes: the policy, quantized maybe, or adapters alone
        trained: whether all that it publishes has optimizer state, unlike merged adapters
        ranks: of the learner
        streams: generator ranks that it sends to at once
    """
    weights = sum(param.bytes for param in layout.values())
    learnt = [layout.get(name, param) for name, param in sent.items() if not name.endswith(SCALE)]
    state = sum(param.elements * (16 if ITEM_BYTES[param.dtype] < 4 else 12) for param in learnt if trained)
    one = copy_bytes(sent) if sync.snapshot_device == "device" else 0
    frees = "sync.bucket_mb, sync.fanout=1"
    if sync.backend == "vllm":
        streams, frees = 1, "sync.bucket_mb"  # to the whole copy of rank 0
    # Rank 0 joins the parameters of a chunk, beside which it lies for a moment.
    buckets = 2 * streams * stream_bucket(sync, ranks) + chunks_bytes(sent, sync, 2)
    return [
        MemoryPart("weights", weights, "learner.processes: more of them shard it" if trained else ""),
        MemoryPart("masters, gradients, Adam", state, "learner.offload=optimizer: 8 bytes a parameter"),
        MemoryPart(
            f"{sync.snapshots} snapshot{'s' if sync.snapshots > 1 else ''}",
            sync.snapshots * one,
            "sync.snapshot_device=host: all of it, for a longer pause" if one else "",
        ),
        MemoryPart("buckets", buckets, frees),
        _checksum_part(sent, sync),
    ]


def generator_parts(
    layout: Layout, sent: Layout, item_bytes: int, sync: SyncConfig, learner_ranks: int, on_device: bool
) -> list[MemoryPart]:
    """The memory that one rank of a generator needs, before its KV cache.

    Args:
        layout: its part of the model
        sent: what it takes: that, or adapters alone
        item_bytes: of a parameter there, unless it is quantized
        learner_ranks: that send to it
        on_device: whether staging lies there too
    """
    stages = on_device and sync.backend != "vllm"
    # vLLM has two chunks, and keeps what belongs to a layer that is not complete.
    chunks = chunks_bytes(sent, sync, 3)
    buckets = 2 * learner_ranks * stream_bucket(sync, learner_ranks) if stages else chunks
    staging = copy_bytes(sent) if stages else 0
    quantized = sum(param.bytes for param in layout.values() if ITEM_BYTES[param.dtype] == 1)
    others = sum(param.elements for param in layout.values() if ITEM_BYTES[param.dtype] > 1)
    weights = quantized + others * item_bytes
    return [
        MemoryPart("weights", weights, "tensor parallelism"),
        MemoryPart("staging", staging, "sync.staging=host: all of it, for a longer flip" if staging else ""),
        MemoryPart("buckets", buckets, "sync.bucket_mb"),
        _checksum_part(sent, sync),
    ]


def _checksum_part(layout: Layout, sync: SyncConfig) -> MemoryPart:
    return MemoryPart(
        "checksum", checksum_bytes(layout) if sync.verify else 0, "sync.verify=false" if sync.verify else ""
    )


def total(parts: Sequence[MemoryPart]) -> int:
    return sum(part.bytes for part in parts)


def stages_on_device(sync: SyncConfig, parts: Sequence[MemoryPart], granted: int) -> bool:
    """Whether staging is to lie on the device. parts: of a generator rank with staging · granted: bytes that weights,
    staging and KV cache may take together."""
    if sync.staging == "auto":
        return not sync.receives_on_host and total(parts) <= (1 - KV_SHARE) * granted
    return sync.staging == "device"
