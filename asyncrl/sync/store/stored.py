"""The format of a stored version: per learner rank one blob of tensors and, written last, its manifest.

    rank-00001/3-9f2c…/00000012.safetensors     the rank's shards, one tensor a box: any safetensors reader opens it
    rank-00001/3-9f2c…/00000012.manifest        whose they are, how they are cut, and a hash of each block
               └ series: the lineage, and a random word of this publisher: blobs of an earlier one cannot pass for new

A version is there once all ranks have written its manifest. A *block* is a part of a box of about a megabyte, in one
stretch of the file; it has its share of the hash (`row_digest`), made from the learner's snapshot in checkpoint
coordinates. The hash of a block covers its bytes, their place, name, shape and type.

A version may be stored as changes to the one before, which a reader must have staged or read first:

    …/00000012.safetensors   kind "full"
    …/00000013.delta         kind "delta", base 12        int64 [blocks, 2]: bytes and xxh64 of each record
    …/00000014.delta         kind "delta", base 13        the records, one for each block (see `delta.records`)

The manifest of a delta has the hashes of its whole version: in staging they are compared at the end.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
import xxhash

from asyncrl.errors import WeightSyncError, WireError
from asyncrl.sync.layout.layout import ITEM_BYTES, Box, Layout, from_wire, to_wire
from asyncrl.sync.plan.plan import tiles
from asyncrl.sync.tensors.shards import flat_bytes
from asyncrl.types import Version

FORMAT = 2

FULL, DELTA = "full", "delta"
"""Kinds of manifests."""

BLOCK_BYTES = 1 << 20
"""Most bytes of a block. A reader of a few rows reads whole blocks; the manifest has a hash for each."""

SAFETENSORS: Mapping[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The names of torch's dtypes in safetensors."""

HEADER_ALIGN = 8

ENTRY_BYTES = 16
"""Bytes of each record's entry in the table of a delta."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of one rank's blob of one version.

    kind: FULL or DELTA · base: the version a delta goes on from · size: bytes of the blob · header: those before the
    first tensor or record · digests: {name: [hash of each block, box after box]}, None without sync.verify
    """

    lineage: int
    version: Version
    rank: int
    world: int
    kind: str
    base: Version | None
    size: int
    header: int
    layout: Layout
    digests: Mapping[str, Sequence[int]] | None


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """`box` of a parameter, and its bytes. number: among the parameter's blocks."""

    name: str
    box: Box
    number: int
    bytes: int


def blocks(layout: Layout) -> Iterator[StoredBlock]:
    """The blocks of a rank, in the order of its blob, where they follow one another."""
    numbers: Counter[str] = Counter()
    for name, box in tiles(layout, BLOCK_BYTES):
        yield StoredBlock(name, box, numbers[name], box.elements * ITEM_BYTES[layout[name].dtype])
        numbers[name] += 1


def manifest_to_bytes(manifest: Manifest) -> bytes:
    fields = {name: getattr(manifest, name) for name in Manifest.__slots__}
    return bytes(msgpack.packb([FORMAT, {**fields, "layout": to_wire(manifest.layout)}]))


def manifest_from_bytes(data: bytes) -> Manifest:
    """The inverse of `manifest_to_bytes`; raises WireError for anything else."""
    try:
        format_, fields = msgpack.unpackb(data)
        if format_ != FORMAT:
            raise WireError(f"a manifest of format {format_!r}, this side reads {FORMAT}")
        manifest = Manifest(**{**fields, "layout": from_wire(fields["layout"])})
        _check(manifest)
    except WireError:
        raise
    except Exception as error:
        raise WireError(f"not a manifest: {error!r}") from error
    return manifest


def _check(manifest: Manifest) -> None:
    numbers = [getattr(manifest, name) for name in ("lineage", "version", "rank", "world", "size", "header")]
    if not all(type(n) is int for n in numbers) or not isinstance(manifest.kind, str):
        raise WireError("a manifest with fields of a wrong kind")
    if manifest.digests is not None:
        counts = Counter(block.name for block in blocks(manifest.layout))
        for name in manifest.layout:
            if len(manifest.digests.get(name, ())) != counts[name]:
                raise WireError(f"parameter {name}: not as many hashes as the {counts[name]} blocks")


def manifest_key(series: str, version: Version) -> str:
    return f"{series}/{version:08d}.manifest"


def tensors_key(series: str, version: Version) -> str:
    return f"{series}/{version:08d}.safetensors"


def delta_key(series: str, version: Version) -> str:
    return f"{series}/{version:08d}.delta"


def version_of(key: str) -> Version | None:
    """The version in a manifest's key; None for any other key.

    >>> version_of("rank-00000/0-ab/00000012.manifest"), version_of("rank-00000/0-ab/00000012.safetensors")
    (12, None)
    """
    stem, dot, suffix = key.rpartition("/")[2].partition(".")
    return int(stem) if (dot, suffix) == (".", "manifest") and stem.isdecimal() else None


def header_of(layout: Layout, about: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file: the length of the JSON, and the JSON. Tensors follow as the layout goes.

    about: for `__metadata__`. The format: https://huggingface.co/docs/safetensors, "Format".
    """
    text = json.dumps({"__metadata__": about, **_entries(layout)}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGN)
    return len(text).to_bytes(8, "little") + text


def check_header(header: bytes, layout: Layout, key: str) -> None:
    """Raise WeightSyncError, naming `key`, for a header that is unreadable, or whose tensors or places are not those of
    the layout, by which the tensors are read.
    """
    try:
        found = json.loads(header[8:])
        for tensor, entry in _entries(layout).items():
            if found[tensor] != entry:
                raise ValueError(f"{tensor} is {found[tensor]}, its manifest has {entry}")
    except (KeyError, TypeError, ValueError) as error:
        raise WeightSyncError(f"stored weights: {key} does not match its manifest: {error!r}") from error


def _entries(layout: Layout) -> dict[str, Any]:
    """The entry of each tensor: 'w' is the only box of a parameter, 'w[0]' the first of several."""
    entries = {}
    end = 0
    for name, param in layout.items():
        for index, box in enumerate(param.boxes):
            start, end = end, end + box.elements * ITEM_BYTES[param.dtype]
            entries[name if len(param.boxes) == 1 else f"{name}[{index}]"] = {
                "dtype": SAFETENSORS[param.dtype],
                "shape": list(box.shape),
                "data_offsets": [start, end],
            }
    return entries


def delta_table(records: Sequence[torch.Tensor]) -> bytes:
    """The beginning of a delta: bytes and hash of each record."""
    entries = [(len(record), record_hash(record)) for record in records]
    return flat_bytes(torch.tensor(entries, dtype=torch.int64)).numpy().tobytes()


def record_hash(record: torch.Tensor) -> int:
    """xxh64 of a record, as a signed integer."""
    value = xxhash.xxh64_intdigest(record.numpy().data)
    return value - (1 << 64) if value >> 63 else value
