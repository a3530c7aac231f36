"""Rollouts that a program or a function of the user plays, by requests to the gateway.

    task ─▸ program ── requests ──▸ gateway.py ──▸ engine
               │  ◂─ turns ────────────┘
               └─ ends: its last line, or the function's value, may be the reward ─▸ the record becomes a rollout

`play` waits for the program, for `agent.deadline_s` between two turns. The engine's time does not count. A program that
is late is killed with all that it has started. When this process dies, its programs end too.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import secrets
import shlex
import shutil
import tempfile
import threading
from asyncio import FIRST_COMPLETED
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import psutil
from transformers import PreTrainedTokenizerBase

from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.functions.signatures import check_arguments
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, DeadlineError
from asyncrl.generator.agents.agent import (
    Agent,
    EnvironmentFailedError,
    check_agent,
    reward_parts,
)
from asyncrl.generator.agents.call_parsers import call_marks, call_parser, check_format
from asyncrl.generator.agents.chat import Chat
from asyncrl.generator.agents.trajectory import TurnRequests
from asyncrl.generator.agents.trajectory_entries import EndReason
from asyncrl.generator.engines.engine import Sampler
from asyncrl.generator.engines.http.http_link import check_aiohttp
from asyncrl.generator.gateway.call_record import CallRecord
from asyncrl.generator.gateway.gateway import Gateway, ProgramPolicy, ProgramSession
from asyncrl.generator.threads import as_failure, in_thread
from asyncrl.types import Sampling, Task

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Longest wait for the output of a program that has ended, and for a function that was cancelled."""
TAIL = 1 << 16
"""Bytes of a program's output that are kept, of each stream."""
SHOWN = 500
"""Characters of its errors in the reason of a drop."""
MARK = "ASYNCRL_PROGRAM"
"""The environment variable that marks the processes of a program, so that those in other sessions are found."""
LONGEST_VARIABLE = 100_000
"""Bytes of a task in the environment; Linux has a limit of 131,072."""

WATCHED = '((read -r _ </dev/fd/"$1"; kill -KILL 0) >/dev/null 2>&1 &); shift; exec "$@"'
"""A shell that becomes the program. Beside it, a process of its group waits for the end of a pipe that the generator
holds, and then ends the group, however the generator has ended."""


def load_player(
    engine: Sampler, tokenizer: PreTrainedTokenizerBase, config: Config
) -> Agent | HarnessAgent | None:
    """The player of rollouts of several turns; None for rollouts of one turn. Raises ConfigError as `check_player`."""
    if config.agent.harness is None:
        return Agent.from_config(engine, tokenizer, config)
    check_player(tokenizer, config)
    return HarnessAgent(engine, tokenizer, config)


def check_player(tokenizer: PreTrainedTokenizerBase, config: Config) -> None:
    """Raises ConfigError for a program or function that cannot be started, without aiohttp, and as `check_agent`."""
    chat, agent = _chat(tokenizer, config), config.agent
    if agent.harness is None:
        check_agent(chat, agent)
        return
    check_aiohttp("agent", agent.harness)
    check_format(chat, agent.tool_format)
    if agent.function is not None:
        run = load_function(agent.function, "agent.function")
        check_arguments(run, agent.function, "agent.function", "base_url", "api_key", "task")
    elif shutil.which(word := shlex.split(agent.harness)[0]) is None:
        rule, remedy = f"there is no program {word!r}", "install it, or give its path"
        raise ConfigError("agent.program", agent.program, rule, remedy)


def _chat(tokenizer: PreTrainedTokenizerBase, config: Config) -> Chat:
    return Chat(tokenizer, config.tasks.chat_template_kwargs)


class HarnessAgent:
    """Plays the rollouts of one process. As `Agent`, with a program in place of the environment."""

    kind = CallRecord

    def __init__(self, engine: Sampler, tokenizer: PreTrainedTokenizerBase, config: Config) -> None:
        self._config, self._counts = config.agent, Counter[str]()
        most = config.generator.max_length
        most = min(config.agent.max_tokens or most, most)
        chat, tool_format = _chat(tokenizer, config), config.agent.tool_format
        calls, marks = call_parser(chat, tool_format), call_marks(chat, tool_format)
        self._policy = ProgramPolicy(engine, chat, config.agent, most, self._counts, calls, marks)
        self._gateway = Gateway(config.agent.gateway, self._counts)
        spec = config.agent.function
        self._function = None if spec is None else load_function(spec, "agent.function")
        self._own_loop, self._leftovers = OwnLoop(), Leftovers()
        self._secret = config.generator.server.key_variable

    async def play(
        self,
        task: Task,
        request_id: str,
        sampling: Sampling,
        *,
        sample: int = 0,
        of: int = 1,
        trajectory: CallRecord | None = None,
        changed: Callable[[], None] = lambda: None,
        grown: object = None,
    ) -> CallRecord:
        """Play one rollout to its end: the rest of the record `trajectory`, or a new one.

        changed: called after each turn. Raises the errors of the engine, and EnvironmentFailedError after
        `agent.environment_retries` new programs.
        """
        record = trajectory or CallRecord()
        if not record.within(self._policy.max_length):
            log.info("task %d: what is kept of a rollout is beyond its limits; it begins anew", task.ordinal)
            self._counts["agent/diverged"] += 1
            record.clear()
        requests = TurnRequests(request_id, sampling, task.ordinal, sample, of)
        retries = self._config.environment_retries
        while not record.ended:
            await self._gateway.start()
            try:
                await self._play_in_one(task, requests, record, changed)
            except EnvironmentFailedError as error:
                retries -= 1
                if retries < 0:
                    raise
                self._counts["agent/environment_retries"] += 1
                log.info("a new program takes over: %s", error)
        return record

    def stats(self) -> dict[str, float]:
        """Totals: agent/rollouts, agent/turns, agent/segments, agent/ended/<reason>; agent/resumed and agent/diverged
        of those that another worker or program began; agent/given_again: turns from the record; agent/malformed: turns
        whose calls cannot be read; agent/refused/<status>: requests; agent/other_sampling: those that demand it;
        agent/environment_retries: programs after one that failed; agent/environment_late: those past the deadline."""
        return dict(self._counts)

    async def close(self) -> None:
        await self._gateway.close()

    async def _play_in_one(
        self, task: Task, requests: TurnRequests, record: CallRecord, changed: Callable[[], None]
    ) -> None:
        """Play a rollout to its end in a new program."""
        came = len(record.turns)
        session = ProgramSession(self._policy, record, requests, changed)
        key = self._gateway.open(session)
        try:
            parts = await self._played(task, session, key)
        finally:
            self._gateway.end(key)
        if not record.given:
            raise EnvironmentFailedError(f"the program of task {task.ordinal} has made no request for a turn")
        cut: EndReason = "turn_tokens" if record.last.entries.cut else "done"
        record.end(session.limit or cut, parts)
        changed()
        self._count(record, came)

    async def _played(self, task: Task, session: ProgramSession, key: str) -> dict[str, float]:
        """The parts of the reward that the program gives."""
        program = asyncio.create_task(self._result(task, key))
        deadline_s = self._config.deadline_s
        try:
            while not program.done() and not session.failed.done() and session.quiet_s < deadline_s:
                left_s = deadline_s - session.quiet_s
                await asyncio.wait({program, session.failed}, timeout=left_s, return_when=FIRST_COMPLETED)
            if session.failed.done():
                session.failed.result()
            try:
                if not program.done():
                    self._counts["agent/environment_late"] += 1
                    what = "its next request, or its end"
                    raise DeadlineError(
                        "the gateway", "the program", what, deadline_s, "see agent.deadline_s"
                    )
                return reward_parts(program.result() or {})
            except Exception as error:
                if session.limit is not None:  # of that the program has ended
                    return {}
                why = f"task {task.ordinal}: {type(error).__name__}: {error}".replace(key, "<its key>")
                raise EnvironmentFailedError(why) from error
        finally:
            program.cancel()
            await asyncio.wait({program})

    async def _result(self, task: Task, key: str) -> Any:
        """The reward that a function returns, or a program has in the last line of its output."""
        if self._function is not None:
            call = self._own_loop if inspect.iscoroutinefunction(self._function) else in_thread
            return await call(self._function, f"{self._gateway.url}/v1", key, task)
        given = msgspec.json.encode({"ordinal": task.ordinal, "prompt": task.prompt, "data": task.data})
        words = shlex.split(self._config.program or "")
        code, out, err = await executed(words, self._environment(given, key), given, self._leftovers)
        if code != 0:
            raise ProgramFailedError(f"exit code {code}: {err.strip()[-SHOWN:]}")
        lines = out.strip().splitlines()
        with suppress(ValueError):
            last = json.loads(lines[-1] if lines else "")
            return last["reward"] if isinstance(last, dict) and "reward" in last else None
        return None

    def _environment(self, given: bytes, key: str) -> dict[str, str]:
        """Without the secrets of this process: the policy decides what a program does."""
        url, host = self._gateway.url, self._config.gateway.host
        kept = {k: v for k, v in os.environ.items() if not k.startswith("ASYNCRL_") and k != self._secret}
        no_proxy = ",".join(filter(None, [kept.get("no_proxy") or kept.get("NO_PROXY"), host]))
        task = {"ASYNCRL_TASK": given.decode()} if len(given) <= LONGEST_VARIABLE else {}
        urls = {"OPENAI_BASE_URL": f"{url}/v1", "ANTHROPIC_BASE_URL": url}
        keys = dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY"), key)
        return {**kept, **urls, **keys, **task, "no_proxy": no_proxy, "NO_PROXY": no_proxy}

    def _count(self, record: CallRecord, came: int) -> None:
        self._counts.update(["agent/rollouts", f"agent/ended/{record.ended}"])
        self._counts["agent/turns"] += record.given
        self._counts["agent/segments"] += len(record.segments())
        if came:
            self._counts["agent/diverged" if record.left_out else "agent/resumed"] += 1


class ProgramFailedError(Exception):
    """A program that has ended with an error."""


class _Output(asyncio.SubprocessProtocol):
    """The ends of a program's outputs. ended: its exit · closed: nobody writes any more"""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.tails = {1: b"", 2: b""}
        self.ended, self.closed = loop.create_future(), loop.create_future()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.tails[fd] = (self.tails[fd] + data)[-TAIL:]

    def process_exited(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)


async def executed(
    words: Sequence[str], env: Mapping[str, str], given: bytes, leftovers: Leftovers
) -> tuple[int, str, str]:
    """Run a program with `given` as its input. Returns its exit code, and the last bytes of its output and of its
    errors. Processes that it has started end with it, and it ends with them when this call is cancelled."""
    loop = asyncio.get_running_loop()
    with ExitStack() as pipe, tempfile.TemporaryFile() as file:
        watched, held = os.pipe()
        pipe.callback(os.close, watched)
        pipe.callback(os.close, held)
        file.write(given)
        file.seek(0)
        shell = ["/bin/sh", "-c", WATCHED, "sh", str(watched), *words]
        env = {**env, MARK: (mark := secrets.token_hex(8))}
        transport, output = await loop.subprocess_exec(
            _Output, *shell, stdin=file, env=env, pass_fds=[watched], start_new_session=True
        )
        try:
            await output.ended
        finally:
            running = transport.get_returncode() is None
            await leftovers.kill(transport.get_pid() if running else None, mark)
            pipe.close()
            await asyncio.wait({output.closed}, timeout=CLOSE_S)
            transport.close()
    out, err = (output.tails[fd].decode(errors="replace") for fd in (1, 2))
    return transport.get_returncode() or 0, out, err


class Leftovers:
    """Kills the processes that programs have left. Hundreds of programs may end at once: one search of this machine's
    processes serves all that ended before it began."""

    def __init__(self) -> None:
        self._ended: dict[str, int | None] = {}
        self._searching = asyncio.Lock()

    async def kill(self, program: int | None, mark: str) -> None:
        """program: its process, if it still runs · mark: in the environment of it, and of all that it has started"""
        self._ended[mark] = program
        async with self._searching:
            if mark in self._ended:
                ended, self._ended = self._ended, {}
                await in_thread(_kill_started, ended)


def _kill_started(ended: Mapping[str, int | None]) -> None:
    """Kill programs that run, their descendants, and all processes with their marks. Their groups end with their
    pipes."""
    started: set[psutil.Process] = set()
    for program in ended.values():
        if program is not None:
            with suppress(psutil.NoSuchProcess):
                one = psutil.Process(program)
                started |= {one, *one.children(recursive=True)}
    for each in (*started, *psutil.process_iter()):
        with suppress(psutil.Error):
            if each in started or each.environ().get(MARK) in ended:
                each.kill()


class OwnLoop:
    """An event loop in a thread of its own: code of the user that blocks it blocks no other part of the generator."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
        """The value of a function. If it is blocked when this is cancelled, further calls have another loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="agent.function", daemon=True).start()
        loop = self._loop
        try:
            return await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(_kept(function, *arguments), loop)
            )
        except asyncio.CancelledError:
            alive = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
            done, _ = await asyncio.wait({asyncio.wrap_future(alive)}, timeout=CLOSE_S)
            if not done and self._loop is loop:
                log.warning("agent.function blocks its event loop: await, or use a thread")
                self._loop = None
            raise


async def _kept(function: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any) -> Any:
    """An exit that would end the thread (`sys.exit`) is an error of the function."""
    try:
        return await function(*arguments)
    except (SystemExit, KeyboardInterrupt) as raised:
        raise as_failure(raised) from raised
