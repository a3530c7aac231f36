"""Every error that asyncrl raises on purpose.

    AsyncRLError
    ├── ConfigError         a key, its value, the rule it breaks, the remedy          exit code 2
    ├── TaskError           a task source that cannot be read or gives bad tasks      exit code 2
    ├── RewardFailedError   a reward function that fails at too many tasks            exit code 2
    ├── SourceEndedError    there is no task at this ordinal or beyond; the run ends with those before it
    ├── WireError           bytes that are not a valid message; refused and counted
    ├── RefusedError        the queue refused, with a reason (fenced, unknown, full)  exit code 8
    ├── DeadlineError       who waited for whom, for what, how long                   exit code 4
    ├── ProcessDiedError    a process of the run ended by itself                      its exit code if of these, else 5
    ├── EngineFailedError   an engine that cannot go on; its generator ends           exit code 5
    ├── RunClosedError      the run is over; not a failure, loops end on it
    ├── WeightSyncError     a version did not arrive whole, or arrived wrong          exit code 6
    ├── JournalError        the queue's journal is damaged, in use or taken over      exit code 9
    ├── StoppedError        stopped by a signal, and saved; it can be resumed         exit code 10
    ├── PoolLostError       a model that learns on a pool is not what it was there      exit code 11
    ├── RankLostError       a rank of several gave no sign of life                    exit code 12
    └── TrainingError       a loss or gradient that must not be trained on            exit code 7
        └── BehaviourMismatchError    an engine's log-probs are not the learner's     exit code 7

    OSError (not ours)      the disk is full, a folder cannot be written              exit code 9

The exit code of a process that ends on one of these is `error.exit_code`; anything else is a bug and exits 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from asyncrl.masking import masked, masked_url

T = TypeVar("T")

SHOWN = 200
"""Characters of a value in a message; the rest is left out."""

SAY_WHY = range(2, 13)
"""Exit codes of errors that are raised on purpose."""

INTERRUPTED = 130
"""Exit code of a process that Ctrl-C has ended in order."""


class AsyncRLError(Exception):
    """Root of the tree."""

    exit_code = 1


class ConfigError(AsyncRLError):
    """Bad input, found before any process starts. A long value is cut, and passwords in URLs are masked.

    >>> str(ConfigError("batch.group_size", 1, "grpo needs at least 2 rollouts a group", "set batch.group_size=8"))
    'batch.group_size = 1: grpo needs at least 2 rollouts a group. Remedy: set batch.group_size=8'
    """

    exit_code = 2

    def __init__(self, key: str, value: object, rule: str, remedy: str) -> None:
        shown = _cut(repr(masked_url(value) if isinstance(value, str) else value), SHOWN)
        super().__init__(masked(f"{key} = {shown}: {rule}. Remedy: {_cut(remedy, 4 * SHOWN)}"))
        self.key, self.value, self.rule, self.remedy = key, value, rule, remedy

    @property
    def each(self) -> tuple[ConfigError, ...]:
        """The errors that this one stands for."""
        return (self,)


class JoinedConfigError(ConfigError):
    """Several errors of one configuration. Its key, value, rule and remedy are those of the first; its text has a line
    for each."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        first = errors[0]
        super().__init__(first.key, first.value, first.rule, first.remedy)
        self.args = ("\n".join(map(str, errors)),)
        self._errors = tuple(errors)

    @property
    def each(self) -> tuple[ConfigError, ...]:
        return self._errors


def raise_all(errors: Iterable[ConfigError]) -> None:
    """Raise these errors, each text once, as one; nothing if there are none."""
    different = list({str(error): error for error in errors}.values())
    if different:
        raise different[0] if len(different) == 1 else JoinedConfigError(different)


def call_all(calls: Iterable[Callable[[], T]]) -> list[T]:
    """The results of all calls. Raises the errors of all those that fail, as one."""
    results: list[T] = []
    errors: list[ConfigError] = []
    for call in calls:
        try:
            results.append(call())
        except ConfigError as error:
            errors += error.each
    raise_all(errors)
    return results


class TaskError(AsyncRLError):
    """A task source that cannot be read, or a task that is not one."""

    exit_code = 2


class RewardFailedError(AsyncRLError):
    """A reward function that fails at too many tasks: not bad luck but a mistake, in it or in the tasks. The text names
    the function, how many tasks, the last one, and what was raised."""

    exit_code = 2


class SourceEndedError(AsyncRLError):
    """A task source has no more tasks. Not a failure: the run ends with those it gave."""

    exit_code = 0


class WireError(AsyncRLError):
    """Bytes that are not a valid message. The receiver counts it, answers it and lives on."""


class RefusedError(AsyncRLError):
    """The queue refused a request. `reason` is a short literal, e.g. 'fenced'; the text has the details."""

    exit_code = 8

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


class DeadlineError(AsyncRLError):
    """A wait that ran out. detail: what is known of the other side.

    >>> str(DeadlineError("learner rank 0", "the queue at tcp://127.0.0.1:5555", "a hello", 30.0))
    'learner rank 0 waited 30.0 s for the queue at tcp://127.0.0.1:5555: a hello did not come'
    """

    exit_code = 4

    def __init__(self, who: str, whom: str, what: str, seconds: float, detail: str = "") -> None:
        because = f"; {detail}" if detail else ""
        super().__init__(f"{who} waited {seconds:.1f} s for {whom}: {what} did not come{because}")
        self.who, self.whom, self.what, self.seconds = who, whom, what, seconds


class ProcessDiedError(AsyncRLError):
    """A process of the run ended by itself. The text names it, its exit code and its last log lines.

    code: with which it ended. A code of one of the errors above becomes the launcher's own.

    >>> [ProcessDiedError("learner ended", code).exit_code for code in (1, -9, 4, 9)]
    [5, 5, 4, 9]
    """

    exit_code = 5

    def __init__(self, text: str, code: int | None = None) -> None:
        super().__init__(text)
        if code is not None and code in SAY_WHY:
            self.exit_code = code


class EngineFailedError(AsyncRLError):
    """An engine that cannot go on: what it fails at is not the fault of single requests. Its generator ends."""

    exit_code = 5


class RunClosedError(AsyncRLError):
    """The run is over. Loops of workers end on it; the process exits 0."""

    exit_code = 0


class WeightSyncError(AsyncRLError):
    """A version that did not arrive whole, or whose live parameters do not hash to the learner's."""

    exit_code = 6


class JournalError(AsyncRLError):
    """The queue's journal or payload store cannot be used: damaged, of another run or format, in use, taken over."""

    exit_code = 9


class StoppedError(AsyncRLError):
    """Somebody wanted the run to end before its last version: what was learned is saved, `run.resume=true` goes on.
    Not a failure, but not done either: whoever sent SIGTERM to a pre-empted job starts it again on this exit code."""

    exit_code = 10
    ended = "stopped"
    """The run's end, as summary.json and the queue name it."""


class PoolLostError(AsyncRLError):
    """A pool that trains a model has died, or was begun anew: the learner goes back to its newest checkpoint, and the
    next process of the pool with it."""

    exit_code = 11


class RankLostError(AsyncRLError):
    """A rank of a learner, or of a process of a pool, hangs and was killed, or the machine of some is lost, and the
    others have ended with it. The text names it. The next start goes on from the newest checkpoint."""

    exit_code = 12


class TrainingError(AsyncRLError):
    """A step that must not be trained on, under the policy `learner.on_bad_step: stop`."""

    exit_code = 7


class BehaviourMismatchError(TrainingError):
    """The log-probs that an engine recorded differ from those that the learner computes with the same weights.

    The text names the engine, the version, the difference and the limit.
    """


class DivergedError(AsyncRLError):
    """A run that was made again came to something else than the recorded one. The text names the first difference."""

    exit_code = 13


def first_failure(failures: BaseExceptionGroup[AsyncRLError]) -> AsyncRLError:
    """The first error of loops that fail one after another, which is the cause of the others."""
    found = failures.exceptions[0]
    return first_failure(found) if isinstance(found, BaseExceptionGroup) else found


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"
