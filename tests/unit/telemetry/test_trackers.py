"""Trackers stand beside a run: they get every row in order; one that hangs or fails costs rows alone."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config, TelemetryConfig
from asyncrl.config.sections.run import TRACKERS
from asyncrl.errors import ConfigError
from asyncrl.system import packages
from asyncrl.telemetry.trackers import background
from asyncrl.telemetry.trackers.background import Trackers
from asyncrl.telemetry.trackers.open import MAKERS, check_tracker
from asyncrl.telemetry.trackers.tracker import KeptId, TrackedRun, Tracker

ROLLOUT = {"prompt": "4+5=", "answer": "9", "reward": 1.0, "tokens": 2, "finish": "stop", "segments": [[]]}
SOON_S = 60.0


class Recorder(Tracker):
    """Keeps what it gets. fails: the versions that it refuses · held: it waits for that before each call"""

    def __init__(self, fails: Sequence[int] = (), held: threading.Event | None = None) -> None:
        self.got: list[Any] = []
        self._fails, self._held = fails, held

    def _wait(self) -> None:
        if self._held is not None:
            assert self._held.wait(SOON_S)

    def write(self, version: int, numbers: Mapping[str, float]) -> None:
        self._wait()
        if version in self._fails:
            raise OSError(f"no route for {version}")
        self.got.append((version, dict(numbers)))

    def write_rollouts(self, version: int, table: Sequence[Sequence[Any]]) -> None:
        self._wait()
        self.got.append((version, [list(row) for row in table]))

    def close(self) -> None:
        self.got.append("closed")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_tracker_gets_numbers_and_tables_in_order_and_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Recorder(), Recorder()
    trackers = Trackers({"a": lambda: first, "b": lambda: second})
    trackers.write({"version": 1, "loss": 0.5, "note": "ü", "flag": True})
    trackers.write_rollouts(1, [ROLLOUT])
    trackers.write_rollouts(1, [])
    trackers.write({"version": 0, "eval/accuracy": 1})
    trackers.close(SOON_S)
    wanted = [
        (1, {"loss": 0.5}),
        (1, [["4+5=", "9", 1.0, 2, "stop"]]),
        (0, {"eval/accuracy": 1}),
        "closed",
    ]
    assert first.got == second.got == wanted
    assert not warnings(caplog)


def test_a_tracker_that_fails_is_named_once_and_its_lost_rows_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing, well = Recorder(fails=(1, 2)), Recorder()
    trackers = Trackers({"a": lambda: failing, "b": lambda: well})
    for version in (1, 2, 3):
        trackers.write({"version": version})
    trackers.close(SOON_S)
    assert failing.got == [(3, {}), "closed"]
    assert well.got == [(1, {}), (2, {}), (3, {}), "closed"]
    first, last = warnings(caplog)
    assert first.startswith("tracker a has failed: OSError: no route for 1;")
    assert last == "tracker a lacks 2 rows; metrics.jsonl has all"


def test_a_tracker_that_cannot_be_opened_loses_all_rows(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Tracker:
        raise SystemExit("no key")

    trackers = Trackers({"a": broken})
    trackers.write({"version": 1})
    trackers.close(SOON_S)
    first, last = warnings(caplog)
    assert first.startswith("tracker a cannot be opened: SystemExit: no key")
    assert "lacks 1 rows" in last


def test_a_tracker_that_hangs_takes_no_more_room_and_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    held = threading.Event()
    hanging = Recorder(held=held)
    abandoned: list[str] = []
    trackers = Trackers({"a": lambda: hanging}, room=3, abandon={"a": lambda: abandoned.append("a")})
    for version in range(1, 11):
        trackers.write({"version": version})  # returns at once, whatever `hanging` does
    trackers.close(seconds=0.2)
    assert abandoned == ["a"]
    assert not hanging.got
    first, last = warnings(caplog)
    assert first.startswith("tracker a takes its rows too slowly: 3 wait")
    assert last == "tracker a lacks 10 rows; metrics.jsonl has all"
    held.set()


def test_the_end_waits_once_for_all_trackers_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [100.0], []

    def join(tracker: threading.Thread, seconds: float) -> None:
        waited.append(seconds)
        now[0] += 15.0

    monkeypatch.setattr(background.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(background.BackgroundTracker, "join", join)
    Trackers(dict.fromkeys("abc", Recorder)).close(20.0)
    assert waited == [20.0, 5.0, 0.0]


def test_an_error_is_named_by_its_first_line(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Tracker:
        raise OSError("no route\n" + "to it\n" * 1000)

    Trackers({"a": broken}).close(SOON_S)
    assert warnings(caplog) == [
        "tracker a cannot be opened: OSError: no route; the run goes on, without those rows there"
    ]


def test_tables_that_wait_have_room_for_so_much_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.telemetry.trackers.background.ROOM_BYTES", 2000)
    held = threading.Event()
    hanging = Recorder(held=held)
    trackers = Trackers({"a": lambda: hanging})
    for version in range(1, 4):
        trackers.write_rollouts(version, [{**ROLLOUT, "answer": "x" * 900}])
        trackers.write({"version": version})
    held.set()
    trackers.close(SOON_S)
    tables = [version for version, got in hanging.got[:-1] if isinstance(got, list)]
    assert (tables, len(hanging.got)) == ([1, 2], 6)


def test_a_tracker_that_hangs_while_it_is_opened_is_abandoned() -> None:
    held, abandoned = threading.Event(), list[str]()
    trackers = Trackers(
        {"a": lambda: Recorder(["x"] * held.wait(SOON_S))}, abandon={"a": lambda: abandoned.append("a")}
    )
    trackers.close(seconds=0.2)
    held.set()
    assert abandoned == ["a"]


def test_secrets_in_options_of_any_depth_stay_here(tmp_path: Path) -> None:
    options = {
        "api_key": "s1", "x": {"Authorization": "s2", "hf_token": "s3"}, "hosts": ["http://u:s4@h/", {"password": "s5"}]
    }  # fmt: skip
    run = TrackedRun("r", tmp_path, settings={"reward": {"options": options}, "generator": {"max_tokens": 5}})
    found = run.public_settings()
    assert not re.search(r"s\d", str(found))
    assert found == {"reward.options.hosts": ["http://u:***@h/", {}], "generator.max_tokens": 5}


def test_each_tracker_of_the_configuration_is_there() -> None:
    assert tuple(MAKERS) == TRACKERS


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_without_its_package_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_tracker(name)
    monkeypatch.setattr(packages, "find_spec", lambda _: None)
    says = rf"telemetry\.trackers = '{name}': needs the package {name}.*pip install 'asyncrl\[{name}\]'"
    with pytest.raises(ConfigError, match=says):
        check_tracker(name)


def test_names_that_are_no_trackers_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"telemetry\.trackers = 'comet': is no tracker.*choose from tensorboard"
    ):
        Config(telemetry=TelemetryConfig(trackers=("comet",)))
    with pytest.raises(ConfigError, match="names a tracker twice"):
        Config(telemetry=TelemetryConfig(trackers=("wandb", "wandb")))


def test_the_error_of_the_earlier_key_names_the_present_one() -> None:
    with pytest.raises(
        ConfigError, match=r"telemetry\.sinks.*no such key.*did you mean telemetry\.trackers\?"
    ):
        load_config(None, ["telemetry.sinks=[wandb]"])


def test_settings_go_out_without_addresses() -> None:
    settings = {
        "queue": {"redis_url": "redis://me:secret@host", "address": "tcp://host", "lease_s": 5.0},
        "generator": {"server": {"urls": ["http://me:secret@host"], "deadline_s": 2.0}},
        "note": "see http://me:secret@host",
        "agent": {"options": {"servers": ["http://me:secret@host/mcp"], "at": "http://me:my secret@host"}},
    }
    public = TrackedRun("it", Path(), settings=settings).public_settings()
    options = {"agent.options.servers", "agent.options.at"}
    assert public.keys() == {"queue.lease_s", "generator.server.deadline_s", "note"} | options
    assert public["agent.options.servers"] == ["http://me:***@host/mcp"]
    assert "secret" not in str(public)


def test_a_resumed_run_alone_has_the_name_of_the_one_before(tmp_path: Path) -> None:
    KeptId(TrackedRun("it", tmp_path), "wandb").keep("abc")
    assert KeptId(TrackedRun("it", tmp_path, resume_at=2), "wandb").known == "abc"
    assert KeptId(TrackedRun("it", tmp_path, resume_at=2), "mlflow").known is None
    assert KeptId(TrackedRun("it", tmp_path), "wandb").known is None


def test_a_project_is_of_the_key_then_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "of the variable")
    assert TrackedRun("it", Path(), project="mine").project_or("WANDB_PROJECT") == "mine"
    assert TrackedRun("it", Path()).project_or("WANDB_PROJECT") == "of the variable"
    assert TrackedRun("it", Path()).project_or("NOT_SET_ANYWHERE") == "asyncrl"
