"""Weights for an engine behind HTTP. `ServerReceiver` asks, beside its own work, whether the server still has them.

    ranks of a vLLM server    each takes its part of the stream itself (vllm_receiver.py)
    a folder                  this process takes the stream, writes a Hugging Face folder, and names it to the server

A server that lost its weights (LostWeightsError) gets a new receiver, which prepares it as if it had never been seen.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.config.schema import ModelConfig
from asyncrl.generator.engines.http.server import ServedEngine
from asyncrl.generator.engines.receiver import (
    HoldsStream,
    Learner,
    LostWeightsError,
    StagedVersion,
    WeightReader,
    WeightReceiver,
)
from asyncrl.models import checkpoint_shapes, load_model_config
from asyncrl.sync.layout.layout import whole_layout
from asyncrl.sync.tensors.bucket import Shards
from asyncrl.types import Version

FILE_BYTES = 4 << 30
"""Of one file of a folder, at most, if no parameter is larger."""


class ServerReceiver:
    """See `WeightReceiver`. make: a receiver for a server that knows nothing yet."""

    def __init__(self, engine: ServedEngine, make: Callable[[], WeightReceiver]) -> None:
        self._engine, self._make = engine, make
        self._inner: WeightReceiver | None = None

    @property
    def floor_s(self) -> float:
        return 0.0 if self._inner is None else self._inner.floor_s

    async def open(self, learner: Learner) -> None:
        if self._inner is None:
            self._inner = self._make()
        await self._inner.open(learner)

    async def newest(self, newer_than: Version, wait_s: float) -> Version | None:
        try:
            await self._engine.present()
        except LostWeightsError:
            await self.close()
            raise
        return await self._opened.newest(newer_than, wait_s)

    async def stage(self, version: Version) -> StagedVersion:
        return await self._opened.stage(version)

    async def flip(self, version: Version) -> float:
        try:
            return await self._opened.flip(version)
        except LostWeightsError:
            await self.close()
            raise

    async def verify(self) -> None:
        await self._opened.verify()

    async def held(self, version: Version) -> None:
        await self._opened.held(version)

    async def close(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            await inner.close()

    @property
    def _opened(self) -> WeightReceiver:
        assert self._inner is not None, "open comes first"
        return self._inner


class FolderReceiver(HoldsStream):
    """See `WeightReceiver`. Writes version v to `folder`/v; the two newest stay.

    flip_to(version, path): makes the server load that folder. What is hashed is what was written: what the server
    makes of it, only its log-probs tell.
    """

    def __init__(
        self,
        reader: WeightReader,
        model: ModelConfig,
        folder: Path,
        flip_to: Callable[[Version, Path], Awaitable[float]],
    ) -> None:
        super().__init__()
        self.floor_s = 0.0
        self._reader, self._model, self._folder, self._flip_to = reader, model, folder, flip_to
        self._layout = whole_layout(checkpoint_shapes(model)[0])
        arena = reader.staging(self._layout, torch.device("cpu"))
        self._staging = {name: parts[0] for name, parts in arena.shards.tensors.items()}
        self._live: Version | None = None

    async def open(self, learner: Learner) -> None:
        await self._leave()
        self._stream = await self._thread(self._reader.open, learner, self._layout, self._staging)

    async def newest(self, newer_than: Version, wait_s: float) -> Version | None:
        return await self._thread(self._opened.newest, newer_than, wait_s)

    async def stage(self, version: Version) -> StagedVersion:
        return await self._thread(self._stage, version)

    async def flip(self, version: Version) -> float:
        pause_s = await self._flip_to(version, self._path(version))
        self._live = version
        return pause_s

    async def verify(self) -> None:
        """Staging was compared with the learner before it was written."""

    async def held(self, version: Version) -> None:
        await self._thread(self._opened.held, version)

    async def close(self) -> None:
        await self._leave()
        self._thread.close()

    def _stage(self, version: Version) -> StagedVersion:
        staged = self._opened.stage(version)
        if self._reader.sync.verify and staged.checksum is not None:
            whose = f"{self._reader.who}: the parameters of version {version} as they arrived"
            staged.checksum.check(Shards(self._layout, self._staging), whose)
        write_checkpoint(self._path(version), self._staging, self._model)
        self._forget({version, self._live})
        return staged

    def _forget(self, kept: set[Version | None]) -> None:
        for path in self._folder.iterdir():
            if path.name.isdecimal() and int(path.name) not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _path(self, version: Version) -> Path:
        return self._folder / f"{version:08d}"


def write_checkpoint(folder: Path, tensors: dict[str, Tensor], model: ModelConfig) -> None:
    """A Hugging Face folder: config.json, safetensors, their index. Whole or not there."""
    unfinished = folder.with_name(f".{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    load_model_config(model).save_pretrained(unfinished)
    files = _files(tensors)
    index: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file({name: tensors[name] for name in names}, unfinished / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    (unfinished / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _files(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Names, file by file."""
    files: list[list[str]] = [[]]
    room = FILE_BYTES
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if files[-1] and size > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(name)
        room -= size
    return files
