"""The batch of each step, a function of its number.

    tasks    0 1 2 3 4 5 6 7 | 8 9 …          batch_size = 8; step 1 begins with task 8
    rank 0   0   2   4   6                    disjoint parts of every step, and the same steps for any number of ranks
    rank 1     1   3   5   7

So a checkpoint keeps nothing of the data but the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from asyncrl.config.sections.offline import OfflineConfig
from asyncrl.errors import ConfigError, SourceEndedError
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.offline.examples import Make
from asyncrl.tasks.stream import TaskStream
from asyncrl.types import Group, Rollout, Sampling, Task

CHUNK = 256
"""Tasks that are read at once outside of steps."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """batch: this rank's part, None if it has none · left_out: examples that were too long, of this rank
    ended: whether the tasks have no further step, the same on all ranks"""

    batch: MicroBatch | None
    left_out: int = 0
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Batches:
    """data_rank, data_world: see `Backend` · tasks: of all steps, None without a limit · finish: of a whole batch
    max_tokens: of an example"""

    stream: TaskStream
    make: Make
    finish: Callable[[MicroBatch], MicroBatch]
    batch_size: int
    tasks: int | None
    max_tokens: int | None
    data_rank: int
    data_world: int

    def step(self, number: int) -> StepBatch:
        """Raises TaskError for a row that is no example."""
        first = number * self.batch_size
        last = min(first + self.batch_size, self.tasks or first + self.batch_size)
        tasks, ended = self._read(range(first, last))
        batch, left_out = self.of(tasks)
        return StepBatch(batch, left_out, ended)

    def of(self, tasks: Sequence[Task]) -> tuple[MicroBatch | None, int]:
        """(the tasks that are this rank's as a batch, how many of them are too long)"""
        mine = [task for task in tasks if task.ordinal % self.data_world == self.data_rank]
        made = list(zip(mine, self.make(mine), strict=True))
        kept = [(task, one) for task, one in made if self._fits(one)]
        return (self._batch(kept) if kept else None), len(made) - len(kept)

    def chunks(self, tasks: Iterable[Task]) -> Iterator[Sequence[Task]]:
        """The tasks in chunks of at most CHUNK."""
        chunk: list[Task] = []
        for task in tasks:
            chunk.append(task)
            if len(chunk) == CHUNK:
                yield chunk
                chunk = []
        if chunk:
            yield chunk

    def _read(self, ordinals: Iterable[int]) -> tuple[list[Task], bool]:
        """(tasks, whether the source has ended): rows of other ranks are read only where they must be passed by."""
        tasks: list[Task] = []
        for ordinal in ordinals:
            if self.stream.size is not None and ordinal % self.data_world != self.data_rank:
                continue
            try:
                tasks.append(self.stream.task_at(ordinal))
            except SourceEndedError:
                return tasks, True
        return tasks, False

    def _fits(self, example: Rollout) -> bool:
        return self.max_tokens is None or len(example.token_ids) <= self.max_tokens

    def _batch(self, examples: Sequence[tuple[Task, Rollout]]) -> MicroBatch:
        groups = [Group.from_rollouts(task, Sampling(), [one]) for task, one in examples]
        return self.finish(MicroBatch.of(groups))


def steps_and_tasks(chosen: OfflineConfig, size: int | None, key: str) -> tuple[int, int | None]:
    """(optimizer steps, tasks of all of them; None: without a limit). size: tasks of an epoch, None for a source
    without a length. Raises ConfigError for epochs of such a source.

    >>> steps_and_tasks(OfflineConfig(epochs=2, batch_size=4), 5, "dpo")
    (3, 10)
    >>> steps_and_tasks(OfflineConfig(steps=2, epochs=2, batch_size=4), 5, "dpo")
    (2, 10)
    """
    if chosen.epochs is None:
        assert chosen.steps is not None
        return chosen.steps, None
    if size is None:
        rule = "counts passes over tasks.source, which has no length"
        raise ConfigError(f"{key}.epochs", chosen.epochs, rule, f"set {key}.epochs=null {key}.steps=1000")
    tasks = chosen.epochs * size
    steps = -(-tasks // chosen.batch_size)
    return min(steps, chosen.steps or steps), tasks
