from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config, RunConfig
from asyncrl.config.sections.tasks import SourceConfig, TasksConfig
from asyncrl.errors import ConfigError, SourceEndedError, TaskError
from asyncrl.tasks.source import TaskStream, training_tasks
from asyncrl.tasks.source import load_source as load

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


def load_source(source: str, options: Any = None, prompt_key: str = "prompt", **more: Any) -> TaskStream:
    return load(SourceConfig(source=source, options=options or {}, prompt_key=prompt_key), **more)


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
    stream = load_source(f"{sources}:letters", {"count": 26}, shuffle_key=(3,))
    first, second = prompts(stream, range(26)), prompts(stream, range(26, 52))
    assert sorted(first) == sorted(second) == [chr(97 + i) for i in range(26)]
    assert first != second


def test_task_at_depends_on_ordinal_and_seed_only(sources: str) -> None:
    forward = load_source(f"{sources}:letters", {"count": 26}, shuffle_key=(3,))
    backward = load_source(f"{sources}:letters", {"count": 26}, shuffle_key=(3,))
    there = prompts(forward, range(78))
    back = [backward.task_at(ordinal).prompt for ordinal in reversed(range(78))]
    assert there == back[::-1]
    other_seed = load_source(f"{sources}:letters", {"count": 26}, shuffle_key=(4,))
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
        load_source(f"{sources}:endless", shuffle_key=(0,))


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
        ("just text", "task 0: is a str, not a mapping"),
        ({"question": "1+1"}, "task 0: has no 'prompt', only 'question'"),
        ({"prompt": 3}, "must be a text or a list of messages"),
        ({"prompt": [{"role": "user"}]}, "must be a text or a list of messages"),
        ({"prompt": [{"role": None, "content": "a"}]}, "must be a text or a list of messages"),
        (
            {"prompt": [{"role": "user", "content": "a", "image": {1, 2}}]},
            r"its prompt cannot be sent.*keep texts and numbers",
        ),
        ({"prompt": "a", "answer": {1, 2}}, r"cannot be sent.*select fields that can with tasks\.fields"),
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
        ('{"text": "a"}', "problems.jsonl:3: has no 'prompt'"),
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


def test_a_jsonl_file_is_not_kept_in_memory_and_its_lines_are_read_where_they_stand(jsonl: Path) -> None:
    lines = [f'{{"prompt": "p{i}", "answer": "{"ä" * (i % 7)}"}}' for i in range(50)]
    jsonl.write_text("\n\n".join(lines), encoding="utf-8")
    stream = load_source(str(jsonl))
    assert stream.size == 50
    for at in (49, 0, 7, 23):
        task = stream.task_at(at)
        assert (task.prompt, task.data) == (f"p{at}", {"answer": "ä" * (at % 7)})


def test_a_jsonl_file_that_is_not_utf8_or_has_options(jsonl: Path) -> None:
    jsonl.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(TaskError, match=r"problems\.jsonl:2: not UTF-8"):
        load_source(str(jsonl))
    with pytest.raises(ConfigError, match=r"^tasks\.options = .*takes none"):
        load_source(str(jsonl), {"split": "train"})


@pytest.mark.parametrize("source", [None, "no/such/folder", "problems.json"])
def test_what_is_no_source_at_all(source: str) -> None:
    with pytest.raises(ConfigError, match=r"^tasks\.source"):
        load_source(source)


NESTED = '{"extra": {"question": "1+1", "level": 3}, "solution": "2", "a.b": "c"}'


def test_fields_are_chosen_and_renamed_also_those_within_others(jsonl: Path) -> None:
    jsonl.write_text(NESTED)
    fields = {"answer": "solution", "level": "extra.level", "ab": "a.b"}
    chosen = SourceConfig(source=str(jsonl), prompt_key="extra.question", fields=fields)
    task = load(chosen).task_at(0)
    assert (task.prompt, task.data) == ("1+1", {"answer": "2", "level": 3, "ab": "c"})


def test_a_field_that_a_row_lacks_is_named(jsonl: Path) -> None:
    jsonl.write_text(NESTED)
    with pytest.raises(TaskError, match=r"problems\.jsonl:1: has no 'depth', only 'question', 'level'"):
        load(SourceConfig(source=str(jsonl), prompt_key="extra.question", fields={"depth": "extra.depth"}))


TEXT, ASKED = "hi", [{"role": "user", "content": "hi"}]
OWN = [{"role": "system", "content": "mine"}, *ASKED]


@pytest.mark.parametrize(
    ("prompt", "config", "becomes"),
    [
        (TEXT, {}, TEXT),
        (TEXT, {"chat": True}, ASKED),
        (TEXT, {"system": "be brief"}, [{"role": "system", "content": "be brief"}, *ASKED]),
        (ASKED, {"system": "be brief"}, [{"role": "system", "content": "be brief"}, *ASKED]),
        (OWN, {"system": "be brief"}, OWN),
        ([{"role": "user", "content": "hi", "name": None}], {}, ASKED),
    ],
)
def test_what_goes_around_a_prompt(sources: str, prompt: Any, config: Any, becomes: Any) -> None:
    chosen = SourceConfig(source=f"{sources}:bad_rows", options={"row": {"prompt": prompt}}, **config)
    assert load(chosen).task_at(0).prompt == becomes


def mixture(sources: str, **weights: float) -> TasksConfig:
    entry = {"source": f"{sources}:letters", "options": {"count": 5}}
    return TasksConfig(mixture={name: {**entry, "weight": weight} for name, weight in weights.items()})


def test_a_mixture_gives_each_source_its_share_and_its_epochs(sources: str) -> None:
    stream = training_tasks(Config(tasks=mixture(sources, few=1, many=3)))
    tasks = [stream.task_at(ordinal) for ordinal in range(40)]
    assert [task.ordinal for task in tasks] == list(range(40))
    few = [task.prompt for task in tasks if task.data["mixture"] == "few"]
    many = [task.prompt for task in tasks if task.data["mixture"] == "many"]
    assert (len(few), len(many)) == (10, 30)
    for epoch in (few[:5], few[5:], many[:5], many[25:]):
        assert sorted(epoch) == list("abcde")


def test_a_mixture_depends_on_ordinal_and_seed_only(sources: str) -> None:
    tasks = mixture(sources, a=2, b=1, c=0.7)
    forward, backward = training_tasks(Config(tasks=tasks)), training_tasks(Config(tasks=tasks))
    there = [forward.task_at(ordinal) for ordinal in range(60)]
    assert there == [backward.task_at(ordinal) for ordinal in reversed(range(60))][::-1]
    other = training_tasks(Config(tasks=tasks, run=RunConfig(seed=1)))
    assert there != [other.task_at(ordinal) for ordinal in range(60)]


def test_a_mixture_ends_with_the_first_source_that_ends(sources: str) -> None:
    entries = {"long": {"source": f"{sources}:letters"}, "short": {"source": f"{sources}:three"}}
    stream = training_tasks(Config(tasks=TasksConfig(mixture=entries, shuffle=False)))
    with pytest.raises(SourceEndedError):
        [stream.task_at(ordinal) for ordinal in range(8)]


def test_a_source_of_a_mixture_that_fails_is_named(sources: str) -> None:
    entries = {"a": {"source": f"{sources}:letters", "options": {"number": 1}}}
    with pytest.raises(ConfigError, match=r"^tasks\.mixture\.a\.options"):
        training_tasks(Config(tasks=TasksConfig(mixture=entries)))
