"""An SGLang server, through its native HTTP interface.

    python -m sglang.launch_server --model-path MODEL --port 30000 --enable-deterministic-inference --enable-metrics

Written from SGLang's documentation ("SGLang for RL Systems", "Sampling Parameters", "Native APIs") and its
`GenerateReqInput`; a real server was not run here. It relies on:

    POST /generate                  one sample a request: of n in one, none could be aborted by its rid.
                                    Log-probs are of softmax(logits / temperature), before any cut of the support
    POST /pause_generation          in_place: requests stay, flush_cache would fail; abort: they return what they have
    POST /update_weights_from_disk  from a folder that both can see, with a new weight_version
    meta_info.weight_versions       spans of tokens; without them one label for all of a response, which is enough
                                    where no response goes on over a flip (generator.kv=recompute or drain)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.generator.engines.http.folder_receiver import FolderReceiver
from asyncrl.generator.engines.http.http_link import (
    HttpLink,
    ServerRefusedError,
    UnreachableError,
    metric_sums,
    parsed,
)
from asyncrl.generator.engines.http.server import CheckWeights, Flip, ServerChunk, ServerLoad, ServerRequest
from asyncrl.generator.engines.receiver import WeightReader, WeightReceiver
from asyncrl.types import Finish


class SglangServer:
    """See `Server`. folder: where this generator writes versions, and the server reads them."""

    def __init__(self, link: HttpLink, config: Config, end_ids: list[int], folder: Path) -> None:
        self._link, self._model, self._folder = link, config.model, folder
        self._end_ids = end_ids
        self._keep = config.generator.kv == "keep"
        self._deadline_s = config.generator.server.deadline_s

    async def start(self) -> None:
        await self._link.open()
        try:
            await self.label()  # waits for a server that is just starting
            await self.resume()
            meta = await self._meta_of_a_token()
        except (ServerRefusedError, UnreachableError, KeyError, TypeError) as error:
            rule = f"is no SGLang server that generates from token ids: {error!r}"
            remedy = "name the address of `python -m sglang.launch_server`"
            raise ConfigError("generator.server.urls", self._link.url, rule, remedy) from error
        rule = f"the server at {self._link.url} does not say which token was made by which weights"
        remedy = "set generator.kv=recompute, or use an SGLang whose meta_info has weight_versions"
        require(not self._keep or "weight_versions" in meta, "generator.kv", "keep", rule, remedy)
        self._folder.mkdir(parents=True, exist_ok=True)

    async def close(self) -> None:
        await self._link.close()

    async def generate(self, request: ServerRequest) -> ServerChunk:
        sampling = request.sampling
        body = {
            "rid": request.name,
            "input_ids": list(request.prompt_ids),
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_new_tokens": request.most_tokens,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "stop_token_ids": self._end_ids,  # not with ignore_eos, which would ignore these too
                "sampling_seed": request.seed,
            },
            "return_logprob": True,
            "stream": False,
            # A pause in place keeps what is cached of the old weights, which must not be used for the new ones.
            **({"extra_key": request.salt} if self._keep else {}),
        }
        return parsed(await self._link.post_once("/generate", body), _chunk)

    async def abort(self, name: str) -> None:
        await self._link.post_once("/abort_request", {"rid": name}, self._deadline_s)

    async def label(self) -> str:
        try:
            info = await self._link.get("/model_info")
        except ServerRefusedError as error:
            if error.status != 404:
                raise
            info = await self._link.get("/get_model_info")  # its older name
        return parsed(info, lambda info: str(info.get("weight_version")))

    async def set_label(self, label: str) -> None:
        await self._link.post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def pause(self, keep: bool) -> None:
        await self._link.post("/pause_generation", {"mode": "in_place" if keep else "abort"})

    async def resume(self) -> None:
        await self._link.post("/continue_generation", {})

    async def load(self) -> ServerLoad:
        sums = metric_sums(str(await self._link.get_once("/metrics")))
        return ServerLoad(
            tokens=sums.get("sglang:generation_tokens_total", 0.0),
            waiting=sums.get("sglang:num_queue_reqs", 0.0),
            kv_usage=sums.get("sglang:token_usage", 0.0),
        )

    def receiver(self, reader: WeightReader, flip: Flip, check_weights: CheckWeights) -> WeightReceiver:
        return FolderReceiver(reader, self._model, self._folder, flip, self._load_weights, check_weights)

    async def _load_weights(self, path: Path, label: str) -> None:
        body = {"model_path": str(path), "weight_version": label, "flush_cache": not self._keep}
        try:
            answer = await self._link.post_once("/update_weights_from_disk", body, self._deadline_s)
        except ServerRefusedError as error:
            raise WeightSyncError(f"{self._link.who}: the server at {self._link.url}: {error}") from error
        if not parsed(answer, lambda answer: bool(answer["success"])):
            raise WeightSyncError(
                f"{self._link.who}: the server at {self._link.url} could not load {path}: {answer.get('message')}"
            )

    async def _meta_of_a_token(self) -> dict[str, Any]:
        """The metadata that the server returns with one token."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        answer = await self._link.post_once("/generate", {**body, "stream": False}, self._deadline_s)
        return parsed(answer, lambda answer: dict(answer["meta_info"]))


def _chunk(answer: dict[str, Any]) -> ServerChunk:
    meta = answer["meta_info"]
    tokens = meta.get("output_token_logprobs") or []  # [log-prob, token, text], the end token included
    labels = [
        (str(span["version"]), span["start"], span["end"]) for span in meta.get("weight_versions") or ()
    ]
    if tokens and not labels:
        labels = [(str(meta.get("weight_version")), 0, len(tokens))]
    finish: dict[str, Finish] = {"stop": "stop", "length": "length"}
    return ServerChunk(
        [token for _, token, *_ in tokens],
        [logprob for logprob, *_ in tokens],
        labels if tokens else (),
        finish.get((meta.get("finish_reason") or {}).get("type", ""), "abort"),
    )
