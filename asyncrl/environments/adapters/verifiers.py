"""Environments of verifiers v1: a taskset, its tools and its rewards, in an interpreter that has the package.

    agent:
      environment: asyncrl.environments.adapters.verifiers:Verifiers
      environment_processes: 4
      environment_python: envs/verifiers/bin/python
      options:
        env: {taskset: {id: gsm8k}, agent: {harness: {id: "null"}, runtime: {type: subprocess}, max_turns: 8}}

    verifiers' harness ── request ─▸ endpoint on loopback ── its new messages ─▸ the policy's next turn
                       ◂─ reply ──                        ◂─ text and calls ──── turn
                       ── end of the episode ─▸ rewards by name

For its harness, the endpoint is a model's server. A request that does not continue the one before it begins a
segment of the rollout: a sub-agent, or a history that the harness compacted.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.environments.adapters import imported
from asyncrl.errors import ConfigError
from asyncrl.generator.agents.chat import Message
from asyncrl.generator.agents.env import Action, Environment, Observation
from asyncrl.generator.agents.tool_formats import ToolCall
from asyncrl.types import Task

REMEDY = "see verifiers.v1.EnvConfig; a taskset is a package of agent.environment_python"
MODEL = "policy"


class Verifiers(Environment):
    """An episode of one task.

    env   the fields of verifiers' EnvConfig, as in the block [env] of its own runs

    The field `seed` of a task, or its ordinal, is the position of verifiers' task in the taskset; its prompt is not
    used. Rewards are those of the traces that verifiers calls trainable, with their weights. verifiers does not score
    a rollout that a limit of `agent` ends; it does where a limit of `env.agent` ends it.
    """

    def __init__(self, env: Mapping[str, Any]) -> None:
        super().__init__()
        self._env = env
        self._endpoint: _Endpoint
        self._episode: asyncio.Task[Any] | None = None
        self._messages: list[Message] = []

    @classmethod
    def check(cls, env: Mapping[str, Any]) -> None:
        """Make the environment, and load its first task."""
        imported("verifiers", "verifiers")
        try:
            _task_at(_made(env), 0)
        except Exception as error:
            raise ConfigError("env", dict(env), f"{type(error).__name__}: {error}", REMEDY) from None

    async def reset(self, task: Task) -> Sequence[Message]:
        await self.close()
        made, self._endpoint = _made(self._env), _Endpoint()
        chosen = _task_at(made, int(task.data.get("seed", task.ordinal)))
        self._episode = asyncio.create_task(_play(made, chosen, await self._endpoint.start()))
        if await self._next() is not None:
            raise RuntimeError("the episode ended before its first turn")
        return self._messages

    async def step(self, action: Action) -> Observation:
        before, tools = self._messages, self.tools
        self.counts["calls"] += len(action.calls)
        self._endpoint.reply(action)
        rewards = await self._next()
        if rewards is not None:
            return Observation(reward=rewards, done=True)
        turn, new = self._messages[len(before) :][:1], self._messages[len(before) + 1 :]
        continues = self._messages[: len(before)] == before and tools == self.tools
        if continues and new and turn[0]["role"] == "assistant":
            return Observation(new)
        return Observation(prompt=self._messages)

    async def close(self) -> None:
        if self._episode is not None:
            self._episode.cancel()
            await asyncio.wait([self._episode])
            await self._endpoint.close()

    async def _next(self) -> dict[str, float] | None:
        """Wait for the next request, and keep its messages and tools; or for the end. Returns the rewards then."""
        assert self._episode is not None
        request = asyncio.create_task(self._endpoint.requests.get())
        await asyncio.wait([request, self._episode], return_when=asyncio.FIRST_COMPLETED)
        if not request.done():
            request.cancel()
            return _rewards(self._episode.result())
        body = request.result()
        self._messages, self.tools = [*map(_plain, body["messages"])], body.get("tools", ())
        return None


class _Endpoint:
    """A server of chat completions for one episode, under a secret path. Each request waits for
    `reply`."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._waiting: list[asyncio.Future[dict[str, Any]]] = []
        self._numbers = itertools.count()
        self._runner: Any = None

    async def start(self) -> str:
        """Returns the base URL."""
        web = imported("aiohttp.web", "server")
        app, secret = web.Application(client_max_size=1 << 30), secrets.token_urlsafe(16)
        app.router.add_post(f"/{secret}/v1/chat/completions", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/{secret}/v1"

    def reply(self, action: Action) -> None:
        """Answer the oldest request with a turn."""
        thoughts, _, text = action.text.rpartition("</think>")
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thoughts:
            message["reasoning_content"] = thoughts.removeprefix("<think>")
        calls = [call for call in action.calls if isinstance(call, ToolCall)]
        if calls:
            numbered = zip(calls, self._numbers, strict=False)
            message["tool_calls"] = [_wire_call(place, *each) for place, each in enumerate(numbered)]
        self._waiting.pop(0).set_result(message)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve(self, request: Any) -> Any:
        web, body = imported("aiohttp.web", "server"), await request.json()
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        self.requests.put_nowait(body)
        message = await waiting
        finish = "tool_calls" if "tool_calls" in message else "stop"
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        streams = body.get("stream", False)
        choice = {"index": 0, "delta" if streams else "message": message, "finish_reason": finish}
        kind = "chat.completion.chunk" if streams else "chat.completion"
        described = {"id": secrets.token_hex(8), "object": kind, "created": 0, "model": MODEL}
        completion = {**described, "choices": [choice], "usage": usage}
        if not streams:
            return web.json_response(completion)
        text = f"data: {json.dumps(completion)}\n\ndata: [DONE]\n\n"
        return web.Response(text=text, content_type="text/event-stream")


async def _play(made: Any, task: Any, url: str) -> Any:
    """An episode, with the policy behind the URL."""
    clients = imported("verifiers.v1.clients", "verifiers")
    client = clients.EvalClientConfig(base_url=url, api_key_var="ASYNCRL_NO_KEY")
    async with made.serving():
        return await made.run_episode(task, clients.ModelContext(model=MODEL, client=client))


def _made(env: Mapping[str, Any]) -> Any:
    loaders = imported("verifiers.v1.utils.loaders", "verifiers")
    return loaders.load_environment(loaders.resolve_env_config(dict(env)))


def _task_at(made: Any, position: int) -> Any:
    for task in itertools.islice(made.taskset, position, None):
        return task
    raise ValueError(f"the taskset has no task {position}")


def _rewards(episode: Any) -> dict[str, float]:
    """The rewards of an episode by name, weighted. Raises RuntimeError for an episode that failed."""
    errors = [*episode.errors, *itertools.chain.from_iterable(trace.errors for trace in episode.traces)]
    if not episode.ok:
        texts = [f"{error.type}: {error.message}" for error in errors]
        raise RuntimeError("; ".join(texts) or "the episode failed")
    total: Counter[str] = Counter()
    for trace in episode.traces:
        if trace.agent is None or trace.agent.trainable:
            total.update({name: reward.value for name, reward in trace.rewards.items() if reward is not None})
    return dict(total)


def _wire_call(place: int, call: ToolCall, number: int) -> dict[str, Any]:
    """place: among the calls of its turn · number: among those of the episode"""
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"index": place, "id": f"call{number:05d}", "type": "function", "function": function}


def _plain(message: Message) -> Message:
    """The message, with its parts joined into one text if all of them are texts."""
    parts = message.get("content")
    if isinstance(parts, list) and all(part.get("type") == "text" for part in parts):
        return {**message, "content": "".join(part["text"] for part in parts)}
    return message
