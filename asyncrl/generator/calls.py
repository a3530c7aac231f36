"""Calling one reward function so that one bad call never stalls the others.

value ──▸ plain function: one of `workers` ─────┐ deadline_s ──▸ read
          async function: this event loop ──────┘ failed or late: again, `retries` times, then RewardError;
                                                  at every task (`streak.py`): RewardFailedError
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import reprlib
import traceback
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.config.dotted import load_function
from asyncrl.config.schema import RewardConfig
from asyncrl.errors import ConfigError, RewardFailedError
from asyncrl.generator.streak import Streak
from asyncrl.generator.threads import in_thread
from asyncrl.types import Task

Reward = Callable[..., Any]
"""reward(task, text) or reward(task, text, rollout), plain or async -> float, its parts by name, or `Scored`;
`per: group`: reward(task, texts) or reward(task, texts, rollouts) -> a list of these."""

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class RewardError(Exception):
    """A reward that failed every time it was tried. The task is dropped with reason 'reward'."""


class Call:
    """One reward function with its deadline, retries and threads. name: of several; one alone has none.

    failures  calls that failed so far
    """

    def __init__(self, function: Reward, config: RewardConfig, name: str = "") -> None:
        self.config, self.name, self.failures = config, name, 0
        self._function = function
        self._async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        )
        self._takes_rollout = _takes_rollout(function)
        self._free = asyncio.Semaphore(config.workers)
        self._streak = Streak()
        self._told: set[type[Exception]] = set()

    async def __call__(self, task: Task, text: Any, rollout: Any, read: Callable[[Any], Result]) -> Result:
        """What `read` makes of the function's value.

        Raises RewardError after 1 + retries failures of either, RewardFailedError if that is so of every task.
        """
        arguments = (task, text, rollout) if self._takes_rollout else (task, text)
        call = self._in_loop if self._async else self._in_thread
        why = ""
        for _ in range(1 + self.config.retries):
            try:
                value = await call(*arguments)
            except TimeoutError:
                why = f"took longer than reward.deadline_s={self.config.deadline_s}"
            except Exception as error:
                why = f"raised {type(error).__name__}: {error}{_place(error)}"
                self._tell(task, error)
            else:
                try:
                    result = read(value)
                except Exception as error:
                    why = f"returned {reprlib.repr(value)}: {error}"
                else:
                    self._streak.worked()
                    return result
            self.failures += 1
        raise self._failed(task, why)

    def start(self) -> None:
        """Starts the function, if it has something to start."""
        if start := getattr(self._function, "start", None):
            start()

    def close(self) -> None:
        """Closes the function, if it has something to close. Does not wait for calls that hang."""
        if close := getattr(self._function, "close", None):
            close()

    def _failed(self, task: Task, why: str) -> RewardError | RewardFailedError:
        """The error for a task that no call was good for."""
        self._streak.failed(task.ordinal)
        if not self._streak.hopeless:
            which = f"reward {self.name!r}" if self.name else "reward"
            return RewardError(f"the {which} of task {task.ordinal} {why}")
        key = f"reward.functions.{self.name}.function" if self.name else "reward.function"
        return RewardFailedError(
            f"{key} = {self.config.function!r} failed at {self._streak}; at the last, task {task.ordinal}, "
            f"it {why}. Remedy: correct the function, or the fields of the tasks that it reads"
        )

    def _tell(self, task: Task, error: Exception) -> None:
        """The traceback of the first error of each kind: errors of the user's own code are found by it."""
        if type(error) not in self._told:
            self._told.add(type(error))
            log.warning(
                "%s at task %d, for the first time:", self.config.function, task.ordinal, exc_info=error
            )

    async def _in_loop(self, *arguments: Any) -> Any:
        async with asyncio.timeout(self.config.deadline_s):
            return await self._function(*arguments)

    async def _in_thread(self, *arguments: Any) -> Any:
        # The deadline is that of the call: it does not count the wait for a free worker. A call that hangs for ever
        # keeps its thread, and no place among the workers.
        async with self._free, asyncio.timeout(self.config.deadline_s):
            return await in_thread(self._function, *arguments)


def load_reward(config: RewardConfig, key: str) -> Reward:
    """The function that `config.function` names, with its options; of a class, an instance.

    Raises ConfigError under `key`, the section or the entry of `reward.functions`, and what the class raises, under
    `key`.options.
    """
    if config.function is None:
        raise ConfigError(f"{key}.function", None, "names no reward function", "set it")
    found, options = load_function(config.function, f"{key}.function"), config.options
    try:
        signature = inspect.signature(found)
        # A function gets its task and text later, a class gets all it needs now.
        (signature.bind if inspect.isclass(found) else signature.bind_partial)(**options)
    except (TypeError, ValueError) as error:
        remedy = f"give the keywords that {config.function} takes"
        raise ConfigError(f"{key}.options", options, str(error), remedy) from None
    if not inspect.isclass(found):
        return partial(found, **options) if options else found
    try:
        made = found(**options)
    except ConfigError as error:
        raise ConfigError(f"{key}.options.{error.key}", error.value, error.rule, error.remedy) from None
    if not callable(made):
        raise ConfigError(
            f"{key}.function", config.function, "its instances cannot be called", "give it __call__"
        )
    return made


async def all_of(jobs: Iterable[Awaitable[Result]]) -> list[Result]:
    """Their results in order; the first failure ends the others."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _place(error: Exception) -> str:
    """' (rewards.py:12)': where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _takes_rollout(function: Reward) -> bool:
    """Whether a third positional argument fits."""
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError:
        return False
    return True
