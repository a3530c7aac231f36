"""The server that programs call, one for each generator process.

    program ── POST, its key ──▸ api.parse ──▸ ProgramSession.reply ──▸ engine ──▸ the rollout's record ──▸ queue
    program ◂─ the turn ──────── api.body ◂───────────┘

A request waits for the engine alone. The program waits for the request; `harness.py` waits for the program.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from asyncrl.config.sections.agent import AgentConfig, GatewayConfig
from asyncrl.counter_rng import stream_key
from asyncrl.errors import ConfigError
from asyncrl.generator.agents.call_parsers import CallParser
from asyncrl.generator.agents.chat import Chat
from asyncrl.generator.agents.history import opened_thoughts
from asyncrl.generator.agents.tool_formats import parts_of
from asyncrl.generator.agents.trajectory import SEEDS, Trajectory, TurnRequests
from asyncrl.generator.agents.trajectory_entries import NO_ROOM, ContextEntry, EndReason
from asyncrl.generator.engines.engine import PromptTooLongError, Sampler
from asyncrl.generator.gateway.anthropic_messages import AnthropicMessages
from asyncrl.generator.gateway.call_record import CallRecord, RecordedTurn
from asyncrl.generator.gateway.conversation import (
    Api,
    ApiReply,
    Conversation,
    ReplyCall,
    RequestRefusedError,
    digest_after,
    server_sent,
)
from asyncrl.generator.gateway.openai_chat import ChatCompletions, openai_error
from asyncrl.generator.gateway.openai_responses import Responses
from asyncrl.generator.scoring.steps import state_hash
from asyncrl.generator.threads import in_thread
from asyncrl.rpc.sockets import allow_open_files
from asyncrl.telemetry import tracing
from asyncrl.types import Array

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)

APIS: tuple[Api, ...] = (ChatCompletions(), Responses(), AnthropicMessages())

LARGEST_BODY = 16 << 20
"""Bytes of a request."""
MOST_AT_ONCE = 64
"""Requests of one rollout under way."""
BACKLOG = 1024
"""Connections that wait to be accepted: all programs may start at once."""
SHUTDOWN_S = 1.0
ANSWERS = frozenset({"tool", "user"})
"""Roles of messages that may follow a turn in the same segment."""
UNTEMPLATED = (jinja2.TemplateError, KeyError, RecursionError, TypeError, ValueError)
"""Errors of chat templates at messages that they have no place for."""


@dataclass(frozen=True, slots=True)
class ProgramPolicy:
    """Makes the turns of all rollouts.

    max_length  most tokens of a segment
    counts      for the metrics agent/<name>
    calls       finds the calls in a turn
    marks       texts that open a call
    """

    engine: Sampler
    chat: Chat
    config: AgentConfig
    max_length: int
    counts: Counter[str]
    calls: CallParser
    marks: Sequence[str]


class ProgramSession:
    """The requests of one program that plays a rollout, or the rest of one.

    changed  called after each turn
    failed   set to the engine's error, which ends the rollout
    limit    the limit that the last request went beyond; None again after a new turn
    handlers tasks of the server that answer it
    """

    def __init__(
        self, policy: ProgramPolicy, record: CallRecord, requests: TurnRequests, changed: Callable[[], None]
    ) -> None:
        self._policy, self._record, self._requests, self._changed = policy, record, requests, changed
        self._loop = asyncio.get_running_loop()
        record.begin_again()
        self._begun = Counter(turn.asked for turn in record.turns)
        self._under_way, self._given_up, self._quiet_since = 0, 0, self._loop.time()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self.limit: EndReason | None = None
        self.handlers: set[asyncio.Task[Any]] = set()

    @property
    def quiet_s(self) -> float:
        """Seconds since the last turn was given, without the engine's time; 0 while a turn is made."""
        return 0.0 if self._under_way else self._loop.time() - self._quiet_since

    async def reply(self, conversation: Conversation, repeated: bool) -> ApiReply:
        """A turn: the recorded one where the program was started anew or has `repeated` its request, else a new one.

        Raises RequestRefusedError.
        """
        self._check(conversation)
        record, digests = self._record, conversation.digests()
        if (index := record.again(digests[-1])) is not None:
            self._quiet_since = self._loop.time()
        elif repeated:
            index = record.last_given(digests[-1])
        if index is not None:
            self._policy.counts["agent/given_again"] += 1
            return self._reply(index, record.turns[index], conversation)
        about = {"task": self._requests.ordinal, "sample": self._requests.sample}
        with self._making(), tracing.span("gateway", "turn", tracing.RESOLUTION_S, **about):
            turn = await self._new_turn(conversation, digests)
        reply = self._reply(len(record.turns), turn, conversation)
        record.add(replace(turn, answered=digest_after(digests[-1], reply.message)))
        self._quiet_since = self._loop.time()
        self._changed()
        return reply

    def _check(self, conversation: Conversation) -> None:
        run = self._requests.sampling
        if any(value != getattr(run, name, None) for name, value in conversation.sampling.items()):
            self._policy.counts["agent/other_sampling"] += 1
        if self._under_way >= MOST_AT_ONCE:
            raise RequestRefusedError(f"{MOST_AT_ONCE} requests of this rollout are under way", status=429)

    async def _new_turn(self, conversation: Conversation, digests: Sequence[bytes]) -> RecordedTurn:
        """A turn for the record, still without the hash of its reply."""
        most = self._policy.config.max_turns
        if self._record.given + self._given_up + self._under_way > most:
            raise self._over("max_turns", f"the rollout has had agent.max_turns={most} turns", "max_turns")
        parent, context = await in_thread(self._context, conversation, digests)
        before = self._record.line(parent)
        state = state_hash(np.concatenate([before.ids, context]).tobytes())
        read = Trajectory([*before.own, ContextEntry(context, state)])
        await self._sample(read, conversation, digests[-1])
        self.limit = None
        return RecordedTurn(parent, digests[-1], b"", Trajectory(read.entries[len(before.own) :]))

    def _context(self, conversation: Conversation, digests: Sequence[bytes]) -> tuple[int, Array]:
        """The turn that the conversation continues, or -1, and the tokens behind it."""
        chat, record = self._policy.chat, self._record
        parent, count = record.continued(digests)
        try:
            new = conversation.messages[count:]
            if parent >= 0 and new and all(message["role"] in ANSWERS for message in new):
                return parent, chat.after(new, self._said(record.turns[parent].entries)[1])
            return -1, chat.open_again(conversation.messages, conversation.tools)
        except UNTEMPLATED as error:
            raise RequestRefusedError(
                f"the chat template has no place for this: {error!r}", "messages"
            ) from error

    def _said(self, turn: Trajectory) -> tuple[Array, int | None]:
        """(tokens, end): as `Chat.split_end`; all tokens and None for a turn that a limit cut."""
        words = turn.last_words
        return (words, None) if turn.cut else self._policy.chat.split_end(words, self._requests.sampling.stop)

    async def _sample(self, read: Trajectory, conversation: Conversation, asked: bytes) -> None:
        """Add the policy's tokens, in as many requests as interruptions make necessary. read: what it reads"""
        most = self._policy.max_length
        if read.length >= most:
            raise self._over("total_tokens", f"the conversation leaves no room for a turn in {most} tokens")
        requests = self._requests_of(asked)
        turn_most = min(requests.sampling.max_tokens, conversation.max_tokens or LARGEST_BODY)
        try:
            while (left := min(turn_most - len(read.last_words), most - read.length)) > 0:
                (turn,) = await self._policy.engine.sample(requests.request(read, left))
                read.add_turn(turn)
                if turn.finish != "abort":
                    return
        except PromptTooLongError as error:
            raise self._over("total_tokens", str(error)) from error
        except Exception as error:
            if not self.failed.done():
                self.failed.set_exception(error)
            raise RequestRefusedError("the engine failed", status=500) from error
        read.add(NO_ROOM)

    def _requests_of(self, asked: bytes) -> TurnRequests:
        """The requests for one turn. Their name and their draws are its own, also where a program makes equal
        requests."""
        self._begun[asked] += 1
        number, requests = self._begun[asked], self._requests
        seed = int(stream_key(requests.sampling.seed, int.from_bytes(asked[:7], "big"), number)) & SEEDS
        name = f"{requests.request_id}/{asked.hex()}-{number}"
        return replace(requests, request_id=name, sampling=replace(requests.sampling, seed=seed))

    def _over(self, limit: EndReason, why: str, code: str = "context_length_exceeded") -> RequestRefusedError:
        self.limit = limit
        return RequestRefusedError(why, "messages", code=code)

    def _reply(self, index: int, turn: RecordedTurn, conversation: Conversation) -> ApiReply:
        """index: of the turn in the record"""
        tools = conversation.tools if conversation.reads_calls else ()
        entries = turn.entries
        policy, size = self._policy, len(entries.last_words)
        words, _ = self._said(entries)
        text, end = policy.chat.text_of(words), policy.chat.text_of(entries.last_words[len(words) :])
        calls = policy.calls(text, end, tools) if tools else ()
        parts = parts_of(opened_thoughts(policy.chat) + text, calls, policy.marks)
        policy.counts["agent/malformed"] += parts.malformed
        return ApiReply(
            f"{self._requests.ordinal}-{self._requests.sample}-{index}",
            parts.thoughts,
            policy.chat.control.removed(parts.text),
            tuple(
                ReplyCall(f"call{index << 8 | number:05x}", call.name, call.arguments)
                for number, call in enumerate(parts.calls)
            ),
            "length" if entries.cut else "stop",
            len(self._record.line(turn.parent).ids) + entries.length - size,
            size,
        )

    @contextmanager
    def _making(self) -> Iterator[None]:
        """Entered while the engine makes a turn: this time does not count for the program's deadline. A turn that the
        program gives up counts for `agent.max_turns`."""
        self._under_way, began = self._under_way + 1, self._loop.time()
        try:
            yield
        except asyncio.CancelledError:
            self._given_up += 1
            raise
        finally:
            now = self._loop.time()
            self._under_way, self._quiet_since = (
                self._under_way - 1,
                min(now, self._quiet_since + now - began),
            )


class Gateway:
    """The server. `start` comes first. address: (host, port), once it has started"""

    def __init__(self, config: GatewayConfig, counts: Counter[str]) -> None:
        self._config, self._counts = config, counts
        self._sessions: dict[str, tuple[str, ProgramSession]] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self.url = ""

    async def start(self) -> None:
        """Raises ConfigError where it cannot listen."""
        async with self._starting:
            if self._runner is None:
                await self._listen()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, session: ProgramSession) -> str:
        """The key of a rollout, which is valid until `end`."""
        name, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
        self._sessions[name] = secret, session
        return f"{name}.{secret}"

    def end(self, key: str) -> None:
        """Cancels its requests under way."""
        _, session = self._sessions.pop(key.partition(".")[0])
        for handler in session.handlers:
            handler.cancel()

    async def _listen(self) -> None:
        from aiohttp import web  # takes long

        app = web.Application(client_max_size=LARGEST_BODY)
        for api in APIS:
            app.router.add_post(api.path, partial(self._answer, api))
        app.router.add_route("*", "/{path:.*}", self._unknown)
        # Its log would have the addresses of requests.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        host, port = self._config.host, self._config.port
        try:
            await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        except OSError as error:
            await runner.cleanup()
            remedy = "set agent.gateway.port=0, which takes a free one, and an address of this machine"
            raise ConfigError(
                "agent.gateway", f"{host}:{port}", f"cannot be listened on: {error}", remedy
            ) from error
        self._runner = runner
        allow_open_files()
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{runner.addresses[0][1]}"
        log.info("programs reach the policy at %s", self.url)

    async def _answer(self, api: Api, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        try:
            with self._handling(request) as session:
                conversation = api.parse(await _body(request))
                repeated = request.headers.get("x-stainless-retry-count", "0") != "0"
                reply = await session.reply(conversation, repeated)
        except RequestRefusedError as error:
            self._counts[f"agent/refused/{error.status}"] += 1
            return web.json_response(api.error(error), status=error.status)
        now = int(time.time())
        if not conversation.stream:
            return web.json_response(api.body(conversation, reply, now))
        body = server_sent(api.events(conversation, reply, now))
        return web.Response(body=body, content_type="text/event-stream", charset="utf-8")

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        paths = ", ".join(f"POST {api.path}" for api in APIS)
        error = RequestRefusedError(f"{request.method} {request.path}: there are {paths}", status=404)
        return web.json_response(openai_error(error), status=404)

    @contextmanager
    def _handling(self, request: web.Request) -> Iterator[ProgramSession]:
        """The session whose key the request has. Raises RequestRefusedError without one."""
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        name, _, shown = request.headers.get("x-api-key", bearer).partition(".")
        secret, session = self._sessions.get(name, ("", None))
        same = hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), secret.encode())
        if session is None or not same:
            raise RequestRefusedError(
                "the API key is that of no rollout under way", status=401, code="invalid_api_key"
            )
        handler = asyncio.current_task()
        assert handler is not None
        session.handlers.add(handler)
        try:
            yield session
        finally:
            session.handlers.discard(handler)


async def _body(request: web.Request) -> bytes:
    from aiohttp import web

    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        why = f"the request has more than {LARGEST_BODY} bytes"
        raise RequestRefusedError(why, status=413) from None
