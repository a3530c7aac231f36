"""Parquet files, folders and saved data sets, read by the package `datasets`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from asyncrl.config.schema import Config
from asyncrl.config.sections.tasks import EvaluationConfig, SourceConfig
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks.source import held_out, load_source

ROWS = [{"question": f"{i}+{i}", "answer": str(2 * i)} for i in range(20)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def made(rows: Sequence[Any] = ROWS) -> Any:
    """A data set of these rows, which lies in a file as those of users do."""
    with NamedTemporaryFile(suffix=".parquet") as file:
        parquet.write_table(pyarrow.Table.from_pylist(rows), file.name)
        return datasets.load_dataset("parquet", data_files=file.name, split="train")


def source(path: Path, **options: Any) -> SourceConfig:
    return SourceConfig(source=str(path), options=options, prompt_key="question")


def saved(folder: Path) -> Path:
    made().save_to_disk(str(folder))
    return folder


def saved_splits(folder: Path) -> Path:
    datasets.DatasetDict(train=made(), test=made(ROWS[:3])).save_to_disk(str(folder))
    return folder


def parquet_file(folder: Path) -> Path:
    made().to_parquet(str(folder) + ".parquet")
    return folder.with_suffix(".parquet")


def parquet_folder(folder: Path) -> Path:
    folder.mkdir()
    made().to_parquet(str(folder / "train-00000-of-00001.parquet"))
    made(ROWS[:3]).to_parquet(str(folder / "test-00000-of-00001.parquet"))
    return folder


def jsonl_folder(folder: Path) -> Path:
    folder.mkdir()
    made().to_json(str(folder / "train.jsonl"))
    made(ROWS[:3]).to_json(str(folder / "test.jsonl"))
    return folder


@pytest.mark.parametrize("write", [saved, saved_splits, parquet_file, parquet_folder, jsonl_folder])
def test_rows_of_a_data_set_become_tasks(tmp_path: Path, write: Any) -> None:
    stream = load_source(source(write(tmp_path / "data")))
    assert stream.size == 20
    task = stream.task_at(27)
    assert (task.ordinal, task.prompt, task.data) == (27, "7+7", {"answer": "14"})


@pytest.mark.parametrize("write", [saved_splits, parquet_folder, jsonl_folder])
def test_a_split_is_chosen(tmp_path: Path, write: Any) -> None:
    assert load_source(source(write(tmp_path / "data"), split="test")).size == 3


def test_epochs_of_a_data_set_are_shuffled_and_pure(tmp_path: Path) -> None:
    chosen = source(saved(tmp_path / "data"))
    forward, backward = load_source(chosen, shuffle_key=(1,)), load_source(chosen, shuffle_key=(1,))
    there = [forward.task_at(ordinal).prompt for ordinal in range(40)]
    assert sorted(there[:20]) == sorted(there[20:]) == sorted(row["question"] for row in ROWS)
    assert there[:20] != there[20:]
    assert there == [backward.task_at(ordinal).prompt for ordinal in reversed(range(40))][::-1]


def test_messages_of_a_table_lose_their_empty_fields(tmp_path: Path) -> None:
    prompt = [
        {"role": "system", "content": "s", "name": "x"},
        {"role": "user", "content": "hi", "name": None},
    ]
    made([{"question": prompt}]).save_to_disk(str(tmp_path / "data"))
    task = load_source(source(tmp_path / "data")).task_at(0)
    assert task.prompt == [prompt[0], {"role": "user", "content": "hi"}]


def test_fields_that_cannot_travel_can_be_left_out(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "when": datetime(2026, 1, 1)}]
    made(rows).save_to_disk(str(tmp_path / "data"))
    with pytest.raises(TaskError, match=r"cannot be sent.*tasks\.fields"):
        load_source(source(tmp_path / "data"))
    chosen = SourceConfig(source=str(tmp_path / "data"), prompt_key="question", fields={"gold": "answer"})
    assert load_source(chosen).task_at(0).data == {"gold": "0"}


@pytest.mark.parametrize(
    ("options", "key"),
    [({"split": "validation"}, "tasks.source"), ({"splits": "test"}, "tasks.options.splits")],
)
def test_what_a_data_set_does_not_have_is_named(tmp_path: Path, options: Any, key: str) -> None:
    path = saved_splits(tmp_path / "data")
    with pytest.raises(ConfigError) as caught:
        load_source(source(path, **options))
    assert caught.value.key == key


@pytest.mark.parametrize("options", [{"split": "test"}, {"subset": "main"}])
def test_one_data_set_that_was_saved_has_no_parts(tmp_path: Path, options: Any) -> None:
    with pytest.raises(ConfigError, match="has no split, subset or revision"):
        load_source(source(saved(tmp_path / "data"), **options))


def test_a_parquet_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no table")
    with pytest.raises(ConfigError, match=r"a\.parquet': cannot be loaded"):
        load_source(source(tmp_path / "a.parquet"))


def test_a_hub_name_goes_to_the_hub_with_subset_split_and_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    answer = made()

    def hub(*of: Any, **how: Any) -> Any:
        asked.append((of, how))
        return answer

    monkeypatch.setattr(datasets, "load_dataset", hub)
    options = {"subset": "main", "split": "test[:20]", "revision": "v1"}
    chosen = SourceConfig(source="hf:openai/gsm8k", options=options, prompt_key="question")
    assert load_source(chosen).size == 20
    assert asked == [(("openai/gsm8k", "main"), {"split": "test[:20]", "revision": "v1"})]


def test_several_evaluation_sets_are_loaded_by_name(tmp_path: Path) -> None:
    path = saved_splits(tmp_path / "data")
    entry = {"source": str(path), "prompt_key": "question"}
    sets = {"small": {**entry, "options": {"split": "test"}}}
    config = Config(evaluation=EvaluationConfig(**entry, sets=sets))
    assert {name: len(tasks) for name, tasks in held_out(config).items()} == {"": 20, "small": 3}
