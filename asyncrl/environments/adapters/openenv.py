"""Environments that run as OpenEnv servers, over their WebSocket; the package itself is not needed.

    agent:
      environment: asyncrl.environments.adapters.openenv:OpenEnv
      options: {url: "http://127.0.0.1:8000", act: message, show: echoed_message}

A rollout has a session of its own: the server must allow as many as a generator has rollouts under way
(`max_concurrent_envs`). Environments that offer tools by MCP inside of OpenEnv are not supported.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.rules import require
from asyncrl.environments.adapters import imported
from asyncrl.environments.turns import answer, opening
from asyncrl.errors import ConfigError
from asyncrl.generator.agents.chat import Message
from asyncrl.generator.agents.env import Action, Environment, Observation
from asyncrl.types import Task

CHECK_S = 10.0
"""Longest wait for the server's answer, when it is checked before the run."""
BAD_ACTION = "VALIDATION_ERROR"


class OpenEnv(Environment):
    """A turn is an action, and the messages show the observation.

    url    of the server
    act    the field of the action that gets the text of a turn, or file.py:function: (text) -> the action's fields
    show   the field of the observation that is shown, or file.py:function: (observation) -> text; none: all, as JSON

    `reset` gets the task's fields, and its ordinal as the seed if it has no field `seed`. A turn that is no action
    counts as `malformed`, and is answered with the reason.
    """

    def __init__(self, url: str, act: str, show: str | None = None) -> None:
        super().__init__()
        self._url = url.rstrip("/")
        self._session: Any = None
        self._socket: Any = None
        self._act: Any = load_function(act, "act") if ":" in act else lambda text: {act: text}
        self._show: Any = _json
        if show is not None:
            self._show = load_function(show, "show") if ":" in show else lambda seen: str(seen[show])

    @classmethod
    def check(cls, url: str, act: str, show: str | None = None) -> None:
        """Compare the fields with the server's schemas."""
        imported("aiohttp", "server")
        try:
            with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=CHECK_S) as reply:
                schemas = json.load(reply)
        except (OSError, ValueError) as error:
            rule = f"has no OpenEnv server ({error})"
            raise ConfigError("url", url, rule, "start it before the run") from None
        for key, value, kind in (("act", act, "action"), ("show", show, "observation")):
            if value is not None and ":" in value:
                load_function(value, key)
            elif value is not None:
                fields, rule = [*schemas[kind].get("properties", {})], f"is no field of the {kind}s there"
                require(value in fields, key, value, rule, f"choose of {fields}")

    async def reset(self, task: Task) -> Sequence[Message]:
        await self.close()
        aiohttp = imported("aiohttp", "server")
        session = self._session = aiohttp.ClientSession()
        self._socket = await session.ws_connect(f"{self._url}/ws", max_msg_size=0)
        data = await self._reply("reset", {"seed": task.ordinal, **task.data})
        return opening(task, self._show(data["observation"]))

    async def step(self, action: Action) -> Observation:
        try:
            data = await self._reply("step", self._act(action.text))
        except BadActionError as error:
            self.counts["malformed"] += 1
            return answer(f"That is no action: {error}")
        shown = self._show(data["observation"])
        return answer(shown, float(data["reward"] or 0.0), bool(data["done"]), shown)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _reply(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Raises BadActionError for an action that does not fit the environment's schema."""
        await self._socket.send_json({"type": kind, "data": data})
        reply = await self._socket.receive_json()
        answer: dict[str, Any] = reply["data"]
        if reply["type"] == "observation":
            return answer
        if kind == "step" and answer["code"] == BAD_ACTION:
            raise BadActionError("; ".join(f"{_where(error)}: {error['msg']}" for error in answer["errors"]))
        raise RuntimeError(f"{answer['code']}: {answer['message']}")


class BadActionError(Exception):
    """The text names the faults of an action."""


def _json(seen: Mapping[str, Any]) -> str:
    return json.dumps({key: seen[key] for key in seen if key != "metadata"}, ensure_ascii=False)


def _where(error: Mapping[str, Any]) -> str:
    return ".".join(map(str, error["loc"])) or "the action"
