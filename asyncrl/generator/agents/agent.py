"""Rollouts of several turns: tokens in, tokens out.

    environment ─ messages ─▸ chat.open ─▸ prompt ids
                                              │
          ┌───────────────────────────────────▼──────────────────────────────┐
          │ engine ─ output ids, log-probs, versions ─▸ trajectory           │  one turn; interrupted, it continues
          │ text, tool calls ─▸ environment.step ─ messages ─▸ chat.after    │  from the tokens it has
          └──────────────────────────────────────────────────────────────────┘
          until the environment is done, or a limit is reached

The trajectory only grows: the tokens that are sampled from are those that are trained on. A turn begins a segment if
the environment composes its prompt, if `agent.history` leaves old turns out, or if `agent.history_thoughts` has them
rewritten (`history.py`). After each turn and after each answer
the trajectory's bytes may be sent to the queue (`task_progress.py`), and another worker continues from there. Pictures
are not sent: the other worker's environment shows them again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from asyncrl.config.schema import AgentConfig, Config
from asyncrl.errors import ConfigError
from asyncrl.generator.agents.call_parsers import call_marks, call_parser, check_format
from asyncrl.generator.agents.chat import Chat, Message
from asyncrl.generator.agents.env import Action, Environment, Observation, Reward, environments
from asyncrl.generator.agents.env_pool import EnvironmentLostError, EnvironmentPool, RaisedError
from asyncrl.generator.agents.history import KeptHistory, RenderedHistory, SpokenTurn
from asyncrl.generator.agents.tools import Tool, load_tools
from asyncrl.generator.agents.trajectory import Trajectory, TurnRequests
from asyncrl.generator.agents.trajectory_entries import NO_IDS, NO_ROOM, ContextEntry, TrajectoryEnd
from asyncrl.generator.engines.engine import Pieces, PromptTooLongError, Sampler
from asyncrl.generator.scoring.scores import STEPS
from asyncrl.generator.scoring.steps import LARGEST, real, state_hash
from asyncrl.generator.threads import in_thread
from asyncrl.models.prompts import ImageReader, images_in
from asyncrl.telemetry import tracing
from asyncrl.types import Prompt, Sampling, Task, Turn

Result = TypeVar("Result")

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Longest wait for an environment to close."""


def check_agent(chat: Chat, config: AgentConfig) -> None:
    """Log what a chat template does that users may not expect. Raises ConfigError for tools, an environment or a
    chat template that cannot be used."""
    if config.environment_python is None:
        environments(config)
    else:
        _pool(config).check()
    check_format(chat, config.tool_format)
    if config.tools:
        chat.check_role(config.tool_role)
        if not chat.shows([Tool.of(tool).schema for tool in load_tools(config.tools)]):
            log.warning("the chat template leaves agent.tools out: describe them in the task's messages")
    if config.history_thoughts == "as_template":
        RenderedHistory(chat, config.history, ()).check()
    elif chat.rewrites:
        log.info(
            "the chat template would take thoughts out of earlier turns; in rollouts they stay, unless "
            "agent.history_thoughts=as_template"
        )


class EnvironmentFailedError(Exception):
    """An environment that raised, took too long, or was lost with its process. The task is dropped with reason
    'environment'. lost: it was lost, and another environment is to blame."""

    def __init__(self, problem: str, lost: bool = False) -> None:
        super().__init__(problem)
        self.lost = lost


class Agent:
    """Plays the rollouts of one process.

    environment: makes one for each rollout, in this process or in those of a pool
    images: for the pictures in messages
    piece_tokens: of a turn, after which `play` calls `grown`; 0: never
    """

    kind = Trajectory

    def __init__(
        self,
        engine: Sampler,
        chat: Chat,
        environment: Callable[[], Environment] | EnvironmentPool,
        images: ImageReader,
        config: AgentConfig,
        max_length: int,
        piece_tokens: int = 0,
    ) -> None:
        self._engine, self._chat, self._environments, self._config = engine, chat, environment, config
        self._images = images
        self._max_length = min(config.max_tokens or max_length, max_length)
        self._piece_tokens, self._calls = piece_tokens, call_parser(chat, config.tool_format)
        self._history = KeptHistory(chat, config.history)
        if config.history_thoughts == "as_template":
            self._history = RenderedHistory(chat, config.history, call_marks(chat, config.tool_format))
        self._counts: Counter[str] = Counter()

    @staticmethod
    def from_config(engine: Sampler, tokenizer: PreTrainedTokenizerBase, config: Config) -> Agent | None:
        """Returns None for rollouts of one turn. Raises ConfigError as `check_agent` does."""
        if not config.agent.several_turns:
            return None
        chat = Chat(tokenizer, config.tasks.chat_template_kwargs)
        check_agent(chat, config.agent)
        make = _pool(config.agent) if config.agent.environment_processes else environments(config.agent)
        piece_tokens = config.generator.progress_tokens if config.agent.keep else 0
        images = ImageReader(config.model, config.generator.engine)
        return Agent(engine, chat, make, images, config.agent, config.generator.max_length, piece_tokens)

    async def play(
        self,
        task: Task,
        request_id: str,
        sampling: Sampling,
        *,
        sample: int = 0,
        of: int = 1,
        trajectory: Trajectory | None = None,
        changed: Callable[[], None] = lambda: None,
        grown: Callable[[int], None] | None = None,
    ) -> Trajectory:
        """Play one rollout to its end: `trajectory`, or a new one. It has index `sample` among the `of` of the task.

        changed: called after each turn and each answer · grown: called with `piece_tokens` after so many tokens of a
        turn, of which the trajectory then has a piece; None: without pieces. Raises PromptTooLongError where there is
        no room for a first turn, and EnvironmentFailedError after `agent.environment_retries` new environments.
        """
        trajectory = trajectory or Trajectory()
        if not trajectory.within(self._config.max_turns, self._max_length):
            log.info("task %d: what is kept of a rollout is beyond its limits; it begins anew", task.ordinal)
            self._counts["agent/diverged"] += 1
            trajectory.clear()
        requests = TurnRequests(request_id, sampling, task.ordinal, sample, of)
        retries = self._config.environment_retries
        while not trajectory.ended or trajectory.blind:
            try:
                await self._play_in_one(task, trajectory, requests, changed, grown)
            except EnvironmentFailedError as error:
                retries -= not error.lost
                if retries < 0:
                    raise
                self._counts["agent/environment_retries"] += 1
                log.info("a new environment takes over: %s", error)
            else:
                self._counts.update(["agent/rollouts", f"agent/ended/{trajectory.ended}"])
                self._counts["agent/turns"] += trajectory.turns
        return trajectory

    async def close(self) -> None:
        """End the processes of environments."""
        if isinstance(self._environments, EnvironmentPool):
            self._environments.close()

    def stats(self) -> dict[str, float]:
        """Totals: agent/rollouts, agent/turns, agent/ended/<reason>; agent/resumed and agent/diverged of those that
        another worker or environment began; agent/environment_retries, agent/environment_late,
        agent/environment_restarts; and the counts of environments: agent/calls, agent/malformed, agent/tool_errors,
        agent/tool_late."""
        pooled = self._environments.counts if isinstance(self._environments, EnvironmentPool) else {}
        return {**self._counts, **{f"agent/{name}": count for name, count in pooled.items()}}

    # ---- one rollout

    async def _play_in_one(
        self,
        task: Task,
        trajectory: Trajectory,
        requests: TurnRequests,
        changed: Callable[[], None],
        grown: Callable[[int], None] | None,
    ) -> None:
        """Play a rollout to its end in a new environment."""
        environment = await self._new_environment(task)
        try:
            await self._begin(environment, task, trajectory, requests.sampling)
            while not trajectory.ended:
                if not trajectory.unanswered:
                    about = {"task": task.ordinal, "sample": requests.sample, "turn": trajectory.turns}
                    with tracing.span("turns", "turn", tracing.RESOLUTION_S, **about):
                        await self._sample_turn(trajectory, requests, grown)
                    changed()
                await self._observe(environment, task, trajectory, requests.sampling)
                changed()
        finally:
            self._counts.update({f"agent/{name}": count for name, count in environment.counts.items()})
            with suppress(EnvironmentFailedError):
                await self._guarded(environment.close(), task, "close", CLOSE_S)

    async def _new_environment(self, task: Task) -> Environment:
        environments = self._environments
        if isinstance(environments, EnvironmentPool):  # the start of a process has a deadline of its own
            return await self._guarded(environments.make(), task, "making", None)

        async def make() -> Environment:
            return environments()

        return await self._guarded(make(), task, "making", self._config.deadline_s)

    async def _begin(
        self, environment: Environment, task: Task, trajectory: Trajectory, sampling: Sampling
    ) -> None:
        """Keep a trajectory that the environment reproduces; otherwise begin with the prompt."""
        opening = await self._open(environment, task)
        if trajectory.entries:
            if await self._reproduces(environment, task, trajectory, opening, sampling):
                self._counts["agent/resumed"] += 1
                return
            log.info("task %d: the environment did not repeat itself; the rollout begins anew", task.ordinal)
            self._counts["agent/diverged"] += 1
            trajectory.clear()
            opening = await self._open(environment, task)
        state = Prompt(opening.ids, opening.media).tobytes()
        trajectory.add(replace(opening, anchor=state_hash(state)))

    async def _open(self, environment: Environment, task: Task) -> ContextEntry:
        async def prompt() -> ContextEntry:
            messages = await environment.reset(task)
            return await self._shown(self._history.begin(messages, environment.tools), messages)

        opening = await self._guarded(prompt(), task, "reset", self._config.deadline_s)
        if len(opening.ids) >= self._max_length:
            raise PromptTooLongError(
                f"task {task.ordinal}: a prompt of {len(opening.ids)} tokens leaves no room for a turn in a rollout of "
                f"{self._max_length}"
            )
        return opening

    async def _sample_turn(
        self, trajectory: Trajectory, requests: TurnRequests, grown: Callable[[int], None] | None
    ) -> None:
        """Add one turn, in as many requests as interruptions make necessary."""
        while (left := self._room(trajectory, requests.sampling)) > 0:
            before = len(trajectory.entries)

            def keep(_: int, turn: Turn, before: int = before) -> None:
                trajectory.keep_first(before)
                trajectory.add_turn(turn)
                if grown is not None and turn.finish == "abort":
                    grown(self._piece_tokens)

            wanted = Pieces(self._piece_tokens, keep) if grown is not None and self._piece_tokens else None
            request = requests.request(trajectory, left)
            (turn,) = await self._engine.sample(replace(request, pieces=wanted))
            trajectory.keep_first(before)
            trajectory.add_turn(turn)
            if turn.finish != "abort":
                return
        trajectory.add(NO_ROOM)

    def _room(self, trajectory: Trajectory, sampling: Sampling) -> int:
        """Tokens that the turn may still have."""
        sampled = len(trajectory.last_words) if trajectory.interrupted else 0
        return min(sampling.max_tokens - sampled, self._max_length - len(trajectory.context))

    async def _observe(
        self, environment: Environment, task: Task, trajectory: Trajectory, sampling: Sampling
    ) -> None:
        """Add the environment's answer to the last turn, or the end of the rollout."""
        if trajectory.cut:
            full = len(trajectory.context) >= self._max_length
            parts = await self._at_limit(environment, task, {})
            trajectory.add(TrajectoryEnd("total_tokens" if full else "turn_tokens", parts))
            return
        observed, entry = await self._step(environment, task, trajectory, sampling)
        if observed.done:
            trajectory.add(TrajectoryEnd("done", entry.parts))
            return
        context = trajectory.context_with(entry)
        enough = trajectory.turns >= self._config.max_turns
        if enough or len(context.ids) >= self._max_length:
            parts = await self._at_limit(environment, task, entry.parts)
            trajectory.add(TrajectoryEnd("max_turns" if enough else "total_tokens", parts))
        else:
            state = context.tobytes() if observed.state is None else observed.state
            trajectory.add(replace(entry, anchor=state_hash(state)))

    async def _at_limit(
        self, environment: Environment, task: Task, parts: Mapping[str, float]
    ) -> Mapping[str, float]:
        """`parts` with the environment's reward for a rollout that ends at a limit."""

        async def last() -> Mapping[str, float]:
            return reward_parts(await environment.at_limit())

        added = await self._guarded(last(), task, "at_limit", self._config.deadline_s)
        return {name: parts.get(name, 0.0) + added.get(name, 0.0) for name in {**parts, **added}}

    async def _step(
        self, environment: Environment, task: Task, trajectory: Trajectory, sampling: Sampling
    ) -> tuple[Observation, ContextEntry]:
        """The environment's answer to the last turn, and what it adds to the trajectory."""
        words, end = self._chat.split_end(trajectory.last_words, sampling.stop)

        async def step() -> tuple[Observation, ContextEntry]:
            text, ended = self._chat.text_of(words), self._chat.text_of(trajectory.last_words[len(words) :])
            calls, tools = self._calls(text, ended, environment.tools), environment.tools
            observed, entry = await environment.step(Action(text, calls)), ContextEntry(NO_IDS, 0)
            if not observed.done:
                entry = self._history.answer(trajectory, SpokenTurn(text, calls, end), observed, tools)
                shown = observed.messages if observed.prompt is None else observed.prompt
                entry = await self._shown(entry, shown)
            return observed, replace(entry, parts=reward_parts(observed.reward))

        return await self._guarded(step(), task, "step", self._config.deadline_s)

    async def _shown(self, entry: ContextEntry, messages: Sequence[Message]) -> ContextEntry:
        """The entry with the pictures of these messages, for each of which it has one token so far."""
        if not images_in(messages):
            return entry
        self._images.check()
        read: Prompt = await in_thread(self._images.shown_in, entry.ids, messages)
        return replace(entry, ids=read.ids, media=read.media)

    async def _reproduces(
        self,
        environment: Environment,
        task: Task,
        kept: Trajectory,
        opening: ContextEntry,
        sampling: Sampling,
    ) -> bool:
        """Whether the environment gives the same answers when the turns are replayed to it. If so, the kept pictures
        get their pixels. A stateless one is given those turns alone that it answered with pictures."""
        prompt, *entries = kept.entries
        if not isinstance(prompt, ContextEntry) or prompt.recalled is not None:
            return False
        if not _same_text(prompt, opening) or prompt.messages != opening.messages:
            return False
        replayed = Trajectory()
        replayed.add(replace(prompt, media=opening.media))
        for entry in entries:
            if isinstance(entry, ContextEntry) and (entry.media or not environment.stateless):
                observed, again = await self._step(environment, task, replayed, sampling)
                if observed.done or (again.parts, again.recalled) != (entry.parts, entry.recalled):
                    return False
                if not _same_text(again, entry):
                    return False
                entry = replace(entry, media=again.media)
            replayed.add(entry)
        kept.entries = replayed.entries
        return True

    async def _guarded(
        self, call: Awaitable[Result], task: Task, what: str, deadline_s: float | None
    ) -> Result:
        """Await user code. Any failure of it, or of the messages that it returns, concerns its task alone."""
        subject = f"{what} of task {task.ordinal}'s environment"
        try:
            with tracing.span("environments", what, tracing.RESOLUTION_S, task=task.ordinal):
                async with asyncio.timeout(deadline_s):
                    return await call
        except TimeoutError:
            self._counts["agent/environment_late"] += 1
            why = f"took longer than agent.deadline_s={deadline_s:g}"
        except ConfigError:  # no task would do better
            raise
        except (EnvironmentLostError, RaisedError) as error:
            raise EnvironmentFailedError(
                f"{subject} {error}", isinstance(error, EnvironmentLostError)
            ) from None
        except Exception as error:
            why = f"raised {type(error).__name__}: {error}"
        raise EnvironmentFailedError(f"{subject} {why}")


def _same_text(one: ContextEntry, other: ContextEntry) -> bool:
    """Whether both have the same tokens, and show the same pictures."""
    return np.array_equal(one.ids, other.ids) and one.media == other.media


def reward_parts(reward: Reward) -> dict[str, float]:
    """Raises ValueError or TypeError unless the reward is a finite number or finite parts."""
    named = reward if isinstance(reward, Mapping) else {STEPS: reward} if reward else {}
    parts = {str(name): real(part) for name, part in named.items()}
    for name, part in parts.items():
        if not abs(part) <= LARGEST:
            raise ValueError(f"its reward {name!r} is {part}, not a finite number")
    return parts


def _pool(config: AgentConfig) -> EnvironmentPool:
    assert config.environment is not None
    count, python = config.environment_processes, config.environment_python
    return EnvironmentPool(config.environment, config.options, count, python)
