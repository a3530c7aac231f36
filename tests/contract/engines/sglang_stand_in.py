"""A stand-in for an SGLang server: its documented native interface over real HTTP, with the embedded engine behind.

It refuses what the real one refuses, and more: fields that it does not know, where the real one overlooks them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from safetensors.torch import load_file

from asyncrl.generator.engines.engine import PromptTooLongError, SampleRequest
from asyncrl.generator.engines.transformers.transformers_engine import TransformersEngine
from asyncrl.types import Sampling, Turn

FIELDS = {"rid", "input_ids", "sampling_params", "return_logprob", "stream", "extra_key"}
SAMPLING = {
    "temperature": (int, float),
    "max_new_tokens": int,
    "top_p": (int, float),
    "top_k": int,
    "min_p": (int, float),
    "stop_token_ids": list,
    "sampling_seed": int,
}
UPDATE = {"model_path", "weight_version", "flush_cache"}
FIRST_LABEL = "default"


class SglangStandIn:
    """spans: whether it tells the weight versions of single tokens, as the newest do."""

    def __init__(self, engine: TransformersEngine, port: int, *, spans: bool = True) -> None:
        self.engine, self.spans = engine, spans
        self.port = port
        self.log: list[tuple[str, Any]] = []
        self._labels = {engine.version: FIRST_LABEL}  # of the engine's own versions
        self._mode: str | None = None  # of the pause
        self._going = asyncio.Event()
        self._going.set()
        self._running: set[str] = set()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        await self.engine.start()
        app = web.Application()
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/update_weights_from_disk", self._update),
                web.post("/update_weight_version", self._name),
                web.get("/get_model_info", self._info),
                web.get("/metrics", self._metrics),
            ]
        )
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, shutdown_timeout=0.1).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self.engine.close()

    def restart(self) -> None:
        """What a client sees of a server that came back: other weights, and the first label."""
        self._labels[self.engine.version] = FIRST_LABEL

    @property
    def label(self) -> str:
        return self._labels[self.engine.version]

    async def _generate(self, request: web.Request) -> web.Response:
        body = await _body(request, FIELDS)
        asked = body.get("sampling_params", {})
        if unknown := asked.keys() - SAMPLING.keys():
            raise web.HTTPBadRequest(text=f"unexpected sampling parameters {unknown}")
        for key, kind in SAMPLING.items():
            if not isinstance(asked.get(key, kind() if isinstance(kind, type) else 0), kind):
                raise web.HTTPBadRequest(text=f"{key} is no {kind}")
        ids, rid = body["input_ids"], body.get("rid", f"unnamed {len(self.log)}")
        if not ids or not all(type(i) is int for i in ids) or not isinstance(rid, str):
            raise web.HTTPBadRequest(text="input_ids are a list of ints, and rid is a string")
        if rid in self._running:
            raise web.HTTPBadRequest(text=f"Duplicate request ID detected: {rid}")
        if asked.get("top_k", -1) == 0:
            raise web.HTTPBadRequest(text="top_k must be -1 (disable) or at least 1, got 0.")
        self.log.append(("generate", body))
        self._running.add(rid)
        try:
            await self._going.wait()
            (turn,) = await self.engine.sample(_sample_request(rid, ids, asked))
        except PromptTooLongError as error:
            raise web.HTTPBadRequest(text=str(error)) from error
        finally:
            self._running.discard(rid)
        return web.json_response({"output_ids": turn.output_ids.tolist(), "meta_info": self._meta(rid, turn)})

    def _meta(self, rid: str, turn: Turn) -> dict[str, Any]:
        spans: list[dict[str, Any]] = []
        for at, version in enumerate(turn.versions.tolist()):
            if not spans or spans[-1]["version"] != self._labels[version]:
                spans.append({"version": self._labels[version], "start": at, "end": at})
            spans[-1]["end"] = at + 1
        logprobs = zip(turn.logprobs.tolist(), turn.output_ids.tolist(), strict=True)
        return {
            "id": rid,
            "finish_reason": {"type": turn.finish},
            "output_token_logprobs": [[logprob, token, None] for logprob, token in logprobs],
            "weight_version": spans[-1]["version"] if spans else self.label,
            **({"weight_versions": spans} if self.spans else {}),
        }

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _body(request, {"rid", "abort_all"})
        for rid in [rid for rid in self._running if body.get("abort_all") or rid.startswith(body["rid"])]:
            await self.engine.abort(rid)
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        self._mode = (await _body(request, {"mode"}))["mode"]
        if self._mode not in ("abort", "in_place"):
            raise web.HTTPBadRequest(text=f"Invalid mode: {self._mode!r}")
        held_up = set() if self._going.is_set() else self._running.copy()
        self._going.clear()
        if self._mode == "abort":
            while self._running - held_up and self.engine.stats()["running"]:
                for rid in self._running:
                    await self.engine.abort(rid)
                await asyncio.sleep(0.001)
        self.log.append(("pause", self._mode))
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await _body(request, {"torch_empty_cache"})
        self._mode = None
        self._going.set()
        self.log.append(("continue", None))
        return web.json_response({"status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await _body(request, UPDATE)
        if self._mode is None and self._running:
            return _failed("the real one would wait here until all requests have ended")
        if body.get("flush_cache", True) and self._mode == "in_place" and self.engine.stats()["running"]:
            return _failed("Cache flush failed after updating weights")
        if not (Path(body["model_path"]) / "config.json").is_file():
            return _failed("Failed to get model config")
        tensors = {}
        for file in Path(body["model_path"]).glob("*.safetensors"):
            tensors |= load_file(file)
        version = self.engine.version + 1
        self._labels[version] = body["weight_version"]
        await self.engine.flip(tensors, version)
        self.log.append(("update", body))
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def _name(self, request: web.Request) -> web.Response:
        body = await _body(request, {"new_version", "abort_all_requests"})
        self._labels[self.engine.version] = body["new_version"]
        return web.json_response({"success": True, "new_version": body["new_version"]})

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "?", "is_generation": True, "weight_version": self.label})

    async def _metrics(self, request: web.Request) -> web.Response:
        stats = self.engine.stats()
        lines = {
            "generation_tokens_total": stats["tokens"],
            "num_queue_reqs": stats["waiting"],
            "token_usage": stats["kv_usage"],
        }
        text = "".join(f'sglang:{name}{{model_name="m"}} {value}\n' for name, value in lines.items())
        return web.Response(text=text)


def _sample_request(rid: str, ids: list[int], asked: dict[str, Any]) -> SampleRequest:
    sampling = Sampling(
        temperature=asked.get("temperature", 1.0),
        max_tokens=asked.get("max_new_tokens", 128),
        seed=asked.get("sampling_seed", 42),
        top_p=asked.get("top_p", 1.0),
        top_k=max(0, asked.get("top_k", -1)),
        min_p=asked.get("min_p", 0.0),
    )
    return SampleRequest(rid, np.array(ids, np.int64), sampling, ordinal=0)


async def _body(request: web.Request, fields: set[str]) -> dict[str, Any]:
    body = await request.json()
    if not isinstance(body, dict) or body.keys() - fields:
        raise web.HTTPBadRequest(text=f"{request.path} does not take {body}")
    return body


def _failed(message: str) -> web.Response:
    return web.json_response({"success": False, "message": message}, status=400)
