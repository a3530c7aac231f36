"""Checkpoints of a run: whole or not there.

RUN/checkpoints/.v000050.partial/   every rank writes its shards here
RUN/checkpoints/v000050/            the same folder, renamed by rank 0 when all ranks are done
    learner/                        models that change, their optimizers, random state (torch.distributed.checkpoint)
    meta.msgpack                    version, controls, and where the task streams stand
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgpack

from asyncrl.learner.backend import Backend
from asyncrl.types import Version

FOLDER, STATE, META = "checkpoints", "learner", "meta.msgpack"
FORMAT = 2
"""1 had no controls."""
NAME = re.compile(r"v\d{6,}")


@dataclass(frozen=True, slots=True)
class Meta:
    """version: of the policy that is saved · train, eval: the queue's snapshots of the two streams
    (opaque) · controls: what the run had adapted by then, by name, see `Controls`."""

    version: Version
    train: bytes
    eval: bytes | None
    controls: Mapping[str, float] = field(default_factory=dict)
    format: int = FORMAT


def newest(run_folder: Path) -> Path | None:
    """The folder of the newest whole checkpoint."""
    return max(_all(run_folder), key=_version, default=None)


def read_meta(checkpoint: Path) -> Meta:
    """Of this format or an older one."""
    return Meta(**msgpack.unpackb((checkpoint / META).read_bytes()))


def save(run_folder: Path, backend: Backend, meta: Meta, keep: int) -> Path:
    """On every rank at once. Raises OSError if the disk will not take it; no broken checkpoint stays behind
    then."""
    folder = run_folder / FOLDER
    final = folder / f"v{meta.version:06d}"
    partial, replaced = folder / f".{final.name}.partial", folder / f".{final.name}.replaced"
    if backend.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    backend.exchange(None)
    backend.save(partial / STATE)
    backend.exchange(None)
    if backend.rank == 0:
        (partial / META).write_bytes(msgpack.packb(asdict(meta)))
        if final.exists():  # made before, then trained again from an older one
            os.replace(final, replaced)
        os.replace(partial, final)
        shutil.rmtree(replaced, ignore_errors=True)
        for old in sorted(_all(run_folder), key=_version)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    backend.exchange(None)
    return final


def load(checkpoint: Path, backend: Backend) -> None:
    """On every rank at once."""
    backend.load(checkpoint / STATE)


def _all(run_folder: Path) -> list[Path]:
    return [path for path in (run_folder / FOLDER).glob("v*") if NAME.fullmatch(path.name)]


def _version(checkpoint: Path) -> Version:
    return int(checkpoint.name[1:])
