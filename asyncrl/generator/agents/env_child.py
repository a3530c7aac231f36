"""A process that holds environments, each in a thread of its own: one that blocks stops no other.

    generator ── [call, environment, verb, argument] ──▸ main thread ──▸ the event loop of that environment's thread
              ◂── [call, outcome, value] ───────────────────────────────────────────────┘

    load      argument [spec, options]           once, before any other: the class of all environments
    reset     argument [ordinal, prompt, data]   value {messages, tools, stateless, counts}
    step      argument [text, calls as JSON]     value {observation, counts}
    at_limit  argument none                      value {reward, counts}
    close     argument none                      value {counts}

outcome: "ok"; "error" with its text; "config" with key, value, rule and remedy. The process ends with its generator.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack

from asyncrl.errors import ConfigError
from asyncrl.generator.agents.env import Action, Environment, load_environment
from asyncrl.generator.agents.tool_formats import AnyCall, BadCall, ToolCall
from asyncrl.system.signals import die_with_parent
from asyncrl.types import Task

SendReply = Callable[[int, str, Any], None]

PIECE = 1 << 16
"""Bytes read at once."""
LARGEST_ANSWER = 1 << 26
"""Bytes of one value."""


def main(descriptor: int, launcher: int) -> None:
    """descriptor: of the socket that leads to the generator, the process `launcher`."""
    die_with_parent()
    if os.getppid() == launcher:
        with socket.socket(fileno=descriptor) as connection:
            _Child(connection).run()
    os._exit(0)  # no thread that hangs delays it


class _Child:
    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self._make: Callable[[], Environment]
        self._held: dict[int, _Held] = {}

    def run(self) -> None:
        """Answer until the connection is closed."""
        unpacker = msgpack.Unpacker(strict_map_key=False)
        while piece := self._connection.recv(PIECE):
            unpacker.feed(piece)
            for call, number, verb, argument in unpacker:
                if verb == "load":
                    self._load(call, *argument)
                    continue
                if number not in self._held:
                    self._held[number] = _Held(self._make, self._reply)
                held = self._held.pop(number) if verb == "close" else self._held[number]
                held.begin(call, verb, argument)

    def _load(self, call: int, spec: str, options: Mapping[str, Any]) -> None:
        try:
            self._make = load_environment(spec, options)
        except ConfigError as error:
            self._reply(call, "config", [error.key, repr(error.value), error.rule, error.remedy])
        else:
            self._reply(call, "ok", None)

    def _reply(self, call: int, outcome: str, value: Any) -> None:
        try:
            packed = packed_frame([call, outcome, value])
            if len(packed) > LARGEST_ANSWER:
                raise ValueError(f"an answer of {len(packed)} bytes; {LARGEST_ANSWER} are allowed")
        except (TypeError, ValueError, OverflowError) as error:
            packed = packed_frame([call, "error", f"{type(error).__name__}: {error}"])
        with self._sending:
            self._connection.sendall(packed)


class _Held:
    """One environment in its thread. It is made by its first call."""

    def __init__(self, make: Callable[[], Environment], reply: SendReply) -> None:
        self._make, self._reply = make, reply
        self._environment: Environment | None = None
        self._call: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def begin(self, call: int, verb: str, argument: Any) -> None:
        """Answer a call in the environment's thread. If an earlier call still awaits something, it is cancelled."""

        def start() -> None:
            if self._call is not None:
                self._call.cancel()
            self._call = self._loop.create_task(self._answer(call, verb, argument))

        self._loop.call_soon_threadsafe(start)

    async def _answer(self, call: int, verb: str, argument: Any) -> None:
        try:
            if self._environment is None and verb != "close":
                self._environment = self._make()
            value = await getattr(self, f"_{verb}")(argument)
            counts = {} if self._environment is None else dict(self._environment.counts)
            self._reply(call, "ok", {**value, "counts": counts})
        except (Exception, SystemExit) as error:
            self._reply(call, "error", f"{type(error).__name__}: {error}")
        finally:
            if verb == "close":
                self._loop.stop()

    async def _reset(self, task: Sequence[Any]) -> dict[str, Any]:
        assert self._environment is not None
        messages = await self._environment.reset(Task(*task))
        tools, stateless = self._environment.tools, self._environment.stateless
        return {"messages": list(messages), "tools": list(tools), "stateless": stateless}

    async def _step(self, action: Sequence[Any]) -> dict[str, Any]:
        assert self._environment is not None
        text, calls = action
        observed = await self._environment.step(Action(text, read_calls(calls)))
        fields = dataclasses.fields(observed)
        return {"observation": {field.name: getattr(observed, field.name) for field in fields}}

    async def _at_limit(self, _: None) -> dict[str, Any]:
        assert self._environment is not None
        return {"reward": await self._environment.at_limit()}

    async def _close(self, _: None) -> dict[str, Any]:
        if self._environment is not None:
            await self._environment.close()
        return {}


def call_texts(calls: Sequence[AnyCall]) -> str:
    """Calls as JSON, because msgpack does not hold all numbers and characters that a model may write into arguments."""
    return f"[{','.join(map(_call_text, calls))}]"


def _call_text(call: AnyCall) -> str:
    if isinstance(call, BadCall):
        return json.dumps([None, call.problem])
    try:
        return json.dumps([call.name, call.arguments])
    except RecursionError:
        return json.dumps([None, f"The arguments of {call.name} are nested too deeply."])


def read_calls(text: str) -> tuple[AnyCall, ...]:
    return tuple(BadCall(held) if name is None else ToolCall(name, held) for name, held in json.loads(text))


def packed_frame(frame: Sequence[Any]) -> bytes:
    """One message as bytes. Raises TypeError, ValueError or OverflowError for values that cannot be sent."""
    return bytes(msgpack.packb(frame, default=_plain))


def _plain(value: Any) -> Any:
    """A value for msgpack in place of a number of numpy, an Image of Pillow, a mapping or another sequence."""
    if hasattr(value, "item"):
        return value.item()
    if hasattr(value, "save"):
        file = io.BytesIO()
        value.convert("RGB").save(file, "PNG")
        return file.getvalue()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent to the generator")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
