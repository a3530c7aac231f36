"""Adapters at a server that runs share, which a stand-in replaces: their names, and when one is unloaded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from learner_cases import small_config

from asyncrl.errors import ConfigError
from asyncrl.generator.engines.http.http_link import ServerRefusedError
from asyncrl.generator.engines.http.server import ServerRequest
from asyncrl.generator.engines.http.vllm_adapter_server import VllmAdapterServer
from asyncrl.types import Sampling

pytestmark = pytest.mark.asyncio


class StandIn:
    """A link to a server. adapters: that it has · running: the end of each request, by its name."""

    url = who = "here"
    status = 405

    def __init__(self) -> None:
        self.adapters: set[str] = {"of-another-run"}
        self.running: dict[str, asyncio.Future[str]] = {}

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def get(self, path: str) -> Any:
        return {"data": [{"id": name, "max_model_len": 99} for name in ("base", *self.adapters)]}

    async def get_once(self, path: str) -> Any:
        raise ServerRefusedError(self.status, f"GET {path}")

    async def post_once(self, path: str, body: Any, deadline_s: float | None = None) -> Any:
        await asyncio.sleep(0)
        if path == "/v1/load_lora_adapter":
            self.adapters.add(body["lora_name"])
        elif path == "/v1/unload_lora_adapter":
            self.adapters.remove(body["lora_name"])
        elif path == "/inference/v1/abort_requests":
            for name in body["request_ids"]:
                self.running[name].set_result("abort")
        else:
            return await self._generate(body)
        return "Success"

    async def _generate(self, body: Any) -> Any:
        if body.get("model", "base") not in {"base", *self.adapters}:
            raise ServerRefusedError(404, f"no model {body['model']}")
        reason = "length"
        if body["request_id"] != "certain.":
            ends = self.running[f"generate-tokens-{body['request_id']}"] = asyncio.Future()
            reason = await ends
        said = {"token_ids": [7], "logprobs": {"content": [{"logprob": 0.0}]}}
        return {"choices": [{**said, "weight_versions": [], "finish_reason": reason}]}

    async def until_running(self, *names: str) -> None:
        while not {f"generate-tokens-{name}" for name in names} <= self.running.keys():
            await asyncio.sleep(0)

    def end(self, name: str) -> None:
        self.running[f"generate-tokens-{name}"].set_result("length")


def asked(name: str, label: str) -> ServerRequest:
    return ServerRequest(name, [1], Sampling(), most_tokens=1, seed=0, salt=label)


async def started(folder: Path) -> tuple[VllmAdapterServer, StandIn]:
    link = StandIn()
    server = VllmAdapterServer(link, small_config(folder), [], folder)  # type: ignore[arg-type]
    await server.start()
    return server, link


async def test_samples_keep_their_adapter_which_is_unloaded_after_the_last(tmp_path: Path) -> None:
    server, link = await started(tmp_path)
    await server._load_adapter(tmp_path / "1", "x.1")
    names = ("a", "b")
    flying = [asyncio.ensure_future(server.generate(asked(name, "x.1"))) for name in names]
    await link.until_running(*names)
    await server.pause(keep=True)
    await server._load_adapter(tmp_path / "2", "x.2")
    assert link.adapters == {"of-another-run", "x.1", "x.2"}
    link.end("a")
    link.end("b")
    assert [(await one).labels for one in flying] == [[("x.1", 0, 1)]] * 2
    assert link.adapters == {"of-another-run", "x.2"}
    late = asyncio.ensure_future(server.generate(asked("c", "x.1")))  # asked for before the flip
    await link.until_running("c")
    link.end("c")
    assert (await late).labels == [("x.2", 0, 1)]
    assert await server.label() == "x.2"
    await server.close()
    assert link.adapters == {"of-another-run"}


async def test_without_keep_the_own_samples_alone_are_cut_off(tmp_path: Path) -> None:
    server, link = await started(tmp_path)
    await server._load_adapter(tmp_path / "1", "x.1")
    link.running["of-another-run"] = asyncio.Future()
    flying = asyncio.ensure_future(server.generate(asked("a", "x.1")))
    await link.until_running("a")
    await server.pause(keep=False)
    assert (await flying).finish == "abort"
    assert not link.running["of-another-run"].done()


async def test_a_server_that_has_lost_its_adapters_is_noticed(tmp_path: Path) -> None:
    server, link = await started(tmp_path)
    await server.set_label("x.-1")
    assert await server.label() == "x.-1"
    await server._load_adapter(tmp_path / "1", "x.1")
    link.adapters.clear()
    assert await server.label() != "x.1"


async def test_a_server_that_loads_no_adapters_is_refused(tmp_path: Path) -> None:
    server, link = await started(tmp_path)
    link.status = 404
    with pytest.raises(ConfigError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        await server.start()
