"""`asyncrl.train` up to the launcher: what its arguments come to, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from notebook_cells import session

import asyncrl
from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError, ConfigError, TaskError
from asyncrl.launch import local_run
from asyncrl.launch.folder.kept import keep_config
from asyncrl.launch.preflight import check_present
from asyncrl.tasks.source import training_tasks

ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(3)]
FILE = """\
run: {name: of-the-file}
model: {path: file-model}
tasks: {mixture: {a: {source: "a.jsonl"}}, shuffle: true}
reward: {functions: {old: {function: "old.py:f"}}}
queue: {max_staleness: 7, depth: 270}
"""

Run = Callable[..., Config]


def reward(task: asyncrl.Task, text: str) -> float:
    return float(text == task.data["answer"])


def best(task: asyncrl.Task, texts: list[str]) -> list[float]:
    return [0.0] * len(texts)


def rows() -> Iterator[dict[str, str]]:
    yield from ROWS


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The configuration that the launcher is called with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("asyncrl.launch.preflight.preflight", lambda config: None)
    seen: list[Config] = []
    monkeypatch.setattr(local_run, "train", lambda config: seen.append(config) or {"ended": "done"})

    def call(*words: Any, **keys: Any) -> Config:
        asyncrl.train(*words, **keys)
        return seen.pop()

    return call


def test_a_run_needs_no_file(run: Run, tmp_path: Path) -> None:
    config = run(
        model=tmp_path / "m", tasks=ROWS, reward=reward, max_staleness=3, batch={"groups": np.int64(4)}
    )
    assert (config.model.path, config.queue.max_staleness, config.batch.groups) == (str(tmp_path / "m"), 3, 4)
    assert str(config.reward.function).endswith(":reward")
    written = Path(str(config.tasks.source))
    assert [json.loads(line) for line in written.read_text().splitlines()] == ROWS
    assert written.parent == tmp_path / "runs/run/inputs"
    assert written.stat().st_mode & 0o777 == 0o600


def test_each_run_without_a_name_has_a_folder_of_its_own(run: Run) -> None:
    given = {"model": "m", "tasks": ROWS, "reward": reward}
    assert [run(**given).run.name for _ in range(3)] == ["run", "run-2", "run-3"]
    assert run(**given, run={"name": "mine"}).run.name == "mine"
    with pytest.raises(ConfigError, match=r"^run.resume = True: does not name the run"):
        run(**given, run={"resume": True})
    assert run(**given, run={"name": "mine", "resume": True}).run.resume


@pytest.mark.parametrize(
    "keys",
    [
        {"queue": {"depth": 208}, "learner": {"optimizer": {"lr": 1e-3}}},
        {"queue.depth": 208, "learner.optimizer.lr": 1e-3},
        {"queue": {"depth": 208}, "learner": {"optimizer.lr": 1e-3}},
        {"overrides": {"queue": {"depth": 208}, "learner.optimizer": {"lr": 1e-3}}},
        {"overrides": ["queue.depth=208", "learner.optimizer.lr=1e-3"]},
        {"config": {"queue": {"depth": 208}, "learner": {"optimizer": {"lr": 1e-3}}}},
        {"overrides": "queue.depth=208", "learner": {"optimizer": {"lr": 0.001}}},
    ],
)
def test_keys_are_nested_or_dotted(run: Run, keys: dict[str, Any]) -> None:
    config = run(model="m", tasks=ROWS, reward=reward, **keys)
    assert (config.queue.depth, config.learner.optimizer.lr) == (208, 1e-3)


def test_later_ones_count(run: Run, tmp_path: Path) -> None:
    """File, arguments and keys, overrides; arguments replace the file's tasks and rewards whole."""
    (tmp_path / "c.yaml").write_text(FILE)
    config = run("c.yaml")
    assert (config.run.name, config.queue.max_staleness, config.model.path) == (
        "of-the-file",
        7,
        "file-model",
    )
    config = run(
        "c.yaml", {"queue": {"depth": 290}}, tasks=rows, reward=reward, queue={"depth": 280}, max_staleness=0
    )
    assert (config.queue.depth, config.queue.max_staleness) == (290, 0)
    assert config.tasks.mixture == {}
    assert config.tasks.shuffle is False  # a generator has no order to change
    assert list(config.reward.functions) == []
    assert run("c.yaml", None).queue.depth == 270


def test_presets_are_included(run: Run) -> None:
    config = run(
        model="m", tasks=ROWS, reward=reward, include=["algorithms/dr_grpo.yaml"], algorithm={"clip_low": 0.1}
    )
    assert (config.algorithm.advantage, config.algorithm.clip_low) == ("dr_grpo", 0.1)


def test_sections_are_given_as_mappings_too(run: Run) -> None:
    config = run(
        model={"path": "m", "dtype": "bfloat16"},
        tasks={"source": ROWS, "prompt_key": "question"},
        reward={"function": reward, "deadline_s": 5},
        evaluation=ROWS,
    )
    assert (config.model.dtype, config.tasks.prompt_key, config.reward.deadline_s) == (
        "bfloat16",
        "question",
        5,
    )
    assert str(config.evaluation.source).endswith(".jsonl")
    config = run(model="m", tasks=ROWS, reward={"right": reward, "best": {"function": best, "per": "group"}},
                 evaluation={"sets": {"hard": {"source": ROWS}}})  # fmt: skip
    assert config.reward.functions["best"]["per"] == "group"
    assert config.reward.functions["right"]["function"].endswith(":reward")
    assert config.evaluation.sets["hard"]["source"].endswith(".jsonl")


def test_a_run_is_resumed_with_what_it_was_begun_with(run: Run, tmp_path: Path) -> None:
    """From a notebook, in another session: the same rows and functions have the same names."""
    cell = "def reward(task, text): return 1.0\n"
    kept: list[Config] = []
    for resume in (False, True):
        with session(cell) as cells:
            kept.append(
                run(model="m", tasks=ROWS, reward=cells.reward, run={"name": "mine", "resume": resume})
            )
            function = load_function(str(kept[-1].reward.function), "reward.function")
            assert function(None, "") == 1.0
    folder = tmp_path / "runs/mine"
    assert [keep_config(config, folder) for config in kept] == [False, False]
    assert load_config(folder / "config.yaml") == kept[1]
    assert len([path for path in (folder / "inputs").iterdir() if path.is_file()]) == 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, r"^model.path = None: must be set. Remedy: give model=…"),
        ({"model": "m"}, r"^reward.function = None: must be set. Remedy: give reward=…"),
        ({"model": object(), "reward": reward}, r"^model = .*save it with save_pretrained"),
        ({"model": "m", "reward": 3}, r"^reward = 3: is no function but of type int"),
        ({"model": "m", "reward": lambda task, text: 1.0}, r"^reward = .*define it with def"),
        ({"model": "m", "reward": reward, "tasks": iter(ROWS)}, r"^tasks = .*is an iterator.*give a list"),
        ({"model": "m", "reward": reward, "tasks": []}, r"^tasks = \[\]: has no rows"),
        ({"model": "m", "reward": reward, "tasks": 3}, r"^tasks = 3: gives no tasks"),
        ({"model": "m", "reward": reward, "lr": 1e-3}, r"^lr = 0.001: no such key .*learner.optimizer.lr"),
        (
            {"model": "m", "reward": reward, "max_stalness": 2},
            r"^max_stalness = 2: no such key .*the argument max_staleness, or the key queue.max_staleness",
        ),
        ({"model": "m", "reward": reward, "queue": 3}, r"^queue = 3: is a section"),
        ({"model": "m", "reward": reward, "queue": {"depht": 3}}, r"^queue.depht = 3: no such key .*queue.depth"),
        ({"max_staleness": 1, "queue": {"max_staleness": 2}}, r"^queue.max_staleness = 1: is given twice.*it is 2"),
        ({"config": "model"}, r"^config = 'model': is the folder of a model.*give model='model'"),
        ({"config": 3}, r"^config = 3: is no YAML file"),
        ({"config": "nowhere.yaml"}, r"^config file = 'nowhere.yaml'"),
        ({"overrides": 3}, r"^overrides = 3: is neither"),
        ({"include": ["nowhere.yaml"]}, r"^include = 'nowhere.yaml'"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(
    run: Run, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    with pytest.raises(ConfigError, match=message):
        run(**keys)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["1+1="], r'^tasks\[0\] is a str, not a mapping; write rows such as {"prompt"'),
        (
            [*ROWS, {"prompt": "?", "image": object()}],
            r"^tasks\[3\] cannot be written as JSON: a object, <object",
        ),
    ],
)
def test_rows_that_are_none_are_named(run: Run, tmp_path: Path, tasks: list[Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        run(model="m", reward=reward, tasks=tasks)
    assert not (tmp_path / "runs").exists()


def test_a_run_that_does_not_begin_leaves_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(config: Config) -> None:
        raise ConfigError("model.path", "m", "is not there", "give one that is")

    monkeypatch.setattr("asyncrl.launch.preflight.preflight", refuse)
    with pytest.raises(AsyncRLError):
        run(model="m", tasks=ROWS, reward=reward)
    assert list((tmp_path / "runs").glob("*")) == []


def test_a_second_caller_leaves_the_inputs_of_the_first(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"model": "m", "tasks": ROWS, "reward": reward, "run": {"name": "mine"}}
    inputs = tmp_path / "runs/mine/inputs"
    seen: list[list[Path]] = []

    def second() -> None:
        with pytest.raises(ConfigError, match="a live run uses"):
            asyncrl.train(**given, evaluation=ROWS[:1])

    def first(config: Config) -> dict[str, str]:
        before = list(inputs.iterdir())
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(30)
        seen.extend([before, list(inputs.iterdir())])
        return {"ended": "done"}

    monkeypatch.setattr(local_run, "train", first)
    asyncrl.train(**given)
    assert seen[0] == seen[1] != []


def test_a_name_that_another_caller_has_just_taken_is_not_taken_twice(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look before either has made its folder."""
    (tmp_path / "runs/run").mkdir(parents=True)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "exists", lambda path, **_: False)
        assert run(model="m", tasks=ROWS, reward=reward).run.name == "run-2"


def test_a_run_dir_that_is_a_file_is_refused_before_inputs_are_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for keys in ({"dir": "file"}, {"dir": "file", "name": "mine"}):
        with pytest.raises(ConfigError, match=r"^run.dir = 'file': .*cannot be made"):
            run(model="m", tasks=ROWS, reward=reward, run=keys)


def test_inputs_that_somebody_has_changed_are_written_again(run: Run, tmp_path: Path) -> None:
    given = {"model": "m", "tasks": ROWS, "reward": reward, "run": {"name": "mine"}}
    path = Path(str(run(**given).tasks.source))
    text = path.read_text()
    path.write_text("changed")
    other = tmp_path / "other"
    other.write_text("mine")
    (path.parent / f".{path.name}.{os.getpid()}.partial").symlink_to(other)
    (path.parent / f"{path.name}.{os.getpid()}").symlink_to(other)
    run(**given)
    assert path.read_text() == text
    assert other.read_text() == "mine"


def test_a_file_in_the_folder_of_its_own_run_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "proj").mkdir()
    (tmp_path / "proj/config.yaml").write_text(FILE.replace("name: of-the-file", "name: proj, dir: ."))
    with pytest.raises(ConfigError, match="would write its own configuration"):
        run("proj/config.yaml")
    assert [path.name for path in (tmp_path / "proj").iterdir()] == ["config.yaml"]


def test_a_result_is_its_summary_and_more(tmp_path: Path) -> None:
    summary = {"ended": "done", "versions": 2, "reward_start": 0.25, "reward_end": None}
    result = asyncrl.TrainResult(tmp_path, tmp_path / "final", [{"version": 1}, {"version": 2}], summary)
    assert dict(result) == summary
    assert result["versions"] == result.summary["versions"] == 2
    assert repr(result) == (
        f"TrainResult(done at version 2, reward 0.25 -> none, model='{tmp_path}/final', 2 rows)"
    )
    with pytest.raises(AttributeError):
        result.folder = tmp_path  # type: ignore[misc]


def _nested(levels: int) -> dict[str, Any]:
    outermost: dict[str, Any] = {}
    inner = outermost
    for _ in range(levels):
        inner["a"] = inner = {}
    return outermost


def _of_itself() -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    mapping["options"] = mapping
    return mapping


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run": {"versions": np.array([1, 2])}}, "^run.versions = .* of several values"),
        ({"agent": _of_itself()}, "^agent = .* nests deeper than 64 levels, or holds itself"),
        ({"config": {"reward": {"options": _nested(3000)}}}, "^config = .* nests deeper"),
        ({"tasks": [{"prompt": "a\ud800"}]}, r"^tasks\[0\] cannot be written as JSON"),
        ({"tasks": np.array(3)}, "^tasks = .* gives no tasks"),
        ({"config": "a\0b"}, r"^config file = .*null byte"),
        ({"max_staleness": 10**400}, "^queue.max_staleness = 1000"),
    ],
)
def test_values_that_nobody_means_are_refused_by_name(
    run: Run, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, TaskError), match=message):
        run(**{"model": "m", "tasks": ROWS, "reward": reward, **arguments})


def test_a_path_that_is_too_long_is_refused() -> None:
    config = Config()
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path="x" * 300))
    with pytest.raises(ConfigError, match=r"^model.path = .*File name too long"):
        check_present(config)


def test_a_row_that_is_wrong_is_named_as_the_caller_gave_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "asyncrl.launch.preflight.preflight", lambda config: training_tasks(config).task_at(0)
    )
    with pytest.raises(
        TaskError, match=r"^row 1 of tasks: has no 'prompt'.*tasks.prompt_key=promt"
    ) as caught:
        run(model="m", reward=reward, tasks=[{"promt": "1+1=", "answer": "2"}])
    assert "jsonl" not in str(caught.value)
