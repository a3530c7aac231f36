"""A vLLM server that the user has started; its ranks take the learner's weights as those of vLLM in process do.

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL --tokens-only \\
        --logprobs-mode processed_logprobs \\
        --worker-extension-cls asyncrl.generator.engines.vllm.vllm_worker.WeightsExtension

    POST /inference/v1/generate    token ids in and out, and which weights made them, which /v1/completions omits
    POST /collective_rpc           calls of `WeightsExtension` (vllm_worker.py) on every rank
    POST /pause, /resume, /update_weight_version    the flip

vLLM 0.32: `vllm/entrypoints/scale_out/token_in_token_out`, `vllm/entrypoints/rl/online`, `vllm/entrypoints/serve/dev`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.generator.engines.http.http_link import (
    HttpLink,
    ServerRefusedError,
    UnreachableError,
    metric_sums,
    parsed,
)
from asyncrl.generator.engines.http.server import CheckWeights, Flip, ServerChunk, ServerLoad, ServerRequest
from asyncrl.generator.engines.receiver import WeightReader, WeightReceiver
from asyncrl.generator.engines.vllm.vllm_weights import VllmReceiver, values_of
from asyncrl.types import Finish, Sampling, Version

PREFIX = "generate-tokens-"
"""vLLM's prefix of a request's name."""

START = (
    "start it with VLLM_SERVER_DEV_MODE=1 and --tokens-only --logprobs-mode processed_logprobs "
    "--worker-extension-cls asyncrl.generator.engines.vllm.vllm_worker.WeightsExtension"
)

CERTAIN = ServerRequest("certain.", [0], Sampling(top_k=1), most_tokens=1, seed=0, salt="certain")
"""With one token to draw from, its log-prob is 0."""


class VllmServer:
    """See `Server`."""

    start_hint = START

    def __init__(self, link: HttpLink, config: Config, end_ids: list[int]) -> None:
        self._link, self._config = link, config
        self._end_ids = end_ids
        self._deadline_s = config.generator.server.deadline_s

    async def start(self) -> None:
        await self._link.open()
        try:
            await self._take_over()
            models = await self._link.get("/v1/models")
            served = parsed(models, lambda models: int(models["data"][0]["max_model_len"]))
            async with asyncio.timeout(self._deadline_s):
                certain = await self.generate(CERTAIN)
        except (ServerRefusedError, UnreachableError, TimeoutError) as error:
            raise self._unusable(f"does not do what is asked: {error!r}") from error
        if abs(certain.logprobs[0]) > 1e-3:
            raise self._unusable("returns log-probs of another distribution than the one it samples from")
        if served < self._config.generator.max_length:
            rule = f"the server at {self._link.url} has --max-model-len {served}"
            remedy = f"set generator.max_length={served}, or start it with more"
            raise ConfigError("generator.max_length", self._config.generator.max_length, rule, remedy)

    async def _take_over(self) -> None:
        """Wait for a server that is just starting, and end what a former generator has left there."""
        await self.label()
        await self.resume()
        reports = await self._rpc("asyncrl_close")
        if not all(isinstance(report, dict) for report in reports):
            raise self._unusable(f"has another worker extension: {reports}")

    async def close(self) -> None:
        await self._link.close()

    async def generate(self, request: ServerRequest) -> ServerChunk:
        sampling = request.sampling
        greedy = sampling.temperature == 0
        body = {
            "request_id": request.name,
            "token_ids": list(request.prompt_ids),
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "max_tokens": request.most_tokens,
                "logprobs": 0,  # of the sampled token alone
                "stop_token_ids": self._end_ids,
                "ignore_eos": True,  # the end tokens are named above
                "detokenize": False,
                **({} if greedy else {"seed": request.seed}),
            },
            "cache_salt": request.salt,
            **({"model": self._adapter(request)} if self._adapter(request) else {}),
        }
        return parsed(await self._link.post_once("/inference/v1/generate", body), _chunk)

    def _adapter(self, request: ServerRequest) -> str | None:
        """The name of the adapter that is to answer; None for the model alone."""
        return None

    async def abort(self, name: str) -> None:
        body = {"request_ids": [PREFIX + name]}
        await self._link.post_once("/inference/v1/abort_requests", body, self._deadline_s)

    async def label(self) -> str:
        return parsed(await self._link.get("/weight_info"), lambda info: str(info["weight_version"]))

    async def set_label(self, label: str) -> None:
        await self._link.post("/update_weight_version", {"new_version": label})

    async def pause(self, keep: bool) -> None:
        mode, clear = ("keep", "false") if keep else ("abort", "true")
        await self._link.post("/pause", params={"mode": mode, "clear_cache": clear})

    async def resume(self) -> None:
        await self._link.post("/resume")

    async def load(self) -> ServerLoad:
        sums = metric_sums(str(await self._link.get_once("/metrics")))
        return ServerLoad(
            tokens=sums.get("vllm:generation_tokens_total", 0.0),
            at_once="vllm:generation_tokens_total" in sums,
            waiting=sums.get("vllm:num_requests_waiting", 0.0),
            kv_usage=sums.get("vllm:kv_cache_usage_perc", 0.0),
            preemptions=sums.get("vllm:num_preemptions_total", 0.0),
        )

    def receiver(self, reader: WeightReader, flip: Flip, check_weights: CheckWeights) -> WeightReceiver:
        async def flip_ranks(version: Version) -> float:
            async def install(label: str) -> None:
                await self.call("asyncrl_flip", version)
                await self.set_label(label)

            return await flip(version, install)

        return VllmReceiver(reader, self._config.model, self.call, flip_ranks, check_weights)

    async def call(self, method: str, *args: Any) -> list[Any]:
        """The result of `WeightsExtension.<method>` on each rank. Raises WeightSyncError or SnapshotEvictedError."""
        try:
            reports = await self._rpc(method, *args)
        except (ServerRefusedError, UnreachableError) as error:
            raise WeightSyncError(f"{self._link.who}: the server at {self._link.url}: {error}") from error
        return values_of(reports, self._link.who)

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        body = {"method": method, "args": list(args)}
        answer = await self._link.post_once("/collective_rpc", body, self._deadline_s)
        return parsed(answer, lambda answer: list(answer["results"]))

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError(
            "generator.server.urls", self._link.url, f"the server there {why}", self.start_hint
        )


def _chunk(answer: dict[str, Any]) -> ServerChunk:
    (choice,) = answer["choices"]
    tokens = choice["token_ids"] or []
    logprobs = choice["logprobs"]["content"] if tokens else []
    spans = choice["weight_versions"] or ()
    finish: dict[str, Finish] = {"stop": "stop", "length": "length"}
    return ServerChunk(
        tokens,
        [entry["logprob"] for entry in logprobs],
        [(str(span["version"]), span["start"], span["end"]) for span in spans],
        finish.get(choice["finish_reason"], "abort"),
    )
