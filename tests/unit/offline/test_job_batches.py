"""The batches of steps: a function of the step's number, and every task on one rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner_cases import rollout

from asyncrl.config.load import load_config
from asyncrl.config.sections.offline import OfflineConfig
from asyncrl.config.sections.tasks import TasksConfig
from asyncrl.errors import ConfigError, TaskError
from asyncrl.offline.batches import Batches, steps_and_tasks
from asyncrl.offline.examples import check_pair
from asyncrl.tasks.source import load_source
from asyncrl.tasks.stream import IteratorStream, SequenceStream, TaskStream
from asyncrl.types import Rollout, Task


def make(tasks: Sequence[Task]) -> list[Rollout]:
    """Examples of one token of the prompt, and as many targets as the row has."""
    return [rollout([1, *[2] * task.data["targets"]], prompt=1) for task in tasks]


def to_task(ordinal: int, index: int, row: int) -> Task:
    return Task(ordinal, str(index), {"targets": row})


def batches(stream: TaskStream, rank: int = 0, world: int = 1, size: int = 4, **keys: int | None) -> Batches:
    limits = {"tasks": None, "max_tokens": None, **keys}
    return Batches(stream, make, lambda batch: batch, size, data_rank=rank, data_world=world, **limits)


def ordinals(one: Batches, step: int) -> list[int]:
    batch = one.step(step).batch
    return [] if batch is None else batch.ordinals_R.tolist()


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 40), st.booleans())
def test_ranks_share_the_steps_of_one(world: int, size: int, rows: int, sized: bool) -> None:
    """Disjoint, and together the same tasks for any number of ranks; a source that ends ends on all ranks at once."""

    def stream() -> TaskStream:
        every = [1] * rows
        return SequenceStream(every, to_task, (3,)) if sized else IteratorStream(lambda: iter(every), to_task)

    ranks = [batches(stream(), rank, world, size, tasks=rows) for rank in range(world)]
    alone = batches(stream(), size=size, tasks=rows)
    seen: list[int] = []
    for step in range(-(-rows // size)):
        assert sorted(ordinal for each in ranks for ordinal in ordinals(each, step)) == ordinals(alone, step)
        seen += ordinals(alone, step)
    assert seen == list(range(rows))


def test_a_step_may_be_taken_again() -> None:
    one = batches(SequenceStream([1, 2, 3, 4, 5], to_task, (0,)))
    first, again = (one.step(3).batch for _ in range(2))
    assert first is not None
    assert again is not None
    assert first.token_ids_N.tolist() == again.token_ids_N.tolist()


def test_a_source_that_ends_is_trained_to_its_last_row() -> None:
    one = batches(IteratorStream(lambda: iter([1] * 6), to_task))
    assert [(ordinals(one, step), one.step(step).ended) for step in range(3)] == [
        ([0, 1, 2, 3], False),
        ([4, 5], True),
        ([], True),
    ]


def test_examples_that_are_too_long_are_left_out_and_counted() -> None:
    taken = batches(SequenceStream([1, 5, 3, 9], to_task, None), max_tokens=4).step(0)
    assert taken.batch is not None
    assert (taken.batch.ordinals_R.tolist(), taken.left_out) == ([0, 2], 2)


def test_epochs_need_a_length_and_end_with_their_last_task() -> None:
    with pytest.raises(
        ConfigError, match=r"sft\.epochs = 1: counts passes over tasks\.source, which has no length"
    ):
        steps_and_tasks(OfflineConfig(epochs=1), None, "sft")
    steps, tasks = steps_and_tasks(OfflineConfig(epochs=2, batch_size=4), 5, "sft")
    last = batches(SequenceStream([1] * 5, to_task, None), tasks=tasks)
    assert ordinals(last, steps - 1) == [8, 9]
    words = ["model.path=m", "tasks.source=t", "sft.steps=null"]
    with pytest.raises(ConfigError, match=r"sft\.steps = None: sets no end"):
        load_config(None, words, optional=["reward.function"])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": "a"}, "has no 'rejected' answer"),
        ({"chosen": "a", "rejected": 3}, "has no 'rejected' answer"),
        ({"chosen": "a", "rejected": "a"}, "has equal answers"),
        (
            {"chosen": "a", "rejected": [{"role": "assistant", "content": "b"}]},
            "has messages under 'rejected'",
        ),
        ({"chosen": "a", "rejected": [{"role": "user", "content": "b"}]}, "the last is the assistant's"),
        ({"chosen": "a", "rejected": "b", "margin": -1}, "has a 'margin' of -1"),
    ],
)
def test_bad_pairs_are_named_by_file_and_line(tmp_path: Path, row: dict[str, object], problem: str) -> None:
    path = tmp_path / "pairs.jsonl"
    good = {"prompt": "p", "chosen": "a", "rejected": "b", "margin": 0.5}
    path.write_text("\n".join(map(json.dumps, [good, good, {"prompt": "p"} | row])))
    with pytest.raises(TaskError, match=f"pairs.jsonl:3: .*{problem}"):
        load_source(TasksConfig(source=str(path)), check=check_pair)
