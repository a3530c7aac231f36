"""Environments in processes of their own, N of them (`agent.environment_processes`).

    rollout ── reset, step ──▸ the process with the fewest environments ── its answer ──▸ rollout
               close ────────▸ no answer: the environment blocks, and its process is killed
    a process ends ──▸ calls under way fail, environments without a call are lost; the next rollout starts another

A rollout waits for the answer to its own call alone, up to `agent.deadline_s`. A rollout whose environment failed, or
was lost, continues in a new one (`agent.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import msgpack

from asyncrl.errors import ConfigError
from asyncrl.generator.agents.chat import Message
from asyncrl.generator.agents.env import Action, Environment, Observation, Reward
from asyncrl.generator.agents.env_child import PIECE, call_texts, packed_frame
from asyncrl.types import Task

log = logging.getLogger(__name__)

MODULE = "asyncrl.generator.agents.env_child"

START_S = 120.0
"""Time for the start of a process on a busy machine, with the import of the environment's packages."""


class EnvironmentLostError(Exception):
    """The process of an environment ended between two of its calls: another environment ended it."""


class RaisedError(Exception):
    """An error in the process of an environment, with its text."""


class EnvironmentPool:
    """Processes that are started when they are first needed, and again when they have ended.

    counts: environment_restarts
    """

    def __init__(self, spec: str, options: Mapping[str, Any], processes: int, python: str | None) -> None:
        """spec, options: as `load_environment` · python: the interpreter; None: this one"""
        self.counts: Counter[str] = Counter()
        self._load, self._python = [spec, dict(options)], python
        self._slots = [_Slot() for _ in range(processes)]

    async def make(self) -> PooledEnvironment:
        """An environment in the process that holds the fewest, which is started if it does not run.

        Raises OSError, RaisedError or ConfigError if it does not start.
        """
        slot = min(self._slots, key=lambda one: one.environments)
        slot.environments += 1
        if slot.starting is None or slot.ended:
            self.counts["environment_restarts"] += slot.ended
            slot.starting = asyncio.create_task(self._start())
        try:
            process = await asyncio.shield(slot.starting)  # several rollouts may wait for it
        except BaseException:
            slot.environments -= 1
            raise
        return PooledEnvironment(slot, process)

    def check(self) -> None:
        """Start a process, and end it. Raises ConfigError if it does not start, or cannot make such environments."""

        async def start() -> None:
            (await self._start()).kill()

        try:
            with ThreadPoolExecutor(1) as thread:  # an event loop may run in this one
                thread.submit(asyncio.run, start()).result()
        except (OSError, RaisedError) as error:
            rule = f"no process for environments starts there ({error}; stderr has more)"
            remedy = "name an interpreter that has asyncrl, msgpack, numpy, jinja2 and jsonschema"
            raise ConfigError("agent.environment_python", self._python, rule, remedy) from None

    def close(self) -> None:
        """Kill the processes."""
        for slot in self._slots:
            if slot.process is not None:
                slot.process.kill()
            elif slot.starting is not None:
                slot.starting.cancel()

    async def _start(self) -> _Process:
        process = await _Process.start(self._python)
        try:
            async with asyncio.timeout(START_S):
                await process.request(0, "load", self._load)
        except TimeoutError:
            process.kill()
            raise RaisedError(f"has a process that did not start within {START_S:g} s") from None
        except BaseException:
            process.kill()
            raise
        return process


class _Slot:
    """A place for a process. environments: those that rollouts have in it."""

    def __init__(self) -> None:
        self.environments = 0
        self.starting: asyncio.Task[_Process] | None = None

    @property
    def process(self) -> _Process | None:
        task = self.starting
        return (
            None if task is None or not task.done() or task.cancelled() or task.exception() else task.result()
        )

    @property
    def ended(self) -> bool:
        """Whether its process has ended, or could not be started."""
        started = self.starting is not None and self.starting.done()
        return started and (self.process is None or self.process.ended)


class PooledEnvironment(Environment):
    """An environment in a process of the pool."""

    def __init__(self, slot: _Slot, process: _Process) -> None:
        super().__init__()
        self._slot, self._process, self._number = slot, process, next(process.numbers)

    async def reset(self, task: Task) -> Sequence[Message]:
        value = await self._request("reset", [task.ordinal, task.prompt, dict(task.data)])
        self.tools, self.stateless = value["tools"], value["stateless"]
        messages: list[Message] = value["messages"]
        return messages

    async def step(self, action: Action) -> Observation:
        value = await self._request("step", [action.text, call_texts(action.calls)])
        return Observation(**value["observation"])

    async def at_limit(self) -> Reward:
        reward: Reward = (await self._request("at_limit", None))["reward"]
        return reward

    async def close(self) -> None:
        """Close the environment. If the caller cancels this because it takes too long, the environment blocks, and
        its process is killed."""
        self._slot.environments -= 1
        if self._process.ended:
            return
        try:
            await self._request("close", None)
        except asyncio.CancelledError:
            self._process.kill()
            raise

    async def _request(self, verb: str, argument: Any) -> dict[str, Any]:
        value: dict[str, Any] = await self._process.request(self._number, verb, argument)
        self.counts = Counter(value["counts"])
        return value


class _Process:
    """One process, and the calls that it has not answered.

    numbers: of new environments · ended: it was killed, or ended by itself
    """

    def __init__(
        self, process: asyncio.subprocess.Process, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        self._process, (self._reader, self._writer) = process, streams
        self._calls = itertools.count()
        self.numbers, self.ended = itertools.count(), False
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read())

    @staticmethod
    async def start(python: str | None) -> _Process:
        """Raises OSError."""
        ours, theirs = socket.socketpair()
        own = {} if python else {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(python or sys.executable, "-m", MODULE, str(theirs.fileno()), str(os.getpid())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # what environments print
                env={**os.environ, **own},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return _Process(process, await asyncio.open_connection(sock=ours))

    async def request(self, environment: int, verb: str, argument: Any) -> Any:
        """Raises EnvironmentLostError if the process has ended before, RaisedError if it ends meanwhile or the
        environment raises an error, and ConfigError."""
        if self.ended:
            raise EnvironmentLostError("was lost with its process")
        call = next(self._calls)
        answer = self._answers[call] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(packed_frame([call, environment, verb, argument]))
            return await answer
        finally:
            del self._answers[call]

    def kill(self) -> None:
        """Kill the process and what it has started, and fail the calls under way."""
        if self.ended:
            return
        self.ended = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._writer.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(RaisedError("ended its process"))

    async def _read(self) -> None:
        unpacker = msgpack.Unpacker(strict_map_key=False)
        try:
            while piece := await self._reader.read(PIECE):
                unpacker.feed(piece)
                for call, outcome, value in unpacker:
                    answer = self._answers.get(call)
                    if answer is not None and not answer.done():
                        _settle(answer, outcome, value)
        except (OSError, TypeError, ValueError, msgpack.UnpackException) as error:
            log.warning("a process of environments sends what cannot be read, and is killed: %r", error)
        finally:
            self.kill()


def _settle(answer: asyncio.Future[Any], outcome: str, value: Any) -> None:
    if outcome == "ok":
        answer.set_result(value)
    else:
        answer.set_exception(ConfigError(*value) if outcome == "config" else RaisedError(f"raised {value}"))
