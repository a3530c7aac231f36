"""A model that judges, behind an OpenAI-compatible endpoint, with a cache of its replies and a budget.

messages ──▸ cache ── miss ──▸ one of `concurrency` ──▸ budget ──▸ POST {url}/chat/completions ──▸ read ──▸ cache
               └─▸ verdict      └── no answer, 5xx, 429, a reply that `read` refuses: again, after a pause
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

from asyncrl.config.rules import Amount, Count, NotNegative, Rule, Seconds, Section, as_section, key
from asyncrl.errors import RewardFailedError
from asyncrl.generator.engines.http import http_link
from asyncrl.generator.engines.http.http_link import HttpLink, ServerRefusedError, UnreachableError, parsed
from asyncrl.rewards.judge_folder import Budget, ReplyCache

T = TypeVar("T")
Messages = list[dict[str, str]]

BUSY = (408, 409, 425, 429)
"""Refusals that may end by themselves."""

PAUSES_S = (0.5, 30.0)
"""Seconds before the second try, doubled before each further one; and their limit."""


MOST_TOKENS = 1 << 30
"""A higher count of tokens in one reply is not believed."""


class BudgetSpentError(Exception):
    """No more requests may be made."""


@dataclass(frozen=True)
class EndpointConfig(Section):
    """The option `endpoint` of judges."""

    url: str = key("", "of the API, e.g. http://127.0.0.1:8000/v1")
    model: str = key("", "its name there")
    key_variable: str | None = key(None, "environment variable with the API key")
    temperature: NotNegative = 0.0
    max_tokens: Count = key(1024, "of one reply")
    extra: dict[str, Any] = key({}, "further fields of each request, e.g. response_format")
    deadline_s: Seconds = key(30.0, "of one request")
    retries: Amount = key(3, "requests after one that failed, or whose reply cannot be read")
    concurrency: Count = key(16, "requests at once, of each process")
    folder: str | None = key(None, "of replies and of what was spent, for all processes of a host", home=True)
    cache_mb: Count = key(256, "of replies in the folder; those that were not used for longest go first")
    max_calls: Count | None = key(None, "requests of all who share the folder, in all runs")
    max_total_tokens: Count | None = key(None, "of prompts and replies together, likewise")
    on_spent: Literal["fail", "stop"] = key(
        "fail", "fail: calls fail, as reward.on_failure has it; stop: the run ends"
    )

    def rules(self, at: str) -> Iterator[Rule]:
        fits = self.url.startswith(("http://", "https://"))
        yield Rule(fits, "url", "is no URL of an endpoint", "set it, e.g. to http://127.0.0.1:8000/v1")
        yield Rule(bool(self.model), "model", "names no model", "set the name by which the endpoint has it")


class Endpoint:
    """One endpoint, for one event loop. options: those of `EndpointConfig`. Raises ConfigError for wrong ones."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._config = config = as_section(EndpointConfig, "endpoint", options)
        http_link.check_aiohttp("endpoint.url", config.url)
        self._key = http_link.key_from(config.key_variable, "endpoint.key_variable")
        folder = Path(config.folder) if config.folder else None
        self._cache = folder and ReplyCache(folder, config.cache_mb << 20)
        self._budget = Budget(folder)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._link: HttpLink | None = None
        self._users = 0

    async def verdict(self, messages: Messages, read: Callable[[str], T]) -> T:
        """The result of `read` for the model's reply, or for that to an equal request before.

        read: raises ValueError for a reply without a verdict. Raises UnreachableError once all tries have failed,
        ServerRefusedError, BudgetSpentError, and RewardFailedError for a spent budget that ends the run.
        """
        config = self._config
        drawn = {"model": config.model, "temperature": config.temperature, "max_tokens": config.max_tokens}
        body = {**config.extra, **drawn, "messages": messages}
        request = json.dumps([config.url, body], sort_keys=True)
        name = hashlib.blake2b(request.encode(), digest_size=32).hexdigest()
        async with self._locks.setdefault(name, asyncio.Lock()):  # of equal requests, only the first is sent
            if self._cache and (known := await asyncio.to_thread(self._cache.get, name)) is not None:
                with suppress(UnreachableError):
                    return parsed(known, read)
            reply, verdict = await self._tries(body, read)
            if self._cache:
                await asyncio.to_thread(self._cache.put, name, reply)
            return verdict

    async def _tries(self, body: Mapping[str, Any], read: Callable[[str], T]) -> tuple[str, T]:
        pause_s, longest_s = PAUSES_S
        for _ in range(self._config.retries):
            try:
                return await self._once(body, read)
            except UnreachableError:
                pass
            except ServerRefusedError as error:
                if error.status not in BUSY:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        return await self._once(body, read)

    async def _once(self, body: Mapping[str, Any], read: Callable[[str], T]) -> tuple[str, T]:
        async with self._slots, self._connected() as link:
            self._begin_call()
            answer = await link.post_once("/chat/completions", body, self._config.deadline_s)
        reply = parsed(answer, lambda fields: str(fields["choices"][0]["message"]["content"]))
        # Where the endpoint counts no tokens, or no number that can be, each character is one.
        characters = len(json.dumps(body["messages"])) + len(reply)
        used = parsed(answer, lambda fields: (fields.get("usage") or {}).get("total_tokens"))
        self._budget.add(tokens=used if type(used) is int and 0 < used < MOST_TOKENS else characters)
        return reply, parsed(reply, read)

    def _begin_call(self) -> None:
        config, spent = self._config, self._budget.add(calls=1)
        for name, count, most in (
            ("max_calls", spent["calls"] - 1, config.max_calls),
            ("max_total_tokens", spent["tokens"], config.max_total_tokens),
        ):
            if most is not None and count >= most:
                self._budget.add(calls=-1)
                why = f"endpoint.{name}={most} of {config.model} is spent"
                if config.on_spent == "stop":
                    raise RewardFailedError(
                        f"{why}. Remedy: raise it, or remove spent.json from endpoint.folder"
                    )
                raise BudgetSpentError(why)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[HttpLink]:
        """The connections close when no request is under way: nobody closes a reward function in its event loop."""
        if self._link is None:
            self._link = HttpLink("a judge", self._config.url, self._config.deadline_s, self._key)
            await self._link.open()
        link, self._users = self._link, self._users + 1
        try:
            yield link
        finally:
            self._users -= 1
            if not self._users:
                self._link = None
                await link.close()
