"""What a process that was started by hand shows of itself."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from waiting import Clock

from asyncrl.config.schema import Config, LaunchConfig, RunConfig
from asyncrl.launch.views import process_view
from asyncrl.launch.views.dashboard import LINE_LENGTH, LineDashboard, status_line
from asyncrl.launch.views.process_reports import ProcessReports
from asyncrl.launch.views.process_view import (
    LAUNCHED,
    GeneratorView,
    LearnerView,
    PoolView,
    ProcessView,
    QueueView,
    Rates,
    shown,
)
from asyncrl.telemetry.status import ProcessStatus

QUEUE = "the queue at tcp://10.0.0.1:5555"


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def status(clock: Clock) -> ProcessStatus:
    return ProcessStatus(clock)


def values(view: ProcessView) -> dict[str, str]:
    view.read()
    return {value.label: value.text for value in view.values()}


def test_a_wait_is_shown_after_two_seconds_and_keeps_its_beginning(
    status: ProcessStatus, clock: Clock
) -> None:
    view = ProcessView(status)
    status.wait_begins(QUEUE, 60.0)
    clock.now += 1.9
    assert view.notes() == []
    clock.now += 10.1
    status.wait_begins(QUEUE, 48.0)  # the same wait, by another request
    assert view.notes() == [f"waiting for {QUEUE} (12 s, gives up at 60 s)"]
    status.wait_ends(QUEUE)
    assert view.notes() == []


def test_a_wait_ends_with_its_block_also_by_an_error(status: ProcessStatus) -> None:
    with suppress(ZeroDivisionError), status.waiting(QUEUE):
        assert [wait.whom for wait in status.waits(0.0)] == [QUEUE]
        raise ZeroDivisionError
    assert status.waits(0.0) == []


def test_lines_come_every_few_seconds_and_at_once_for_a_long_wait(
    status: ProcessStatus, clock: Clock
) -> None:
    out = io.StringIO()
    lines = LineDashboard(ProcessView(status), Console(file=out, width=200), 5.0, clock)

    def after(seconds: float) -> str:
        clock.now += seconds
        before = out.tell()
        lines.refresh()
        return out.getvalue()[before:]

    assert after(1.0) == ""
    assert after(4.0) == "up 5 s\n"
    status.wait_begins(QUEUE)
    assert after(1.0) == ""
    assert after(1.0) == f"up 7 s  waiting for {QUEUE} (2 s)\n"
    assert after(1.0) == ""
    status.wait_ends(QUEUE)
    assert after(1.0) == ""  # its end can wait for the next line
    assert after(3.0) == "up 12 s\n"


def test_rates_are_those_between_two_readings() -> None:
    rates = Rates()
    rates.update({"tokens": 100}, 10.0)
    assert rates.of("tokens") is None
    rates.update({"tokens": 160}, 12.0)
    assert rates.of("tokens") == 30.0
    rates.update({"tokens": 0}, 13.0)  # started again
    assert rates.of("tokens") is None


def test_a_generator_shows_its_weights_its_pace_and_what_it_dropped(
    status: ProcessStatus, clock: Clock
) -> None:
    view = GeneratorView(status)
    assert values(view) == {}
    status.figures = {"held": -1, "tokens": 0, "seconds": {"decode": 1.0, "wait/tasks": 4.0}}
    assert values(view)["weights of version"] == "none yet"
    clock.now += 10.0
    status.figures = {
        "held": 7,
        "tokens": 5000,
        "seconds": {"decode": 8.5, "wait/tasks": 6.0, "other": 0.5},
        "groups/train": 1200,
        "leases": 3,
        "running": 12.0,
        "waiting": 4.0,
        "weights/flips": 8,
        "dropped/too_long": 2,
        "dropped/reward": 1,
    }
    assert values(view) == {
        "weights of version": "7",
        "groups made": "1,200",
        "tokens/s": "500",
        "busy": "75%",
        "tasks leased": "3",
        "samples under way": "16",
        "weight updates": "8",
        "tasks dropped": "reward 1, too_long 2",
    }
    line = status_line(view)
    assert line == (
        "up 10 s  version 7  groups 1,200  tokens/s 500  busy 75%  leased 3  samples 16  dropped reward 1, too_long 2"
    )
    assert len(line) <= LINE_LENGTH


def test_a_pool_shows_what_it_did_and_how_busy_it_is(status: ProcessStatus, clock: Clock) -> None:
    view = PoolView(status)
    status.figures = {"stage": "reference", "groups": 10, "busy_s": 1.0}
    values(view)
    clock.now += 4.0
    status.figures = {"stage": "reference", "groups": 16, "busy_s": 4.0, "dropped/not_finite": 1}
    assert values(view) == {
        "groups done": "16",
        "groups/s": "1.5",
        "busy": "75%",
        "groups dropped": "not_finite 1",
    }


def queue_status(**more: Any) -> dict[str, Any]:
    train = {
        "settings": {"depth": 12},
        "version": 3,
        "trained": 40,
        "ready": 5,
        "leased": 4,
        "pending": 9,
        "bytes": 2_500_000,
        "stages": {"reference": {"waiting": 2, "leased": 1}},
        "dropped_by_reason": {"filtered": 6},
    }
    silent_s = {"learner rank 0": 4.0, "a": 0.5, "b": 1.0}
    workers: dict[str, Any] = {"a": {}, "b": {}}
    return {"streams": {"train": train}, "workers": workers, "silent_s": silent_s, "refused": {}, **more}


def test_a_queue_shows_where_its_tasks_are(status: ProcessStatus) -> None:
    view = QueueView(status)
    status.figures = {"streams": {}, "workers": {}}
    assert values(view) == {}
    view = QueueView(status)
    status.figures = queue_status(refused={"handshake": 2})
    assert values(view) == {
        "version": "3",
        "groups trained": "40",
        "groups ready": "5 of 12",
        "tasks leased": "4",
        "tasks pending": "9",
        "generators and pools": "2",
        "groups that wait for the pool of the reference": "2",
        "tasks dropped": "filtered 6",
        "payloads, MB": "2.5",
        "refused": "handshake 2",
    }


def test_a_queue_counts_the_workers_it_has_messages_of_and_names_the_silent_ones(
    status: ProcessStatus, clock: Clock
) -> None:
    view = QueueView(status)
    status.figures = queue_status(silent_s={"learner rank 0": 42.3, "a": 1.0})  # b has left
    assert values(view)["generators and pools"] == "1"
    assert view.notes() == ["no word from learner rank 0 for 42 s"]
    clock.now += 100.0
    status.figures = queue_status(silent_s={})  # it was forgotten
    view.read()
    assert view.notes() == ["no word from learner rank 0 for 2 min 22 s"]
    status.figures = queue_status()
    view.read()
    assert view.notes() == []


def test_a_learner_shows_its_rows_and_its_waits(status: ProcessStatus, clock: Clock, tmp_path: Path) -> None:
    view = LearnerView(Config(run=RunConfig(versions=10)), tmp_path, status)
    status.wait_begins("a group for version 4 from the generators", 600.0)
    clock.now += 3.0
    row = {"time": 1.0, "version": 3, "rollout/reward/mean": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    view.read()
    assert status_line(view) == (
        "version 3 of 10  waiting for a group for version 4 from the generators (3 s, gives up at 600 s)  reward 0.500"
    )


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # runs/ is made here
    monkeypatch.setattr(process_view, "REFRESH_S", 0.001)
    monkeypatch.setattr(process_view, "LINE_EVERY_S", 0.0)
    for name in (LAUNCHED, "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("quick")
def test_nothing_is_shown_before_the_process_has_loaded(
    status: ProcessStatus, capsys: pytest.CaptureFixture[str]
) -> None:
    with shown("g", GeneratorView(status), status, Config(run=RunConfig(name="it"))):
        assert capsys.readouterr().out == ""
        status.loaded.set()
    assert capsys.readouterr().out.startswith("g of run it: up 0 s")


@pytest.mark.usefixtures("quick")
def test_collections_of_garbage_pass_over_what_a_process_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    done, frozen = list[str](), threading.Event()
    calls = {name: partial(done.append, name) for name in ("collect", "unfreeze")}

    def freeze() -> None:
        done.append("freeze")
        frozen.set()

    monkeypatch.setattr(process_view, "gc", SimpleNamespace(freeze=freeze, **calls))
    status = ProcessStatus()
    with shown("g", GeneratorView(status), status, Config(launch=LaunchConfig(quiet=True))):
        assert done == []
        status.loaded.set()
        assert frozen.wait(30)
        assert done == ["collect", "freeze"]
    assert done == ["collect", "freeze", "unfreeze"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("why", ["quiet", "launched", "second rank"])
def test_who_shows_nothing(
    why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(launch=LaunchConfig(quiet=why == "quiet"))
    if why == "launched":
        monkeypatch.setenv(LAUNCHED, "1")
    if why == "second rank":
        monkeypatch.setenv("RANK", "1")
    status = ProcessStatus()
    with shown("g", GeneratorView(status), status, config):
        status.loaded.set()
    assert capsys.readouterr().out == ""
    process = "g-rank-1" if why == "second rank" else "g"
    assert Path(f"runs/run/trace/{process}.jsonl").exists()


@pytest.mark.usefixtures("quick")
def test_one_that_was_launched_reports_what_it_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHED, "1")
    (tmp_path / "it/logs").mkdir(parents=True)
    status = ProcessStatus()
    with shown("g", GeneratorView(status), status, Config(run=RunConfig(name="it", dir=str(tmp_path)))):
        status.figures = {"dropped/reward": 3}
    reports = ProcessReports(tmp_path / "it/logs")
    reports.read()
    assert reports.text() == "tasks dropped: reward 3"


def test_log_lines_pass_the_table_and_go_back_where_they_went() -> None:
    before, above = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(before)
    logging.getLogger().addHandler(handler)
    try:
        with process_view._logging_to(above):
            logging.getLogger("asyncrl.test").warning("during")
        logging.getLogger("asyncrl.test").warning("after")
    finally:
        logging.getLogger().removeHandler(handler)
    assert "during" in above.getvalue()
    assert before.getvalue() == "after\n"
    assert sys.stderr is not above
