"""A launcher that is killed at any call by which it resumes a run with other rules."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from disk_calls import KILL, TORN, Watch, watched

from asyncrl.config.load import load_config
from asyncrl.launch.folder.kept import queue_begins_anew
from asyncrl.launch.folder.run_folder import claimed_run_folder

TEXT = "model: {{path: m}}\ntasks: {{source: 'a:b'}}\nreward: {{function: 'a:b'}}\nrun: {{name: it, dir: {folder}}}\n"


@pytest.mark.parametrize(
    ("fault", "first", "every"),
    [(KILL, 2, 11), *(pytest.param(fault, 0, 1, marks=pytest.mark.slow) for fault in (KILL, TORN))],
)
def test_its_configurations_stay_and_the_queue_begins_anew_once(
    tmp_path: Path, fault: str, first: int, every: int
) -> None:
    for at in itertools.count(first, every):
        home = tmp_path / f"{fault}-{at}"
        (home / "notes").mkdir(parents=True)
        (home / "mine.yaml").write_text(TEXT.format(folder=home))
        begun = load_config(home / "mine.yaml")
        with claimed_run_folder(begun) as (run, changed):
            assert not changed
        (run / "checkpoints" / "v000002").mkdir(parents=True)
        other = replace(
            begun,
            run=replace(begun.run, resume=True),
            generator=replace(begun.generator, temperature=0.5),
        )

        def resume(report: object, other: object = other) -> None:
            with claimed_run_folder(other):  # type: ignore[arg-type]
                pass

        watch = Watch(str(run), str(home / "notes"), fault=fault, at=at)
        code, _ = watched(resume, watch)
        where = f"{fault} at {watch.calls()[-1]}"
        assert load_config(run / "config.yaml") in (begun, other), where
        with claimed_run_folder(other) as (_, changed):
            assert changed, where
            queue_begins_anew(run)
        assert load_config(run / "config.yaml") == other
        assert load_config(run / "config.v000002.yaml") == begun
        with claimed_run_folder(other) as (_, changed):
            assert not changed
        assert not [path for path in run.rglob("*") if "partial" in path.name], where
        if code == 0:
            break
