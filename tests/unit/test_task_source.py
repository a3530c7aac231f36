from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError, SourceEndedError, TaskError
from asyncrl.tasks.source import load_source

SOURCES = """
import itertools
opened = []
def letters(count=5):
    return [{"prompt": chr(97 + i), "answer": i} for i in range(count)]
def endless(start=0):
    opened.append(start)
    return ({"prompt": f"p{i}"} for i in itertools.count(start))
def stumbles():
    yield {"prompt": "a"}
    yield [][0]


def three():
    yield from ({"prompt": p} for p in "abc")
def nothing():
    return []
def number():
    return 3
def broken():
    raise OSError("disk on fire")
def bad_rows(row=None):
    return [row]
def tasks():
    from asyncrl.types import Task
    return [Task(77, "hello", {"x": 1})]
"""


@pytest.fixture
def sources(tmp_path: Path) -> str:
    path = tmp_path / "sources.py"
    path.write_text(SOURCES)
    return str(path)


def prompts(stream: Any, ordinals: range) -> list[str]:
    return [stream.task_at(ordinal).prompt for ordinal in ordinals]


def test_rows_become_tasks(sources: str) -> None:
    task = load_source(f"{sources}:letters", {"count": 3}).task_at(2)
    assert (task.ordinal, task.prompt, task.data) == (2, "c", {"answer": 2})


def test_tasks_get_the_ordinal_of_the_stream(sources: str) -> None:
    task = load_source(f"{sources}:tasks").task_at(5)
    assert (task.ordinal, task.prompt, task.data) == (5, "hello", {"x": 1})


def test_unshuffled_epochs_repeat_the_order(sources: str) -> None:
    assert prompts(load_source(f"{sources}:letters", {"count": 3}), range(7)) == list("abcabca")


def test_each_shuffled_epoch_has_every_task_once_in_its_own_order(sources: str) -> None:
    stream = load_source(f"{sources}:letters", {"count": 26}, seed=3, shuffle=True)
    first, second = prompts(stream, range(26)), prompts(stream, range(26, 52))
    assert sorted(first) == sorted(second) == [chr(97 + i) for i in range(26)]
    assert first != second


def test_task_at_depends_on_ordinal_and_seed_only(sources: str) -> None:
    forward = load_source(f"{sources}:letters", {"count": 26}, seed=3, shuffle=True)
    backward = load_source(f"{sources}:letters", {"count": 26}, seed=3, shuffle=True)
    there = prompts(forward, range(78))
    back = [backward.task_at(ordinal).prompt for ordinal in reversed(range(78))]
    assert there == back[::-1]
    other_seed = load_source(f"{sources}:letters", {"count": 26}, seed=4, shuffle=True)
    assert prompts(other_seed, range(78)) != there


def test_iterators_are_read_lazily_and_again_for_an_earlier_ordinal(sources: str) -> None:
    stream = load_source(f"{sources}:endless", {"start": 10})
    assert prompts(stream, range(3)) == ["p10", "p11", "p12"]
    assert stream.task_at(1).prompt == "p11"
    assert stream.task_at(4).prompt == "p14"


def test_an_iterator_that_ends_says_so(sources: str) -> None:
    stream = load_source(f"{sources}:three")
    assert prompts(stream, range(3)) == ["a", "b", "c"]
    with pytest.raises(SourceEndedError, match="after 3 tasks"):
        stream.task_at(3)


def test_an_error_inside_a_source_is_not_its_end(sources: str) -> None:
    stream = load_source(f"{sources}:stumbles")
    with pytest.raises(TaskError, match=r"failed after 1 tasks: IndexError"):
        stream.task_at(1)


def test_an_iterator_cannot_be_shuffled(sources: str) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.shuffle = True"):
        load_source(f"{sources}:endless", shuffle=True)


@pytest.mark.parametrize(
    ("function", "says"),
    [("nothing", "no tasks"), ("number", "returned a int"), ("broken", "OSError: disk on fire")],
)
def test_sources_that_are_none(sources: str, function: str, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        load_source(f"{sources}:{function}")


def test_options_that_the_source_does_not_take(sources: str) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.options.*takes count"):
        load_source(f"{sources}:letters", {"counts": 3}, section="evaluation")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("just text", "task 0 is a str, not a mapping"),
        ({"question": "1+1"}, "task 0 has no 'prompt', only 'question'"),
        ({"prompt": 3}, "must be a text or a list of messages"),
        ({"prompt": [{"role": "user"}]}, "must be a text or a list of messages"),
        ({"prompt": "a", "answer": {1, 2}}, "cannot travel"),
    ],
)
def test_rows_that_are_no_tasks(sources: str, row: Any, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        load_source(f"{sources}:bad_rows", {"row": row})


def test_messages_are_a_prompt(sources: str) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert load_source(f"{sources}:bad_rows", {"row": {"prompt": messages}}).task_at(0).prompt == messages


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return tmp_path / "problems.jsonl"


def test_jsonl_with_its_own_prompt_key(jsonl: Path) -> None:
    jsonl.write_text('{"question": "1+1", "answer": 2}\n\n{"question": "2+2", "answer": 4}\n')
    stream = load_source(str(jsonl), prompt_key="question")
    assert stream.size == 2
    assert stream.task_at(1).data == {"answer": 4}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{oops", "problems.jsonl:3: not JSON"),
        ('{"text": "a"}', "problems.jsonl:3 has no 'prompt'"),
        ("[1]", "a list"),
    ],
)
def test_bad_lines_are_named(jsonl: Path, line: str, says: str) -> None:
    jsonl.write_text(f'{{"prompt": "a"}}\n\n{line}\n')
    with pytest.raises(TaskError, match=says):
        load_source(str(jsonl))


def test_jsonl_that_is_missing_or_empty(jsonl: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_source(str(jsonl))
    jsonl.write_text("\n")
    with pytest.raises(TaskError, match="no tasks"):
        load_source(str(jsonl))
