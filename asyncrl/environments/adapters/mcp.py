"""Tools of MCP servers, by the official package `mcp`: over stdio, or streamable HTTP.

    agent:
      environment: asyncrl.environments.adapters.mcp:McpTools
      options:
        servers:
          files: {command: npx, args: [-y, "@modelcontextprotocol/server-filesystem", /data], tools: [read_file]}
          search: {url: "http://127.0.0.1:8000/mcp", key_variable: SEARCH_KEY}

    reset ──▸ a session with each server ── its tools ──▸ the chat template
    turn ── calls ──▸ their servers, concurrently ── texts ──▸ next turn        a turn without calls ends the rollout

All sessions of a process live in one thread of their own, which no environment blocks.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import cache
from typing import Any, TypeVar

from asyncrl.config.rules import require
from asyncrl.environments.adapters import imported
from asyncrl.errors import ConfigError
from asyncrl.generator.agents.chat import Message
from asyncrl.generator.agents.env import ToolEnvironment
from asyncrl.generator.agents.tool_formats import ToolCall
from asyncrl.generator.agents.tools import ToolError
from asyncrl.generator.engines.http.http_link import key_from
from asyncrl.types import Task

Result = TypeVar("Result")
ServerOptions = Mapping[str, Any]

KEYS = {
    "command": ("command", "args", "env", "cwd", "tools"),
    "url": ("url", "headers", "key_variable", "tools"),
}
"""Keys of a server that is started, and of one that runs already."""
CHECK_S = 60.0
"""Longest start of a server, when it is checked before the run."""


class McpTools(ToolEnvironment):
    """The tools of some servers. Each server checks the arguments of its tools itself.

    servers     by names of your choice. {command, args, env, cwd} starts one for each session; {url, headers,
                key_variable} names one that runs, with the environment variable that has its bearer token. tools: the
                names of those to show; none: all
    shared      one session for all rollouts of a process, for servers whose answers depend on the call alone
    role        of the answers
    deadline_s  of one call
    chars       most characters of an answer
    """

    def __init__(
        self,
        servers: Mapping[str, ServerOptions],
        shared: bool = False,
        role: str = "tool",
        deadline_s: float = 60.0,
        chars: int = 8192,
    ) -> None:
        super().__init__([], role, deadline_s=deadline_s, most_chars=chars)
        self._servers, self._deadline_s = servers, deadline_s
        self.stateless = self._shared = shared
        self._sessions: list[_Session] = []

    @classmethod
    def check(cls, servers: Mapping[str, ServerOptions], **_: Any) -> None:
        """Open a session with each server."""
        imported("mcp", "mcp")
        require(bool(servers), "servers", dict(servers), "names no server", "set servers.NAME.url")
        names: Counter[str] = Counter()
        for name, server in servers.items():
            _check_keys(name, server)
            tools = _tools_of(name, server)
            for absent in set(server.get("tools", ())) - set(tools):
                key, remedy = f"servers.{name}.tools", f"choose of {[*tools]}"
                raise ConfigError(key, absent, "is no tool of it", remedy)
            names.update([*_chosen(server, tools)])
        twice, remedy = [name for name in names if names[name] > 1], "set servers.NAME.tools, without them"
        require(not twice, "servers", twice, "are tools of two servers", remedy)

    async def reset(self, task: Task) -> Sequence[Message]:
        await self.close()
        make = _shared_session if self._shared else _Session
        self._sessions = [make(server) for server in self._servers.values()]
        await asyncio.gather(*(_there(session.open()) for session in self._sessions))
        chosen = [_chosen(session.server, session.tools) for session in self._sessions]
        self.tools = [schema for tools in chosen for schema in tools.values()]
        pairs = zip(self._sessions, chosen, strict=True)
        self._session_of = {name: session for session, tools in pairs for name in tools}
        return await super().reset(task)

    async def close(self) -> None:
        if not self._shared:
            await asyncio.gather(*(_there(session.close()) for session in self._sessions))

    async def _call(self, call: ToolCall) -> str:
        session = self._session_of.get(call.name)
        if session is None:
            raise ToolError(f"There is no tool {call.name!r}. There are: {', '.join(self._session_of)}.")
        try:
            async with asyncio.timeout(self._deadline_s):
                result = await _there(session.call(call.name, dict(call.arguments)))
        except TimeoutError:
            raise ToolError(f"{call.name} took longer than {self._deadline_s:g} s.", late=True) from None
        text = self._toolbox.cut("\n".join(map(_text, result.content)))
        if result.is_error:
            raise ToolError(text)
        return text


class _Session:
    """A session with one server, in the thread of sessions. tools: schemas by name, once it is open · lost: it gives no
    more answers."""

    def __init__(self, server: ServerOptions) -> None:
        self.server, self.lost = server, False
        self.tools: dict[str, dict[str, Any]] = {}
        self._ready, self._closing = asyncio.Event(), asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._client: Any = None
        self._error: Exception | None = None

    async def open(self) -> None:
        """Raises what the package raises, if it does not open."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        await self._ready.wait()
        if self._error is not None:
            raise self._error

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Raises ToolError for a call that the server refuses, and other errors if the connection is lost."""
        mcp, types = imported("mcp", "mcp"), imported("mcp_types", "mcp")
        try:
            return await self._client.call_tool(name, arguments)
        except Exception as error:
            if isinstance(error, mcp.MCPError) and error.code != types.CONNECTION_CLOSED:
                raise ToolError(error.message) from None
            self.lost = True
            raise

    async def close(self) -> None:
        self._closing.set()
        if self._running is not None:
            if not self._ready.is_set():
                self._running.cancel()
            await asyncio.wait([self._running])

    async def _run(self) -> None:
        """Open and close in one task, as the package requires."""
        client = imported("mcp", "mcp").Client
        try:
            async with AsyncExitStack() as stack:
                self._client = await stack.enter_async_context(client(await _transport(self.server, stack)))
                self.tools = {tool.name: _schema(tool) async for tool in _listed(self._client)}
                self._ready.set()
                await self._closing.wait()
        except Exception as error:
            self._error, self.lost = error, True
        finally:
            self._ready.set()


_shared: dict[str, _Session] = {}
_sharing = threading.Lock()


def _shared_session(server: ServerOptions) -> _Session:
    """The session of this process with a server; a new one if it is lost."""
    with _sharing:
        key = json.dumps(server, sort_keys=True)
        if key not in _shared or _shared[key].lost:
            _shared[key] = _Session(server)
        return _shared[key]


async def _listed(client: Any) -> AsyncIterator[Any]:
    """The tools of a server, which lists them page by page."""
    page = await client.list_tools()
    while True:
        for tool in page.tools:
            yield tool
        if page.next_cursor is None:
            return
        page = await client.list_tools(cursor=page.next_cursor)


def _tools_of(name: str, server: ServerOptions) -> dict[str, dict[str, Any]]:
    """The tools of a server by name, by a session of their own. Raises ConfigError."""
    session = _Session(server)
    try:
        _begin(session.open()).result(CHECK_S)
    except Exception as error:
        rule, remedy = f"gives no session ({_cause(error)})", "start the server by hand to see why"
        raise ConfigError(f"servers.{name}", dict(server), rule, remedy) from None
    finally:
        _begin(session.close()).result(CHECK_S)
    return session.tools


def _check_keys(name: str, server: ServerOptions) -> None:
    kinds = [kind for kind in KEYS if kind in server]
    rule, remedy = "is neither a command nor a URL", f"set servers.{name}.command or servers.{name}.url"
    require(len(kinds) == 1, f"servers.{name}", dict(server), rule, remedy)
    for key in set(server) - set(KEYS[kinds[0]]):
        remedy = f"choose of {KEYS[kinds[0]]}"
        raise ConfigError(f"servers.{name}.{key}", server[key], "is no key of such a server", remedy)
    key_from(server.get("key_variable"), f"servers.{name}.key_variable")


async def _transport(server: ServerOptions, stack: AsyncExitStack) -> Any:
    """The transport, in the form that `mcp.Client` takes."""
    mcp = imported("mcp", "mcp")
    if "command" in server:
        return mcp.StdioServerParameters(**{key: server[key] for key in server if key != "tools"})
    headers = dict(server.get("headers", {}))
    if (key := key_from(server.get("key_variable"), "key_variable")) is not None:
        headers["Authorization"] = f"Bearer {key}"
    httpx2, http = imported("httpx2", "mcp"), imported("mcp.client.streamable_http", "mcp")
    client = httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(30.0, read=None))
    await stack.enter_async_context(client)
    return http.streamable_http_client(server["url"], http_client=client)


def _schema(tool: Any) -> dict[str, Any]:
    """A tool's schema, in the form that chat templates take."""
    described = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": described}


def _chosen(server: ServerOptions, tools: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: schema for name, schema in tools.items() if name in server.get("tools", tools)}


def _text(block: Any) -> str:
    """The text of a part of a result, or the name of a part that has none."""
    if block.type == "resource":
        block = block.resource
    text: str = getattr(block, "text", None) or f"[{getattr(block, 'uri', block.type)}]"
    return text


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@cache
def _sessions_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop


def _begin(work: Coroutine[Any, Any, Result]) -> Future[Result]:
    """Begin work in the thread of sessions."""
    return asyncio.run_coroutine_threadsafe(work, _sessions_loop())


async def _there(work: Coroutine[Any, Any, Result]) -> Result:
    """Do work in the thread of sessions, and cancel it if the caller is cancelled."""
    return await asyncio.wrap_future(_begin(work))
