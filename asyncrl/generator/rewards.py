"""Calling the user's reward function so that one bad call never stalls the others.

score ──▸ plain function: a thread of the pool ─┐ deadline_s ──▸ value
          async function: this event loop ──────┘ failed or late: again, `retries` times, then RewardError
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from asyncrl.config.dotted import load_function
from asyncrl.config.schema import RewardConfig
from asyncrl.generator.scores import Score, score_of
from asyncrl.types import Rollout, Task

log = logging.getLogger(__name__)

Reward = Callable[..., Any]
"""reward(task, text) or reward(task, text, rollout), plain or async -> float, its parts by name, or `Scored`."""

MISSED_AFTER = 100
"""Answers scored before a weight whose part has never come is called a mistake."""


class RewardError(Exception):
    """A reward that failed every time it was tried. The task is dropped with reason 'reward'."""


class Scorer:
    """One reward function with its deadline, retries and threads."""

    def __init__(self, function: Reward, config: RewardConfig) -> None:
        self._function, self._config = function, config
        self._async = inspect.iscoroutinefunction(function)
        self._takes_rollout = _takes_rollout(function)
        self._free = asyncio.Semaphore(config.workers)
        self._idle: list[_Caller] = []
        self._missed = set(config.weights)
        self._scored = 0
        self._failures = 0

    @staticmethod
    def from_config(config: RewardConfig) -> Scorer:
        """Raises ConfigError if reward.function names none."""
        return Scorer(load_function(config.function, "reward.function"), config)

    async def score(self, task: Task, text: str, rollout: Rollout) -> Score:
        """What one rollout earned. Raises RewardError after 1 + retries failures."""
        arguments = (task, text, rollout) if self._takes_rollout else (task, text)
        call = self._call_async if self._async else self._call_in_thread
        why = ""
        for _ in range(1 + self._config.retries):
            try:
                score = score_of(await call(*arguments), text, self._config.weights)
            except TimeoutError:
                why = f"took longer than reward.deadline_s={self._config.deadline_s}"
            except Exception as error:
                why = f"raised {type(error).__name__}: {error}"
            else:
                self._note_parts(score)
                return score
            self._failures += 1
        raise RewardError(f"the reward of task {task.ordinal} {why}")

    def stats(self) -> dict[str, float]:
        """reward/failures: failed calls · reward/missed_weights: weights of parts that no answer had so far."""
        return {"reward/failures": self._failures, "reward/missed_weights": len(self._missed)}

    def close(self) -> None:
        """Does not wait for calls that hang."""
        for caller in self._idle:
            caller.dismiss()

    def _note_parts(self, score: Score) -> None:
        self._missed -= score.parts.keys()
        self._scored += 1
        if self._missed and self._scored == MISSED_AFTER:
            log.warning(
                "reward.weights names %s, but %d answers had no such part; the last one had %s",
                ", ".join(sorted(self._missed)),
                self._scored,
                ", ".join(sorted(score.parts)),
            )

    async def _call_async(self, *arguments: Any) -> Any:
        async with asyncio.timeout(self._config.deadline_s):
            return await self._function(*arguments)

    async def _call_in_thread(self, *arguments: Any) -> Any:
        # The deadline is that of the call: it does not count the wait for a free thread.
        async with self._free:
            caller = self._idle.pop() if self._idle else _Caller()
            try:
                async with asyncio.timeout(self._config.deadline_s):
                    value = await caller.call(self._function, arguments)
            except (TimeoutError, asyncio.CancelledError):
                caller.dismiss()  # it may hang for ever; the next call gets another thread
                raise
            except Exception:
                self._idle.append(caller)
                raise
            self._idle.append(caller)
            return value


class _Caller:
    """A thread that calls one function at a time. A daemon: one that hangs does not keep the process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="reward", daemon=True).start()

    def call(self, function: Reward, arguments: tuple[Any, ...]) -> asyncio.Future[Any]:
        called: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def run() -> None:
            try:
                called.set_result(function(*arguments))
            except concurrent.futures.InvalidStateError:
                pass  # cancelled meanwhile: nobody waits for the value
            except BaseException as error:
                if not called.cancelled():
                    called.set_exception(error)

        self._calls.put(run)
        return asyncio.wrap_future(called)

    def dismiss(self) -> None:
        """The thread ends once it is free."""
        self._calls.put(None)

    def _serve(self) -> None:
        while (run := self._calls.get()) is not None:
            run()


def _takes_rollout(function: Reward) -> bool:
    """Whether a third positional argument fits."""
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError:
        return False
    return True
