"""A vLLM server that the user has started, and whose model stays as it is: each version is an adapter of its own name.

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 python -m vllm.entrypoints.openai.api_server --model MODEL --tokens-only \\
        --logprobs-mode processed_logprobs --enable-lora --max-lora-rank RANK --max-loras N

    stage ─▸ a folder ─▸ flip: POST /v1/load_lora_adapter ─▸ requests name it ─▸ the last one ends: unload_lora_adapter

Nothing of the server is paused, so several runs may use one. Requests in flight keep their adapter to their end with
generator.kv=keep, and continue under the new one with recompute.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.generator.engines.http.folder_receiver import FolderReceiver
from asyncrl.generator.engines.http.http_link import HttpLink, ServerRefusedError, UnreachableError, parsed
from asyncrl.generator.engines.http.server import CheckWeights, Flip, ServerChunk, ServerRequest
from asyncrl.generator.engines.http.vllm_server import VllmServer
from asyncrl.generator.engines.receiver import WeightReader, WeightReceiver

START = (
    "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --tokens-only --logprobs-mode processed_logprobs "
    "--enable-lora --max-lora-rank of model.lora.rank or more"
)

NOT_BY_GET = 405
"""The status of a path that is there for POST."""

ABORT_AGAIN_S = 0.05
"""An abort that comes before the server has the request is lost: repeated until the request has ended."""


class VllmAdapterServer(VllmServer):
    """See `Server`. A label is the name of an adapter. folder: where this generator writes them, and the server reads
    them."""

    start_hint = START

    def __init__(self, link: HttpLink, config: Config, end_ids: list[int], folder: Path) -> None:
        super().__init__(link, config, end_ids)
        self._folder, self._label = folder, ""
        self._loaded: dict[str, str] = {}  # label → its folder's name
        self._in_flight: dict[str, str] = {}  # request → label

    async def close(self) -> None:
        self._label = ""
        await self._unload()
        await super().close()

    async def generate(self, request: ServerRequest) -> ServerChunk:
        label = request.salt if request.salt in self._loaded else self._label  # a flip has come between
        self._in_flight[request.name] = label
        try:
            chunk = await super().generate(request)
        finally:
            del self._in_flight[request.name]
        await self._unload()
        made = len(chunk.token_ids)
        return replace(chunk, labels=[(label, 0, made)] if made else [])

    def _adapter(self, request: ServerRequest) -> str | None:
        return self._in_flight[request.name] or None

    async def label(self) -> str:
        """The label of the adapter that requests are to name, if the server still has it."""
        served = parsed(
            await self._link.get("/v1/models"), lambda models: {of["id"] for of in models["data"]}
        )
        there = self._label in served or self._label not in self._loaded
        return self._label if there else "of no adapter of this generator"

    async def set_label(self, label: str) -> None:
        self._label = label

    async def pause(self, keep: bool) -> None:
        """The server goes on; with `keep` requests end with the adapter that they began with."""
        while not keep and self._in_flight:
            for name in [*self._in_flight]:
                await self.abort(name)
            await asyncio.sleep(ABORT_AGAIN_S)

    async def resume(self) -> None: ...

    def receiver(self, reader: WeightReader, flip: Flip, check_weights: CheckWeights) -> WeightReceiver:
        used = self._loaded.values()
        return FolderReceiver(
            reader, self._config.model, self._folder, flip, self._load_adapter, check_weights, used
        )

    async def _take_over(self) -> None:
        await self.label()  # waits for a server that is just starting
        try:
            await self._link.get_once("/v1/load_lora_adapter")
        except ServerRefusedError as error:
            if error.status != NOT_BY_GET:
                raise

    async def _load_adapter(self, path: Path, label: str) -> None:
        await self._link.post_once(
            "/v1/load_lora_adapter", {"lora_name": label, "lora_path": str(path)}, self._deadline_s
        )
        self._loaded[label], self._label = path.name, label
        await self._unload()

    async def _unload(self) -> None:
        """Adapters of older versions that no request in flight names."""
        stale = self._loaded.keys() - {self._label, *self._in_flight.values()}
        for label in stale:
            del self._loaded[label]
        for label in stale:
            with contextlib.suppress(UnreachableError, ServerRefusedError):
                await self._link.post_once("/v1/unload_lora_adapter", {"lora_name": label}, self._deadline_s)
