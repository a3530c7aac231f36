"""The server behind the page: answers about runs as JSON, pictures, and the page's own files. It only reads.

    browser ── Host, token ──▸ guard ──▸ /              the page
                                 │       /static/NAME   its files, by name
                                 │       /api/…         PageData, read anew at most every READ_EVERY_S
                                 └─ 403, and no word about runs

Rollouts are written by a policy and may hold anything. They are sent as JSON alone, the page puts them into text
nodes, and its Content-Security-Policy lets no script run but its own files.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from asyncrl.config.addresses import is_loopback
from asyncrl.observability.dash.page_data import PageData, View
from asyncrl.observability.dash.page_files import FILES, STATIC

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
READ_EVERY_S = 0.5
FIND_EVERY_S = 10.0
"""Between two diagnoses, which are made beside the requests that ask for their findings."""
MOST_PIXELS = 8192
MOST_SHOWN = 200
"""Rollouts of one answer."""

Query = Any  # of a request: its parameters by name


class PageServer:
    """The pages of some runs.

    token: what each request must bring; empty for none, on loopback alone. read_every_s: between two looks at the files
    """

    def __init__(self, runs: Sequence[PageData], token: str = "", read_every_s: float = READ_EVERY_S) -> None:
        self._runs, self._token, self._read_every_s = runs, token, read_every_s
        self._reading = asyncio.Lock()
        self._read_at = self._found_at = -math.inf
        self._finding: asyncio.Task[None] | None = None

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._page)
        app.router.add_get("/static/{name:.+}", self._file)
        app.router.add_get("/api/image", self._image)
        for path, answer in (
            ("runs", self._list),
            ("state", self._state),
            ("lanes", self._lanes),
            ("span", self._span),
            ("rollouts", self._rollouts),
        ):
            app.router.add_get(f"/api/{path}", self._answers(answer))
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            if not self._allowed(request):
                raise web.HTTPForbidden(
                    text="open the address that `asyncrl dash` has printed, with its token\n"
                )
            response = await handler(request)
        except web.HTTPException as error:
            error.headers.update(HEADERS)
            raise
        response.headers.update(HEADERS)
        return response

    def _allowed(self, request: web.Request) -> bool:
        """Without a token, other sites could read by a name of theirs that leads to loopback: the name must be ours."""
        try:
            if not self._token:
                return is_loopback(request.url.host or "")
            given = request.query.get("token") or request.cookies.get(_cookie(request), "")
        except ValueError:  # a Host that is none
            return False
        return hmac.compare_digest(given.encode(errors="replace"), self._token.encode())

    async def _page(self, request: web.Request) -> web.StreamResponse:
        if "token" in request.query:  # it moves from the address into a cookie
            moved = web.Response(status=303, headers={"Location": "/"})
            moved.set_cookie(_cookie(request), self._token, httponly=True, samesite="Strict")
            return moved
        return web.Response(
            text=(STATIC / "index.html").read_text(encoding="utf-8"), content_type="text/html"
        )

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in FILES:
            raise web.HTTPNotFound(text=f"{name} is no file of the page\n")
        return web.Response(body=(STATIC / name).read_bytes(), content_type=FILES[name], charset="utf-8")

    async def _image(self, request: web.Request) -> web.StreamResponse:
        found = self._run(request.query).image(request.query.get("path", ""))
        if found is None:
            raise web.HTTPNotFound(text="no picture of this run\n")
        path, media = found
        return web.Response(body=await asyncio.to_thread(path.read_bytes), content_type=media)

    def _answers(self, answer: Callable[[Query], Any]) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            async with self._reading:
                body = await asyncio.to_thread(self._read_and, answer, request.query)
            self._find_soon()
            response = web.Response(body=body, content_type="application/json", charset="utf-8")
            response.enable_compression()
            return response

        return handle

    def _read_and(self, answer: Callable[[Query], Any], query: Query) -> bytes:
        now = time.monotonic()
        if now - self._read_at >= self._read_every_s:
            self._read_at = now
            for run in self._runs:
                run.read()
        return msgspec.json.encode(answer(query))

    def _find_soon(self) -> None:
        """Findings as of now, for the requests to come."""
        now = time.monotonic()
        if now - self._found_at >= FIND_EVERY_S and (self._finding is None or self._finding.done()):
            self._found_at, self._finding = now, asyncio.create_task(asyncio.to_thread(self._find))

    def _find(self) -> None:
        for run in self._runs:
            run.find()

    def _list(self, query: Query) -> Any:
        return [{"name": run.name, "folder": str(run.folder)} for run in self._runs]

    def _state(self, query: Query) -> Any:
        return self._run(query).state(int(_number(query, "epoch", -1)), int(_number(query, "after", 0)))

    def _lanes(self, query: Query) -> Any:
        run = self._run(query)
        first, last = run.bounds()
        start, end = _number(query, "from", first), _number(query, "to", last)
        pixels = int(_number(query, "pixels", 1000))
        if not (end > start and 1 <= pixels <= MOST_PIXELS):
            raise _refused("from, to, pixels", f"from < to, and 1 to {MOST_PIXELS} pixels")
        opened = frozenset(filter(None, query.get("open", "").split(",")))
        return run.lanes(View(start, end, pixels, opened))

    def _span(self, query: Query) -> Any:
        row, at = int(_number(query, "row", 0)), _number(query, "time", 0)
        return self._run(query).span(query.get("process", ""), query.get("lane", ""), row, at)

    def _rollouts(self, query: Query) -> Any:
        versions = _number(query, "from", 0), _number(query, "to", 1e18)
        rewards = _number(query, "least", -1e18), _number(query, "most", 1e18)
        return self._run(query).rollouts(versions, rewards, MOST_SHOWN)

    def _run(self, query: Query) -> PageData:
        at = _number(query, "run", 0)
        if at not in range(len(self._runs)):
            raise _refused("run", f"0 to {len(self._runs) - 1}")
        return self._runs[int(at)]


def _number(query: Query, name: str, default: float) -> float:
    """A finite number. An empty one is the default."""
    text = query.get(name) or ""
    try:
        value = float(text) if text else float(default)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _refused(name, "a number")
    return value


def _refused(name: str, rule: str) -> web.HTTPException:
    return web.HTTPBadRequest(text=f"{name}: {rule}\n")


def _cookie(request: web.Request) -> str:
    """Cookies of a machine are shared by its ports."""
    return f"asyncrl_{request.url.port}"
