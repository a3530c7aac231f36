"""Calls of one reward function, such that one bad call never stalls the others.

task, text ──▸ plain function: in up to `workers` threads ┐ deadline_s ──▸ read ──▸ result
               async function: this event loop ───────────┘ failed or late: again, `retries` times, then RewardError

After all calls of a task its result is noted; too many failed tasks (`FailureLimit`) raise RewardFailedError.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import reprlib
import traceback
from asyncio import Future
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.functions.signatures import check_reward
from asyncrl.config.schema import RewardConfig
from asyncrl.errors import ConfigError, RewardFailedError
from asyncrl.generator.scoring.call_threads import CallThreads
from asyncrl.generator.threads import as_failure
from asyncrl.telemetry import tracing
from asyncrl.types import Task

Reward = Callable[..., Any]
"""reward(task, text) or reward(task, text, rollout), plain or async -> float, its parts by name, or `Scored`;
`per: group`: reward(task, texts) or reward(task, texts, rollouts) -> a list of these."""

Result = TypeVar("Result")

Read = Callable[[Any], Result]
"""Reads a function's value. Raises an error if it is none."""

PACKAGE = Path(__file__).parents[2]

FIRST = 32
"""Failed tasks before any has worked."""

LATER = 512
"""Consecutive failed tasks after one has worked: more than a service loses that is away for a while. Also the window
of the share of failures."""

LEAST = 64
"""Tasks in the window before the share counts."""

log = logging.getLogger(__name__)


class Arguments(NamedTuple):
    """The text and the rollout of an answer, or lists of them. A function that takes two gets the first two."""

    task: Task
    text: Any
    rollout: Any


class _UnreadableError(Exception):
    """A value that is no reward."""


class _AwaitableError(Exception):
    """A plain function returned something that has to be awaited, which a thread cannot do."""

    def __init__(self, value: Awaitable[Any]) -> None:
        self.value = value


class RewardError(Exception):
    """A reward that failed every time it was tried. The task is dropped with reason 'reward'."""


class RewardCall:
    """One reward function with its deadline, retries and threads. name: empty for a single function.

    failures   calls that failed so far
    late       those among them that took too long
    """

    def __init__(self, function: Reward, config: RewardConfig, name: str = "") -> None:
        self.config, self.name = config, name
        self.failures = self.late = self._awaited = 0
        self._function, self._span = function, name or str(config.function)
        self._async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        )
        self._takes_rollout = _takes_rollout(function)
        self._threads = CallThreads(
            getattr(function, "__name__", "reward"), config.workers, config.deadline_s
        )
        self._awaiting = asyncio.Semaphore(config.workers)
        # Where failures count as 0, any share of them is expected.
        self._limit = FailureLimit(config.max_failed_share if config.on_failure == "drop" else 1.0)
        self._logged: set[type[Exception]] = set()

    @property
    def under_way(self) -> int:
        """Calls that have begun and not ended, without those given up."""
        return self._awaited + self._threads.under_way

    def begin(self, arguments: Arguments, read: Read[Result], again: bool = False) -> Future[Result] | None:
        """An attempt in a thread, for `result`. None: an async function begins there.

        again: before all first attempts: behind them its failure would be known too late
        """
        if self._async:
            return None
        spans: list[tracing.OpenSpan] = []
        attempt = self._threads.begin(partial(self._in_thread, arguments, read, spans), first=again)
        attempt.add_done_callback(lambda _: _end(spans))
        return attempt

    async def result(self, first: Future[Result] | None, arguments: Arguments, read: Read[Result]) -> Result:
        """`read` of the function's value. first: the first attempt. Raises RewardError after 1 + retries failures of
        either."""
        task, why = arguments.task, ""
        for number in range(1 + self.config.retries):
            attempt = self.begin(arguments, read, again=True) if number else first
            try:
                return await self._outcome(attempt, arguments, read)
            except RewardFailedError:
                raise
            except TimeoutError:
                why = f"took longer than reward.deadline_s={self.config.deadline_s}"
                self._log_late(task, why)
            except _UnreadableError as error:
                why = str(error)
            except Exception as error:
                why = f"raised {type(error).__name__}: {error}{_location(error)}"
                self._log_error(task, error)
            self.failures += 1
        which = f"reward {self.name!r}" if self.name else "reward"
        raise RewardError(f"the {which} of task {task.ordinal} {why}")

    async def _outcome(
        self, attempt: Future[Result] | None, arguments: Arguments, read: Read[Result]
    ) -> Result:
        if attempt is None:
            return await self._in_loop(self._value(arguments), arguments, read)
        try:
            return await attempt
        except _AwaitableError as returned:
            async with self._awaiting:
                return await self._in_loop(returned.value, arguments, read)

    def _in_thread(self, arguments: Arguments, read: Read[Result], spans: list[tracing.OpenSpan]) -> Result:
        """The span ends with the attempt, which a call that hangs outlives."""
        spans.append(self._begin_span(arguments))
        value = self._value(arguments)
        if inspect.isawaitable(value):
            raise _AwaitableError(value)
        return _read(read, value)

    async def _in_loop(self, value: Awaitable[Any], arguments: Arguments, read: Read[Result]) -> Result:
        """Raises the function's error; a cancellation that is its own and a SystemExit as `as_failure` changes them."""
        span = self._begin_span(arguments)
        self._awaited += 1
        try:
            async with asyncio.timeout(self.config.deadline_s):
                return _read(read, await value)
        except (SystemExit, asyncio.CancelledError) as raised:
            task = asyncio.current_task()
            if isinstance(raised, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            raise as_failure(raised) from raised
        finally:
            self._awaited -= 1
            span.end()

    def _value(self, arguments: Arguments) -> Any:
        return self._function(*(arguments if self._takes_rollout else arguments[:2]))

    def _begin_span(self, arguments: Arguments) -> tracing.OpenSpan:
        return tracing.begin("reward functions", self._span, tracing.SHORT_S, task=arguments.task.ordinal)

    def start(self) -> None:
        """Starts the function, if it has something to start."""
        if start := getattr(self._function, "start", None):
            start()

    def close(self) -> None:
        """Closes the function, if it has something to close. Does not wait for calls that hang."""
        if close := getattr(self._function, "close", None):
            close()

    def note(self, task: Task, failure: RewardError | None) -> None:
        """Count a task after all of its calls. Raises RewardFailedError if too many tasks failed."""
        if failure is None:
            self._limit.worked()
            return
        self._limit.failed(task.ordinal)
        if self._limit.reached:
            key = f"reward.functions.{self.name}" if self.name else "reward"
            allow = (
                f"; if so many may fail, set {key}.max_failed_share=1" if self._limit.share_exceeded else ""
            )
            raise RewardFailedError(
                f"{key}.function = {self.config.function!r} failed at {self._limit}; the last failure: {failure}. "
                f"Remedy: correct the function, or the fields of the tasks that it reads{allow}"
            )

    def _log_late(self, task: Task, why: str) -> None:
        self.late += 1
        if self.late == 1:
            log.warning("%s at task %d %s, for the first time", self.config.function, task.ordinal, why)

    def _log_error(self, task: Task, error: Exception) -> None:
        """The first error of each kind with its traceback, which leads to the user's code."""
        if type(error) not in self._logged:
            self._logged.add(type(error))
            error.with_traceback(_user_frames(error.__traceback__))
            log.warning(
                "%s at task %d, for the first time:", self.config.function, task.ordinal, exc_info=error
            )


def load_reward(config: RewardConfig, key: str) -> Reward:
    """The function that `config.function` names, with its options; for a class, an instance.

    Raises:
        ConfigError: Under `key`, the section or the entry of `reward.functions`; errors of the class under
            `key`.options.
    """
    if config.function is None:
        raise ConfigError(f"{key}.function", None, "names no reward function", "set it")
    found, options = load_function(config.function, f"{key}.function"), config.options
    try:
        signature = inspect.signature(found)
        # A function gets its task and text later, a class gets all its arguments now.
        (signature.bind if inspect.isclass(found) else signature.bind_partial)(**options)
    except (TypeError, ValueError) as error:
        remedy = f"give the keywords that {config.function} takes"
        raise ConfigError(f"{key}.options", options, str(error), remedy) from None
    if not inspect.isclass(found):
        function = partial(found, **options) if options else found
        check_reward(function, config.function, f"{key}.function", config.per)
        return function
    try:
        made = found(**options)
    except ConfigError as error:
        raise ConfigError(f"{key}.options.{error.key}", error.value, error.rule, error.remedy) from None
    if not callable(made):
        raise ConfigError(
            f"{key}.function", config.function, "its instances cannot be called", "give it __call__"
        )
    if getattr(made, "per", None) == "group" != config.per:
        rule = f"{config.function} scores all answers of a task at once"
        raise ConfigError(f"{key}.per", config.per, rule, f"set {key}.per=group")
    check_reward(made, config.function, f"{key}.function", config.per)
    return made


async def all_of(jobs: Iterable[Awaitable[Result]]) -> list[Result]:
    """The results in order; the first failure cancels the others."""
    jobs = [*jobs]
    if len(jobs) == 1:  # needs no task
        return [await jobs[0]]
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _read(read: Read[Result], value: Any) -> Result:
    try:
        return read(value)
    except Exception as error:
        raise _UnreadableError(f"returned {reprlib.repr(value)}: {error}") from error


def _end(spans: Iterable[tracing.OpenSpan]) -> None:
    for span in spans:
        span.end()


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    """From the function's own frame on, if there is one."""
    first = frames
    while first is not None and Path(first.tb_frame.f_code.co_filename).is_relative_to(PACKAGE / "generator"):
        first = first.tb_next
    return first or frames


def _location(error: Exception) -> str:
    """' (rewards.py:12)': the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _takes_rollout(function: Reward) -> bool:
    """Whether a third positional argument fits."""
    try:
        inspect.signature(function).bind(None, None, None)
    except TypeError:
        return False
    return True


class FailureLimit:
    """The limit at which failed tasks of one function end the generator. most_share: of the last tasks that may fail.

    >>> limit = FailureLimit()
    >>> for ordinal in range(FIRST):
    ...     limit.failed(ordinal)
    >>> limit.reached, str(limit)
    (True, 'each of the first 32 tasks')
    >>> for ordinal in range(FIRST):
    ...     limit.worked()
    >>> limit.reached
    False
    """

    def __init__(self, most_share: float = 1.0) -> None:
        self._most_share = most_share
        self._consecutive: set[int] = set()
        self._recent: deque[bool] = deque(maxlen=LATER)  # whether each task failed
        self._worked = False

    def worked(self) -> None:
        """At all answers of a task."""
        self._worked = True
        self._consecutive.clear()
        self._recent.append(False)

    def failed(self, ordinal: int) -> None:
        """A task that fails again before another works counts once."""
        if ordinal not in self._consecutive:
            self._consecutive.add(ordinal)
            self._recent.append(True)

    @property
    def reached(self) -> bool:
        return len(self._consecutive) >= (LATER if self._worked else FIRST) or self.share_exceeded

    @property
    def share_exceeded(self) -> bool:
        tasks = len(self._recent)
        return tasks >= LEAST and sum(self._recent) > self._most_share * tasks

    def __str__(self) -> str:
        """'each of the first 32 tasks', '40 of the last 64 tasks (62 %, more than max_failed_share=0.5)'"""
        if not self._worked:
            return f"each of the first {len(self._consecutive)} tasks"
        failed, tasks = sum(self._recent), len(self._recent)
        if not self.share_exceeded:
            return f"each of the last {len(self._consecutive)} tasks"
        allowed = f"more than max_failed_share={self._most_share:g}"
        return f"{failed} of the last {tasks} tasks ({failed / tasks:.0%}, {allowed})"
