"""The format of a stored version: per learner rank one blob of tensors and, written last, its manifest.

    rank-00001/3-9f2c…/00000012.safetensors     the rank's shards, one tensor a box: any safetensors reader opens it
    rank-00001/3-9f2c…/00000012.manifest        whose they are, how they are cut, and a hash of each block
               └ series: the lineage, and a random word of this publisher: blobs of an earlier one cannot pass for new

A version is there once all ranks have written its manifest. A *block* is a part of a box of about a megabyte, in one
stretch of the file; it has its share of the hash (`row_digest`), made from the learner's snapshot in checkpoint
coordinates. The hash of a block covers its bytes, their place, name, shape and type.

kind "full" is everything; another kind (a delta from the version `base`) names a blob of another format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from asyncrl.errors import WeightSyncError, WireError
from asyncrl.sync.layout.layout import ITEM_BYTES, Box, Layout, from_wire, to_wire
from asyncrl.sync.plan.plan import split_box
from asyncrl.types import Version

T = TypeVar("T")

FORMAT = 1

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


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of one rank's blob of one version.

    kind: "full", or the name of a delta's format · base: the version a delta goes on from · size: bytes of the blob ·
    header: those before the first tensor · digests: {name: [hash of each block, box after box]}, None without
    sync.verify
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
class Block:
    """`box` of a parameter: bytes [start, stop) of the tensor that holds it · number: among the parameter's blocks."""

    box: Box
    number: int
    start: int
    stop: int


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
        for name, param in manifest.layout.items():
            count = sum(1 for box in param.boxes for _ in blocks(box, ITEM_BYTES[param.dtype]))
            if len(manifest.digests.get(name, ())) != count:
                raise WireError(f"parameter {name}: not as many hashes as the {count} blocks")


def manifest_key(series: str, version: Version) -> str:
    return f"{series}/{version:08d}.manifest"


def tensors_key(series: str, version: Version) -> str:
    return f"{series}/{version:08d}.safetensors"


def version_of(key: str) -> Version | None:
    """The version in a manifest's key; None for any other key.

    >>> version_of("rank-00000/0-ab/00000012.manifest"), version_of("rank-00000/0-ab/00000012.safetensors")
    (12, None)
    """
    stem, dot, suffix = key.rpartition("/")[2].partition(".")
    return int(stem) if (dot, suffix) == (".", "manifest") and stem.isdecimal() else None


def blocks(box: Box, item: int, first: int = 0) -> Iterator[Block]:
    """The blocks of one box, in the order of its memory. item: bytes of an element · first: number of the first."""
    start = 0
    for number, part in enumerate(split_box(box, max(1, BLOCK_BYTES // item)), first):
        stop = start + part.elements * item
        yield Block(part, number, start, stop)
        start = stop


def runs(needed: Sequence[T], extent: Callable[[T], tuple[int, int]], most: int) -> Iterator[list[T]]:
    """Neighbours in a blob, to be read at once.

    Args:
        needed: in the order of the blob
        extent: first byte, and the byte after the last
        most: bytes of a run, unless one alone has more
    """
    run: list[T] = []
    for each in needed:
        start, stop = extent(each)
        if run and (start != extent(run[-1])[1] or stop - extent(run[0])[0] > most):
            yield run
            run = []
        run.append(each)
    if run:
        yield run


def tensor_names(name: str, boxes: int) -> list[str]:
    """The names of a parameter's boxes in the blob.

    >>> tensor_names("w", 1), tensor_names("w", 2)
    (['w'], ['w[0]', 'w[1]'])
    """
    return [name] if boxes == 1 else [f"{name}[{index}]" for index in range(boxes)]


def header_of(layout: Layout, about: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file: the length of the JSON, and the JSON. Tensors follow as the layout goes.

    about: for `__metadata__`. The format: https://huggingface.co/docs/safetensors, "Format".
    """
    entries: dict[str, Any] = {"__metadata__": dict(about)}
    end = 0
    for name, param in layout.items():
        for tensor, box in zip(tensor_names(name, len(param.boxes)), param.boxes, strict=True):
            start, end = end, end + box.elements * ITEM_BYTES[param.dtype]
            entries[tensor] = {
                "dtype": SAFETENSORS[param.dtype],
                "shape": list(box.shape),
                "data_offsets": [start, end],
            }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGN)
    return len(text).to_bytes(8, "little") + text


def offsets_in(header: bytes, layout: Layout, key: str) -> dict[str, int]:
    """Where each tensor of `layout` starts in the blob, by its name there.

    Raises WeightSyncError, naming `key`, for a header that is unreadable or of other tensors.
    """
    try:
        entries = json.loads(header[8:])
        offsets = {}
        for name, param in layout.items():
            for tensor, box in zip(tensor_names(name, len(param.boxes)), param.boxes, strict=True):
                entry = entries[tensor]
                start, end = entry["data_offsets"]
                size = math.prod(box.shape) * ITEM_BYTES[param.dtype]
                if (entry["dtype"], tuple(entry["shape"]), end - start) != (
                    SAFETENSORS[param.dtype],
                    box.shape,
                    size,
                ):
                    raise ValueError(f"{tensor} is {entry}, its manifest says {param.dtype} {box.shape}")
                offsets[tensor] = len(header) + start
    except (KeyError, TypeError, ValueError) as error:
        raise WeightSyncError(f"stored weights: {key} is not what its manifest says: {error!r}") from error
    return offsets
