"""Requests to one HTTP server, their deadlines and failures.

status 2xx             its JSON, or its text
status 3xx, 4xx        ServerRefusedError: the request is at fault, repeating it does not help
5xx, no connection     UnreachableError; `get` and `post` repeat the request until `deadline_s`, then ProcessDiedError
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl.errors import ConfigError, ProcessDiedError
from asyncrl.system.packages import check_package

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

CONNECT_S = 10.0

PAUSES_S = (0.1, 2.0)
"""Between two tries of a repeated request: the first, doubled up to the last."""

LARGEST = 256 << 20
"""Most bytes of an answer."""

TEXT = 500
"""Most characters of a server's text in an error."""


class UnreachableError(Exception):
    """The server did not answer, failed, or answered something else. Worth another try."""


class ServerRefusedError(Exception):
    """The server rejects this request. status: of HTTP."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class HttpLink:
    """The connections to one server. `open` comes first. who: the client, for errors · key: the bearer token."""

    def __init__(self, who: str, url: str, deadline_s: float, key: str | None = None) -> None:
        check_aiohttp("generator.engine", "an engine behind HTTP")
        self.who, self.url = who, url.rstrip("/")
        self._deadline_s, self._key = deadline_s, key
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        import aiohttp

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),  # the engine counts its own
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Any:
        """Repeats the request: see above."""
        return await self._repeat("GET", path, None, params)

    async def post(self, path: str, body: Any = None, params: Mapping[str, str] | None = None) -> Any:
        """Repeats the request, so only for idempotent ones."""
        return await self._repeat("POST", path, body, params)

    async def post_once(self, path: str, body: Any, deadline_s: float | None = None) -> Any:
        """deadline_s: None waits as long as the server keeps the connection."""
        return await self._request("POST", path, body, None, deadline_s)

    async def get_once(self, path: str) -> Any:
        return await self._request("GET", path, None, None, self._deadline_s)

    async def _repeat(self, method: str, path: str, body: Any, params: Mapping[str, str] | None) -> Any:
        begun, (pause_s, longest_s) = time.monotonic(), PAUSES_S
        while True:
            try:
                return await self._request(method, path, body, params, self._deadline_s)
            except UnreachableError as error:
                if time.monotonic() - begun + pause_s > self._deadline_s:
                    raise ProcessDiedError(
                        f"{self.who} waited {self._deadline_s:.0f} s for the server at {self.url}: {error}"
                    ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    async def _request(
        self, method: str, path: str, body: Any, params: Mapping[str, str] | None, deadline_s: float | None
    ) -> Any:
        import aiohttp

        if self._session is None:
            raise UnreachableError("the connection was closed")
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._session.request(
                    method, self.url + path, json=body, params=params, allow_redirects=False
                ) as answer,
            ):
                return _checked(f"{method} {path}", answer.status, await _text(answer))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnreachableError(f"{method} {path}: {error!r}") from error


async def _text(answer: aiohttp.ClientResponse) -> str:
    body = bytearray()
    async for piece in answer.content.iter_chunked(1 << 16):
        body += piece
        if len(body) > LARGEST:
            raise UnreachableError(f"an answer of more than {LARGEST} bytes")
    return body.decode("utf-8", "replace")


def _checked(what: str, status: int, text: str) -> Any:
    if status >= 500:
        raise UnreachableError(f"{what}: status {status}: {text[:TEXT]}")
    if status >= 300:  # a redirect too: the key is for this server
        raise ServerRefusedError(status, f"{what}: status {status}: {text[:TEXT]}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def parsed(answer: Any, read: Callable[[Any], T]) -> T:
    """The result of `read` for an answer. Raises UnreachableError for one that it cannot read.

    >>> parsed({"a": 1}, lambda answer: answer["b"])
    Traceback (most recent call last):
    asyncrl.generator.engines.http.http_link.UnreachableError: an answer of another form, KeyError('b'): {'a': 1}
    """
    try:
        return read(answer)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UnreachableError(f"an answer of another form, {error!r}: {str(answer)[:TEXT]}") from error


def url_of(urls: list[str], name: str) -> str:
    """The server of a generator. Each updates its own, so of several generator-k uses the k-th. Raises ConfigError.

    >>> url_of(["http://a:1", "http://b:1"], "generator-1"), url_of(["http://a:1"], "mine")
    ('http://b:1', 'http://a:1')
    """
    if len(urls) == 1:
        return urls[0]
    number = re.search(r"-(\d+)$", name)
    if number is None or int(number[1]) >= len(urls):
        rule = (
            f"have no server for the generator {name!r}: one whose name ends in -K uses the one at K, from 0"
        )
        remedy = "start it with a --name that ends so, e.g. generator-0, or add its server"
        raise ConfigError("generator.server.urls", urls, rule, remedy)
    return urls[int(number[1])]


def key_from(variable: str | None, key: str = "generator.server.key_variable") -> str | None:
    """The API key in this environment variable, which `key` names. Raises ConfigError if it is not set."""
    if variable is None:
        return None
    if not (found := os.environ.get(variable)):
        rule = "names an environment variable that is not set"
        raise ConfigError(key, variable, rule, f"export {variable}=… where the processes start")
    return found


def check_aiohttp(key: str, value: str) -> None:
    """Raises ConfigError under `key` where aiohttp is not installed."""
    check_package("aiohttp", "server", key, value)


def metric_sums(text: str) -> dict[str, float]:
    """Values of Prometheus' text format by name, summed over their labels.

    >>> metric_sums('# HELP a x\\na{rank="0"} 1\\na{rank="1"} 2.5\\nb 3')
    {'a': 3.5, 'b': 3.0}
    """
    sums: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.partition("{")[0].strip().partition(" ")
        if line.startswith("#") or not name:
            continue
        value = value or line.rpartition("}")[2]
        try:
            sums[name] = sums.get(name, 0.0) + float(value.split()[0])
        except (IndexError, ValueError):
            continue
    return sums
