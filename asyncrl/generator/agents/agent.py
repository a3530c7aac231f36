"""Rollouts of several turns: tokens in, tokens out.

    environment ─ messages ─▸ chat.open ─▸ prompt ids
                                              │
          ┌───────────────────────────────────▼──────────────────────────────┐
          │ engine ─ output ids, log-probs, versions ─▸ trajectory           │  one turn; interrupted, it goes on
          │ text, tool calls ─▸ environment.step ─ messages ─▸ chat.after    │  from the tokens it has
          └──────────────────────────────────────────────────────────────────┘
          until the environment says done, or a limit is reached

The trajectory only grows: what is sampled from is, token for token, what is trained on. After each turn and after
each answer its bytes may be handed on (`progress.py`), and another worker goes on from there.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.functions.signatures import check_arguments
from asyncrl.config.schema import AgentConfig, Config
from asyncrl.counter_rng import stream_key
from asyncrl.errors import ConfigError
from asyncrl.generator.agents.chat import Chat
from asyncrl.generator.agents.env import Environment, Observation, Reply, ToolEnvironment
from asyncrl.generator.agents.tool_formats import calls_in
from asyncrl.generator.agents.tools import Tool, Toolbox, load_tools
from asyncrl.generator.agents.trajectory import NO_IDS, ContextEntry, PolicyEntry, Trajectory, TrajectoryEnd
from asyncrl.generator.engines.engine import PromptTooLongError, Sampler, SampleRequest
from asyncrl.generator.scoring.scores import STEPS
from asyncrl.generator.scoring.steps import LARGEST, state_hash
from asyncrl.types import Array, Sampling, Task

log = logging.getLogger(__name__)

SEEDS = (1 << 63) - 1

CLOSE_S = 5.0
"""Longest wait for an environment to close."""


def check(tokenizer: PreTrainedTokenizerBase, config: AgentConfig) -> None:
    """Raises ConfigError for tools, an environment or a chat template that cannot be used; says what they may do
    that is not expected."""
    _environments(config)
    chat = Chat(tokenizer)
    if config.tools:
        chat.check_role(config.tool_role)
        if not chat.shows([Tool.of(tool).schema for tool in load_tools(config.tools)]):
            log.warning("the chat template says nothing of agent.tools: tell of them in the task's messages")
    if chat.rewrites:
        log.info("the chat template would take thoughts out of earlier turns; in rollouts they stay")


class EnvironmentFailedError(Exception):
    """An environment that raised, or took too long. The task is dropped with reason 'environment'."""


class Agent:
    """Plays the rollouts of one process. environment: makes one for each rollout."""

    def __init__(
        self,
        engine: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        environment: Callable[[], Environment],
        config: AgentConfig,
        max_length: int,
    ) -> None:
        self._engine, self._make, self._config = engine, environment, config
        self._chat = Chat(tokenizer)
        self._max_length = min(config.max_tokens or max_length, max_length)
        self._counts: Counter[str] = Counter()

    @staticmethod
    def from_config(engine: Sampler, tokenizer: PreTrainedTokenizerBase, config: Config) -> Agent | None:
        """None if rollouts are of one turn. Raises ConfigError as `check` does."""
        if not config.agent.several_turns:
            return None
        check(tokenizer, config.agent)
        environments = _environments(config.agent)
        return Agent(engine, tokenizer, environments, config.agent, config.generator.max_length)

    async def play(
        self,
        task: Task,
        request_id: str,
        sampling: Sampling,
        *,
        sample: int = 0,
        of: int = 1,
        trajectory: Trajectory | None = None,
        note: Callable[[], None] = lambda: None,
    ) -> Trajectory:
        """One rollout to its end, the `sample`-th of `of` of the task.

        trajectory: to go on from, else a new one. note: called whenever a turn or its answer is in it.
        Raises PromptTooLongError if there is no room for a first turn, EnvironmentFailedError.
        """
        growing = Trajectory() if trajectory is None else trajectory
        if growing.ended:
            return growing
        environment = await self._made(task)
        ask = _Ask(request_id, sampling, task.ordinal, sample, of)
        try:
            await self._begin(environment, task, growing)
            while not growing.ended:
                if not growing.unanswered:
                    await self._say(growing, ask)
                    note()
                await self._answer(environment, task, growing)
                note()
        finally:
            self._counts.update({f"agent/{name}": count for name, count in environment.counts.items()})
            with suppress(EnvironmentFailedError):
                await self._guarded(environment.close(), task, "close", CLOSE_S)
        self._counts.update(["agent/rollouts", f"agent/ended/{growing.ended}"])
        self._counts["agent/turns"] += growing.turns
        return growing

    def stats(self) -> dict[str, float]:
        """Totals: agent/rollouts, agent/turns, agent/ended/<why>, agent/resumed and agent/diverged of those that
        another worker began, and what the environments count: agent/calls, agent/malformed, agent/tool_errors,
        agent/tool_late."""
        return dict(self._counts)

    # ---- one rollout

    async def _made(self, task: Task) -> Environment:
        async def make() -> Environment:
            return self._make()

        made: Environment = await self._guarded(make(), task, "making", self._config.deadline_s)
        return made

    async def _begin(self, environment: Environment, task: Task, growing: Trajectory) -> None:
        """What is kept of the trajectory, if the environment comes to the same again; else the prompt."""
        opening = await self._open(environment, task)
        if growing.entries:
            if await self._repeats(environment, task, growing, opening):
                self._counts["agent/resumed"] += 1
                return
            log.info("task %d: the environment did not repeat itself; the rollout begins anew", task.ordinal)
            self._counts["agent/diverged"] += 1
            growing.clear()
            opening = await self._open(environment, task)
        growing.add(ContextEntry(opening, state_hash(opening.tobytes())))

    async def _open(self, environment: Environment, task: Task) -> Array:
        async def prompt() -> Array:
            return self._chat.open(await environment.reset(task), environment.tools)

        opening: Array = await self._guarded(prompt(), task, "reset", self._config.deadline_s)
        if len(opening) >= self._max_length:
            raise PromptTooLongError(
                f"task {task.ordinal}: a prompt of {len(opening)} tokens leaves no room for a turn in a rollout of "
                f"{self._max_length}"
            )
        return opening

    async def _say(self, growing: Trajectory, ask: _Ask) -> None:
        """One turn, asked for again with what it has as often as it is interrupted."""
        while (left := self._left(growing, ask.sampling)) > 0:
            (turn,) = await self._engine.sample(ask.request(growing.ids, left))
            growing.add(PolicyEntry(turn.output_ids, turn.logprobs, turn.versions, turn.finish))
            if turn.finish != "abort":
                return
        nothing = NO_IDS, np.empty(0, np.float32), np.empty(0, np.int32)
        growing.add(PolicyEntry(*nothing, "length"))

    def _left(self, growing: Trajectory, sampling: Sampling) -> int:
        """Tokens that the turn may still have."""
        said = len(growing.last_words) if growing.interrupted else 0
        return min(sampling.max_tokens - said, self._max_length - growing.length)

    async def _answer(self, environment: Environment, task: Task, growing: Trajectory) -> None:
        """What the environment says to the last turn, or why the rollout is over."""
        if growing.cut:
            full = growing.length >= self._max_length
            growing.add(TrajectoryEnd("total_tokens" if full else "turn_tokens"))
            return
        seen = await self._step(environment, task, growing)
        if seen.done or growing.turns >= self._config.max_turns:
            growing.add(TrajectoryEnd("done" if seen.done else "max_turns", seen.parts))
        elif growing.length + len(seen.given) >= self._max_length:
            growing.add(TrajectoryEnd("total_tokens", seen.parts))
        else:
            state = growing.ids.tobytes() + seen.given.tobytes() if seen.state is None else seen.state
            growing.add(ContextEntry(seen.given, state_hash(state), seen.parts))

    async def _step(self, environment: Environment, task: Task, growing: Trajectory) -> _Seen:
        words, end = growing.last_words[:-1], int(growing.last_words[-1])

        async def stepped() -> _Seen:
            text = self._chat.said(words)
            said = await environment.step(Reply(text, calls_in(text, self._config.tool_format)))
            given = NO_IDS if said.done else self._chat.after(said.messages, end)
            return _Seen(given, _parts(said), said.done, said.state)

        seen: _Seen = await self._guarded(stepped(), task, "step", self._config.deadline_s)
        return seen

    async def _repeats(self, environment: Environment, task: Task, kept: Trajectory, opening: Array) -> bool:
        """Whether the environment, taken through the turns again, says what it said before."""
        prompt, *entries = kept.entries
        again = Trajectory()
        again.add(prompt)
        if not isinstance(prompt, ContextEntry) or not np.array_equal(prompt.ids, opening):
            return False
        for entry in entries:
            if isinstance(entry, ContextEntry) and not environment.stateless:
                seen = await self._step(environment, task, again)
                if seen.done or seen.parts != entry.parts or not np.array_equal(seen.given, entry.ids):
                    return False
            again.add(entry)
        return True

    async def _guarded(self, call: Any, task: Task, what: str, deadline_s: float) -> Any:
        """Whatever goes wrong in an environment, or with the messages that it gives, is its task's affair alone."""
        try:
            async with asyncio.timeout(deadline_s):
                return await call
        except TimeoutError:
            why = f"took longer than agent.deadline_s={deadline_s:g}"
        except Exception as error:
            why = f"raised {type(error).__name__}: {error}"
        raise EnvironmentFailedError(f"{what} of task {task.ordinal}'s environment {why}")


@dataclass(frozen=True, slots=True)
class _Seen:
    """An answer to a turn. given [G] int64: its messages and the template's glue · parts: of its reward."""

    given: Array
    parts: Mapping[str, float]
    done: bool
    state: str | bytes | int | None


@dataclass(frozen=True, slots=True)
class _Ask:
    """What the requests of one rollout have in common. sample: the rollout's index among the `of` of its task."""

    request_id: str
    sampling: Sampling
    ordinal: int
    sample: int
    of: int

    def request(self, ids: Array, most: int) -> SampleRequest:
        """Up to `most` tokens after `ids`. An engine draws by (seed, ordinal, index in the request, position in the
        turn), so that the seed has to tell turns and rollouts apart."""
        seed = int(stream_key(self.sampling.seed, self.sample, len(ids))) & SEEDS
        return SampleRequest(
            f"{self.request_id}/{self.sample}/{len(ids)}",
            ids,
            replace(self.sampling, max_tokens=most, seed=seed),
            self.ordinal,
            place=self.ordinal * self.of + self.sample,
        )


def _parts(seen: Observation) -> dict[str, float]:
    """Raises ValueError or TypeError for a reward that is none."""
    named = seen.reward if isinstance(seen.reward, Mapping) else {STEPS: seen.reward} if seen.reward else {}
    parts = {str(name): float(part) for name, part in named.items()}
    for name, part in parts.items():
        if not abs(part) <= LARGEST:
            raise ValueError(f"its reward {name!r} is {part}, not a finite number")
    return parts


def _environments(config: AgentConfig) -> Callable[[], Environment]:
    if config.environment is None:
        tools = load_tools(config.tools)
        box = Toolbox(tools, config.tool_deadline_s, config.tool_workers, config.tool_chars)
        return partial(ToolEnvironment, box, config.tool_role)
    make = load_function(config.environment, "agent.environment")
    if inspect.isclass(make) and not issubclass(make, Environment):
        raise ConfigError(
            "agent.environment",
            config.environment,
            "is no asyncrl.generator.agents.env.Environment",
            "derive it from that class",
        )
    try:
        inspect.signature(make).bind(**config.options)
    except TypeError as error:
        takes = ", ".join(inspect.signature(make).parameters) or "nothing"
        raise ConfigError(
            "agent.options", config.options, str(error), f"{config.environment} takes {takes}"
        ) from None
    if inspect.isclass(make):
        for method, *names in (("reset", "self", "task"), ("step", "self", "reply")):
            check_arguments(
                getattr(make, method), f"{config.environment}.{method}", "agent.environment", *names
            )
    return partial(make, **config.options)
