"""The policy of the launcher, on stand-ins for the three processes: small shell scripts."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import pty
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from processes import signals_must_be_heard

from asyncrl.config.schema import (
    BatchConfig,
    Config,
    GeneratorConfig,
    LaunchConfig,
    ModelConfig,
    QueueConfig,
    RunConfig,
)
from asyncrl.config.sections.placement import PlaceConfig, PlacementConfig
from asyncrl.config.sections.reward import RewardConfig
from asyncrl.errors import ConfigError, DeadlineError, ProcessDiedError, StoppedError
from asyncrl.launch import local_run, processes
from asyncrl.launch.folder.run_folder import claimed_run_folder
from asyncrl.launch.folder.scale import ScaleRequest
from asyncrl.launch.views import process_reports
from asyncrl.launch.views.process_reports import ProcessReports

# Words of a stand-in: $1 is the folder's config.yaml; the queue's last one is the descriptor to announce on.
QUEUE = "for fd; do :; done; echo tcp://127.0.0.1:1 >/dev/fd/$fd; exec sleep 600"
GENERATOR = "exit 0"
DONE = 'echo "{\\"versions\\": 3}" > $(dirname $1)/summary.json'


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        run=RunConfig(name="it", dir=str(tmp_path)),
        generator=GeneratorConfig(count=2),
        launch=LaunchConfig(
            generator_restarts=2,
            queue_restarts=2,
            learner_restarts=2,
            pool_restarts=2,
            restart_pause_s=0.0,
            stop_deadline_s=20.0,
            quiet=True,
        ),
    )


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What each process of the run does."""
    scripts = {"queue": QUEUE, "learner": DONE, "generator": GENERATOR}

    def command(folder: Path, process: str, *words: str) -> list[str]:
        return ["sh", "-c", scripts[process], process, str(folder / "config.yaml"), *words]

    monkeypatch.setattr(processes, "process_command", command)
    return scripts


@pytest.mark.usefixtures("scripts")
def test_a_run_that_ends_well_returns_its_summary(config: Config, tmp_path: Path) -> None:
    assert local_run.train(config) == {"versions": 3}
    assert (tmp_path / "it" / "config.yaml").exists()


def test_generators_that_do_not_notice_the_end_are_stopped(
    config: Config, scripts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scripts["generator"] = "exec sleep 600"
    impatient = dataclasses.replace(config.launch, stop_deadline_s=0.2)
    assert local_run.train(dataclasses.replace(config, launch=impatient)) == {"versions": 3}
    assert "did not end within 0 s and were stopped: generator-0, generator-1" in capsys.readouterr().err


def test_who_is_left_when_the_queue_has_gone_is_not_waited_for(
    config: Config, scripts: dict[str, str]
) -> None:
    # A generator that was being started when the run ended hears of it from nobody.
    scripts["generator"] = "exec sleep 600"
    scripts["queue"] = (
        "for fd; do :; done; echo tcp://127.0.0.1:1 >/dev/fd/$fd; cd $(dirname $1); "
        "while [ ! -e summary.json ]; do sleep 0.05; done"
    )
    patient = dataclasses.replace(config.launch, stop_deadline_s=1000)
    assert local_run.train(dataclasses.replace(config, launch=patient)) == {"versions": 3}


def test_a_warning_of_a_generator_is_seen_on_the_terminal(
    config: Config, scripts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scripts["generator"] = (
        'printf \'{"dropped": {}, "late": {}, "under_way": {}, "last": "", "warning": "names rigth"}\' '
        "> $(dirname $1)/logs/$4.report.json"
    )
    assert local_run.train(config) == {"versions": 3}
    assert capsys.readouterr().err.count("warns: names rigth") == 1


@pytest.mark.parametrize(
    ("checkpoint", "message"), [("v000000", "nothing to resume"), ("v000002", "goes on from")]
)
def test_a_stopped_run_names_its_checkpoint_only_if_it_has_one(
    config: Config, scripts: dict[str, str], checkpoint: str, message: str
) -> None:
    scripts["learner"] = (
        f'cd $(dirname $1); mkdir -p checkpoints/{checkpoint}; echo "{{\\"ended\\": \\"stopped\\"}}" > summary.json'
    )
    with pytest.raises(StoppedError, match=message):
        local_run.train(config)


def test_processes_get_the_address_and_their_names(
    config: Config, scripts: dict[str, str], tmp_path: Path
) -> None:
    scripts["generator"] = 'echo "$2 $4"'
    scripts["learner"] = f'echo "$2"; {DONE}'
    local_run.train(config)
    logs = tmp_path / "it" / "logs"
    assert (logs / "learner.log").read_text() == "queue.address=tcp://127.0.0.1:1\n"
    assert (logs / "generator-1.log").read_text() == "queue.address=tcp://127.0.0.1:1 generator-1\n"


def test_a_dead_generator_is_started_again(
    config: Config, scripts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first life of generator-0 dies; its second lets the learner end.
    scripts["generator"] = (
        "cd $(dirname $1); [ $4 = generator-0 ] || exit 0; [ -e first ] && { echo > pipe; exit 0; }; "
        "touch first; kill -KILL $$"
    )
    scripts["learner"] = f"cd $(dirname $1); read line < pipe; {DONE}"
    (tmp_path / "it").mkdir()
    os.mkfifo(tmp_path / "it" / "pipe")
    assert local_run.train(config) == {"versions": 3}
    said = capsys.readouterr().err
    assert "generator-0 ended (killed by SIGKILL) and is started again, 1 of 2 restarts" in said


def test_a_generator_that_ends_well_before_the_run_is_closed_has_died(
    config: Config, scripts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_run, "SLOW_END_S", -1e9)
    monkeypatch.setattr(local_run, "REFRESH_S", 0.01)
    scripts["learner"] = "exec sleep 600"
    with pytest.raises(ProcessDiedError, match=r"generator-\d ended \(exit code 0\) before the run was over"):
        local_run.train(config)


def test_a_generator_that_keeps_dying_ends_the_run(config: Config, scripts: dict[str, str]) -> None:
    scripts["generator"] = "echo no luck; exit 1"
    scripts["learner"] = "exec sleep 600"
    with pytest.raises(ProcessDiedError, match=r"(?s)generator-\d ended \(exit code 1\).*no luck") as died:
        local_run.train(config)
    assert died.value.exit_code == 5


@pytest.mark.parametrize("most", [0, 2])
def test_a_generator_that_keeps_dying_is_left_out_while_another_one_lives(
    config: Config,
    scripts: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    """The learner ends once the launcher has left it out."""
    scripts["generator"] = "[ $4 = generator-0 ] || exec sleep 600; exit 1"
    scripts["learner"] = f"until [ -e $(dirname $1)/over ]; do sleep 0.02; done; {DONE}"
    put, deaths = local_run.Restarts.put, Counter[str]()

    def count(restarts: local_run.Restarts, name: str, at: float, start: Callable[[], None]) -> None:
        put(restarts, name, at, start)
        deaths[name] += 1
        if deaths[name] > most:
            (tmp_path / "it" / "over").touch()

    monkeypatch.setattr(local_run.Restarts, "put", count)
    launch = dataclasses.replace(config.launch, generator_restarts=most, stop_deadline_s=0.2)
    assert local_run.train(dataclasses.replace(config, launch=launch)) == {"versions": 3}
    said = capsys.readouterr().err
    assert said.count("generator-0 ended (exit code 1) and is started again") == most
    assert "generator-0 ended (exit code 1) and is left out" in said
    assert f"it died after {most} restarts within 3600 s; the others go on" in said
    assert deaths == {"generator-0": most + 1}


def test_a_generator_that_was_left_out_comes_back_and_lives_while_the_next_one_is(
    config: Config,
    scripts: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each generator dies in its first two lives, the second one once the first one is back."""
    (tmp_path / "it").mkdir()
    for name in ("back", "over"):
        os.mkfifo(tmp_path / "it" / name)
    scripts["generator"] = (
        "cd $(dirname $1); echo >> $4; lives=$(wc -l < $4); "
        "[ $4$lives = generator-11 ] && read line < back; [ $lives = 3 ] || exit 1; "
        "if [ $4 = generator-0 ]; then echo > back; else echo > over; fi; exec sleep 600"
    )
    scripts["learner"] = f"cd $(dirname $1); read line < over; {DONE}"
    waits: list[float] = []
    put = local_run.Restarts.put

    def put_at_once(restarts: local_run.Restarts, name: str, at: float, start: Callable[[], None]) -> None:
        waits.append(at - time.monotonic())
        put(restarts, name, 0.0, start)

    monkeypatch.setattr(local_run.Restarts, "put", put_at_once)
    launch = dataclasses.replace(config.launch, generator_restarts=1, stop_deadline_s=0.2)
    assert local_run.train(dataclasses.replace(config, launch=launch)) == {"versions": 3}
    assert [wait > launch.restart_window_s / 2 for wait in waits] == [False, True, False, True]
    assert capsys.readouterr().err.count("is left out for 3") == 2


def test_nobody_is_started_any_more_once_the_queue_of_a_closed_run_has_left(
    config: Config, scripts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator that died twice waits for its second restart then."""
    over = f"until [ -e {tmp_path}/over ]; do sleep 0.02; done"
    scripts["generator"] = "[ $4 = generator-0 ] || exit 0; exit 1"
    scripts["queue"] = f"for fd; do :; done; echo tcp://127.0.0.1:1 >/dev/fd/$fd; {over}"
    scripts["learner"] = f"{over}; {DONE}; kill -KILL $$"
    put, waiting = local_run.Restarts.put, []

    def note(restarts: local_run.Restarts, name: str, at: float, start: Callable[[], None]) -> None:
        put(restarts, name, at, start)
        waiting.append(restarts)
        if len(waiting) == 2:
            (tmp_path / "over").touch()

    monkeypatch.setattr(local_run.Restarts, "put", note)
    patient = dataclasses.replace(config.launch, restart_pause_s=600.0)
    assert local_run.train(dataclasses.replace(config, launch=patient)) == {"versions": 3}
    assert not waiting[1].waits("generator-0")


def test_a_generator_with_a_bad_config_is_not_started_again(
    config: Config, scripts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scripts["generator"] = "exit 2"
    scripts["learner"] = "exec sleep 600"
    with pytest.raises(ProcessDiedError, match=r"exit code 2") as died:
        local_run.train(config)
    assert died.value.exit_code == 2
    assert "started again" not in capsys.readouterr().err


def test_a_process_that_could_not_write_its_log_is_named_with_the_cause_of_its_exit_code(
    config: Config, scripts: dict[str, str]
) -> None:
    scripts["learner"] = "exit 9"
    with pytest.raises(ProcessDiedError, match=r"learner ended \(exit code 9\) .*: the disk is full") as died:
        local_run.train(config)
    assert died.value.exit_code == 9


def with_pool(config: Config, processes: int = 1) -> Config:
    place = PlaceConfig(where="pool", processes=processes, devices="6,7", threads=3)
    return dataclasses.replace(config, placement=PlacementConfig(reference=place))


def test_a_pool_is_started_with_its_share_of_the_devices_and_left_to_end_by_itself(
    config: Config, scripts: dict[str, str], tmp_path: Path
) -> None:
    scripts["pool"] = "sleep 0.1; echo $2 $3 $5 $CUDA_VISIBLE_DEVICES $OMP_NUM_THREADS"
    assert local_run.train(with_pool(config, processes=2)) == {"versions": 3}
    for index, device in ((0, 6), (1, 7)):
        said = (tmp_path / "it" / "logs" / f"reference-{index}.log").read_text()
        assert said == f"reference queue.address=tcp://127.0.0.1:1 reference-{index} {device} 3\n"


def test_a_pool_that_keeps_dying_ends_the_run(
    config: Config, scripts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scripts |= {"pool": "echo out of memory; exit 1", "learner": "exec sleep 600"}
    with pytest.raises(ProcessDiedError, match=r"(?s)reference-0 ended \(exit code 1\).*out of memory"):
        local_run.train(with_pool(config))
    assert capsys.readouterr().err.count("reference-0 ended (exit code 1) and is started again") == 2


@pytest.mark.parametrize(
    ("process", "script"),
    [("learner", "echo loss is nan; exit 7"), ("queue", "echo loss is nan; exit 7")],
)
def test_a_learner_or_queue_that_says_why_it_ended_ends_the_run(
    config: Config, scripts: dict[str, str], process: str, script: str
) -> None:
    scripts["learner"] = "exec sleep 600"
    scripts[process] = script
    with pytest.raises(ProcessDiedError, match=rf"(?s){process} ended \(exit code 7\).*loss is nan") as died:
        local_run.train(config)
    assert died.value.exit_code == 7


def test_a_killed_queue_is_started_again_at_its_address(
    config: Config, scripts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Its first life is killed; its second, which is told where to listen, lets the learner end.
    scripts["queue"] = (
        "for fd; do :; done; echo tcp://127.0.0.1:1 >/dev/fd/$fd; cd $(dirname $1); "
        '[ -e first ] && { echo "$2" > second; echo > pipe; exec sleep 600; }; touch first; kill -KILL $$'
    )
    scripts["learner"] = f"cd $(dirname $1); read line < pipe; {DONE}"
    (tmp_path / "it").mkdir()
    os.mkfifo(tmp_path / "it" / "pipe")
    assert local_run.train(config) == {"versions": 3}
    assert (tmp_path / "it" / "second").read_text() == "queue.address=tcp://127.0.0.1:1\n"
    said = capsys.readouterr().err
    assert "queue ended (killed by SIGKILL) and is started again from its journal, 1 of 2 restarts" in said
    assert "dashboard" not in said  # its address is no news


def test_a_killed_learner_is_started_again_from_its_checkpoint(
    config: Config, scripts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts["learner"] = f'cd $(dirname $1); echo "$3" >> words; [ -n "$3" ] || kill -KILL $$; {DONE}'
    assert local_run.train(config) == {"versions": 3}
    assert (tmp_path / "it" / "words").read_text() == "\nrun.resume=true\n"
    said = capsys.readouterr().err
    assert (
        "learner ended (killed by SIGKILL) and is started again from the newest checkpoint, 1 of 2 restarts"
        in said
    )


@pytest.mark.parametrize("code", [11, 12], ids=["pool", "rank"])
def test_a_learner_that_has_lost_a_pool_or_a_rank_is_started_again(
    config: Config, scripts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    why = "echo asyncrl learner: RankLostError: rank 1 gave no sign of life"
    scripts["learner"] = (
        f'cd $(dirname $1); echo "$3" >> words; [ -n "$3" ] || {{ {why}; exit {code}; }}; {DONE}'
    )
    assert local_run.train(config) == {"versions": 3}
    assert (tmp_path / "it" / "words").read_text() == "\nrun.resume=true\n"
    said = capsys.readouterr().err
    assert f"learner ended (exit code {code}) and is started again from the newest checkpoint" in said
    assert "learner.log: RankLostError: rank 1 gave no sign of life\n" in said


def test_a_learner_that_keeps_dying_ends_the_run(
    config: Config, scripts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scripts["learner"] = "echo no luck; kill -KILL $$"
    with pytest.raises(ProcessDiedError, match=r"(?s)learner ended \(killed by SIGKILL\).*no luck"):
        local_run.train(config)
    assert capsys.readouterr().err.count("is started again") == 2


def test_a_learner_that_is_killed_on_its_way_out_has_ended_well(
    config: Config, scripts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    # The queue leaves once the run is closed; the learner, which closed it, is still there then.
    scripts["queue"] = (
        "for fd; do :; done; echo tcp://127.0.0.1:1 >/dev/fd/$fd; cd $(dirname $1); "
        "while [ ! -e summary.json ]; do sleep 0.05; done; echo $$ > left"
    )
    scripts["learner"] = (
        f"{DONE}; cd $(dirname $1); while [ ! -s left ] || kill -0 $(cat left) 2>/dev/null; do sleep 0.05; done; "
        "kill -KILL $$"
    )
    assert local_run.train(config) == {"versions": 3}
    assert "started again" not in capsys.readouterr().err


def test_a_queue_that_leaves_after_a_learner_was_killed_has_closed_the_run(
    config: Config, scripts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scripts["learner"] = f"{DONE}; echo $$ > $(dirname $1)/pid; kill -KILL $$"
    scripts["queue"] = (
        "for fd; do :; done; echo tcp://127.0.0.1:1 >/dev/fd/$fd; cd $(dirname $1); "
        "while [ ! -s pid ] || kill -0 $(cat pid) 2>/dev/null; do sleep 0.05; done"
    )
    assert local_run.train(config) == {"versions": 3}
    assert "started again" not in capsys.readouterr().err


def test_a_learner_that_is_killed_before_it_closes_the_run_is_started_again(
    config: Config,
    scripts: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its summary is written, and the queue stays."""
    monkeypatch.setattr(local_run, "SLOW_END_S", -1e9)
    monkeypatch.setattr(local_run, "REFRESH_S", 0.01)
    scripts["generator"] = "exec sleep 600"
    scripts["learner"] = f'{DONE}; [ -n "$3" ] || kill -KILL $$'
    impatient = dataclasses.replace(config.launch, stop_deadline_s=0.2)
    assert local_run.train(dataclasses.replace(config, launch=impatient)) == {"versions": 3}
    assert capsys.readouterr().err.count("learner ended (killed by SIGKILL) and is started again") == 1


DIES = "for fd; do :; done; echo tcp://127.0.0.1:1 >/dev/fd/$fd; kill -KILL $$"


def test_a_queue_that_keeps_dying_ends_the_run(
    config: Config, scripts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scripts |= {"queue": DIES, "learner": "exec sleep 600"}
    with pytest.raises(ProcessDiedError, match=r"queue ended \(killed by SIGKILL\)"):
        local_run.train(config)
    assert capsys.readouterr().err.count("is started again") == 2


def test_a_queue_that_keeps_nothing_is_not_started_again(
    config: Config, scripts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    scripts |= {"queue": DIES, "learner": "exec sleep 600"}
    forgetful = dataclasses.replace(config, queue=QueueConfig(store="memory"))
    with pytest.raises(ProcessDiedError, match=r"queue ended \(killed by SIGKILL\)"):
        local_run.train(forgetful)
    assert "is started again" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("resume", "checkpoint", "anew"),
    [(False, False, True), (True, False, True), (True, True, False)],
    ids=["new", "resumed at the beginning", "resumed at a checkpoint"],
)
def test_the_journal_is_for_a_learner_that_goes_on(
    config: Config, scripts: dict[str, str], tmp_path: Path, resume: bool, checkpoint: bool, anew: bool
) -> None:
    scripts["queue"] = f'echo "$2" > $(dirname $1)/word; {QUEUE}'
    if checkpoint:
        (tmp_path / "it" / "checkpoints" / "v000050").mkdir(parents=True)
    local_run.train(dataclasses.replace(config, run=dataclasses.replace(config.run, resume=resume)))
    assert ((tmp_path / "it" / "word").read_text() == "--anew\n") == anew


def test_a_journal_of_other_rules_is_begun_anew(
    config: Config, scripts: dict[str, str], tmp_path: Path
) -> None:
    scripts["queue"] = f'echo "$2" > $(dirname $1)/word; {QUEUE}'
    config = dataclasses.replace(config, model=ModelConfig(path="m"))
    config = dataclasses.replace(config, reward=RewardConfig(function="a:b"))
    run = dataclasses.replace(config.run, resume=True)
    resumed = dataclasses.replace(config, run=run)
    local_run.train(config)
    (tmp_path / "it" / "checkpoints" / "v000050").mkdir(parents=True)
    for batch, anew in ((config.batch, False), (BatchConfig(group_size=2), True)):
        local_run.train(dataclasses.replace(resumed, batch=batch))
        assert ((tmp_path / "it" / "word").read_text() == "--anew\n") == anew


@pytest.mark.parametrize(
    ("report", "missing"), [("", "its report that it has loaded"), ("learner", "a sign of life")]
)
def test_a_learner_that_hangs_is_named(
    config: Config,
    scripts: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    report: str,
    missing: str,
) -> None:
    """While it loads, or later: a learner that is stopped keeps no deadline of its own."""
    monkeypatch.setattr(process_reports, "SILENT_S", 0.0)
    monkeypatch.setattr(local_run, "REFRESH_S", 0.01)
    scripts["learner"] = (
        f"{f'echo {{}} > $(dirname $1)/logs/{report}.report.json; ' if report else ''}exec sleep 600"
    )
    impatient = dataclasses.replace(
        config,
        learner=dataclasses.replace(config.learner, groups_deadline_s=0.2 if report else 1000.0),
        launch=dataclasses.replace(config.launch, load_deadline_s=1000.0 if report else 0.01),
    )
    with pytest.raises(DeadlineError, match=rf"for the learner: {missing} did not come.*learner\.log"):
        local_run.train(impatient)


def test_a_queue_that_never_listens(config: Config, scripts: dict[str, str]) -> None:
    scripts["queue"] = "exec sleep 600"
    impatient = dataclasses.replace(config.launch, start_deadline_s=0.01)
    with pytest.raises(DeadlineError, match="process queue: the address it listens at"):
        local_run.train(dataclasses.replace(config, launch=impatient))


class Importing:
    """A fork server whose imports end once the launcher has looked `looks` times at what goes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
        self.ready, self.failure, self.began = False, "", 0.0
        self.done, self.started = threading.Event(), list[str]()
        refresh, start = local_run.LocalRun._refresh, processes.Processes._start

        def look(run: local_run.LocalRun) -> None:
            nonlocal looks
            looks -= 1
            if looks == 0:
                self.started.append("imported")
                self.done.set()
            refresh(run)

        def record(own: processes.Processes, name: str, *words: Any, **more: Any) -> None:
            self.started.append(name)
            start(own, name, *words, **more)

        monkeypatch.setattr(local_run, "REFRESH_S", 0.01)
        monkeypatch.setattr(local_run.LocalRun, "_refresh", look)
        monkeypatch.setattr(processes.Processes, "_start", record)
        monkeypatch.setattr(processes, "own_server", lambda modules, env: self)

    def wait_ready(self, seconds: float) -> bool:
        self.ready = self.done.wait(60.0)
        return self.ready

    def fork(self, *request: Any, **more: Any) -> None:
        return None


@pytest.mark.usefixtures("scripts")
def test_workers_are_started_once_the_fork_server_has_imported(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    importing = Importing(monkeypatch, looks=3)
    assert local_run.train(config) == {"versions": 3}
    assert importing.started == ["queue", "imported", "learner", "generator-0", "generator-1"]


def test_a_queue_that_dies_during_the_imports_is_started_again(
    config: Config, scripts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    importing = Importing(monkeypatch, looks=20)
    scripts["queue"] = f'if [ -z "$3" ] || [ $2 = --anew ]; then {DIES}; fi; {QUEUE}'
    assert local_run.train(config) == {"versions": 3}
    assert importing.started == ["queue", "queue", "imported", "learner", "generator-0", "generator-1"]


@pytest.mark.usefixtures("scripts")
def test_ctrl_c_during_the_imports_ends_at_once(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    importing = Importing(monkeypatch, looks=-1)
    refresh = local_run.LocalRun._refresh

    def interrupted(run: local_run.LocalRun) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        refresh(run)

    monkeypatch.setattr(local_run.LocalRun, "_refresh", interrupted)
    with signals_must_be_heard(), pytest.raises(KeyboardInterrupt):
        local_run.train(config)
    importing.done.set()
    assert importing.started == ["queue"]
    assert "stopped before the first step" in capsys.readouterr().err


def test_ctrl_c_lets_the_learner_end_its_step(
    config: Config, scripts: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt = f"kill -INT {os.getpid()}"
    scripts["learner"] = f'trap "echo saved; exit 0" TERM; {interrupt}; while :; do sleep 0.05; done'
    with pytest.raises(KeyboardInterrupt):
        local_run.train(config)
    assert "stopped before the first step" in capsys.readouterr().err
    assert (tmp_path / "it" / "logs" / "learner.log").read_text() == "saved\n"


@pytest.mark.parametrize("number", ["TERM", "HUP"])
def test_sigterm_and_a_closed_terminal_end_a_run_with_a_code_of_their_own(
    config: Config,
    scripts: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    number: str,
) -> None:
    terminate = f"kill -{number} {os.getpid()}"
    save = "mkdir -p $(dirname $1)/checkpoints/v000001; echo saved"
    scripts["learner"] = f'trap "{save}; exit 10" TERM; {terminate}; while :; do sleep 0.05; done'
    with (
        signals_must_be_heard(),
        pytest.raises(StoppedError, match=r"run\.resume=true goes on"),
    ):
        local_run.train(config)
    assert "run.resume=true" not in capsys.readouterr().err  # the command prints the error
    assert (tmp_path / "it" / "logs" / "learner.log").read_text() == "saved\n"


def test_a_terminal_that_closes_costs_nothing(
    config: Config, scripts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may send SIGHUP several times, and every write to it fails from then on."""
    hang_up = f"kill -HUP {os.getpid()}"
    scripts["learner"] = (
        f'trap "{hang_up}; sleep 0.3; echo saved; exit 10" TERM; {hang_up}; while :; do sleep 0.05; done'
    )
    master, terminal = pty.openpty()
    os.close(master)
    shown = dataclasses.replace(config, launch=dataclasses.replace(config.launch, quiet=False))
    with os.fdopen(terminal, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with signals_must_be_heard(), pytest.raises(StoppedError):
            local_run.train(shown)
    assert (tmp_path / "it" / "logs" / "learner.log").read_text() == "saved\n"


def test_a_learner_that_cannot_save_after_sigterm_is_no_clean_stop(
    config: Config, scripts: dict[str, str]
) -> None:
    terminate = f"kill -TERM {os.getpid()}"
    scripts["learner"] = f'trap "echo disk full; exit 9" TERM; {terminate}; while :; do sleep 0.05; done'
    with pytest.raises(ProcessDiedError, match=r"(?s)learner ended \(exit code 9\).*\n    disk full"):
        local_run.train(config)


def test_a_learner_that_does_not_save_in_time_after_sigterm_is_named(
    config: Config, scripts: dict[str, str]
) -> None:
    scripts["learner"] = f'trap "" TERM; kill -TERM {os.getpid()}; while :; do sleep 0.05; done'
    impatient = dataclasses.replace(config.launch, stop_deadline_s=0.2)
    with pytest.raises(DeadlineError, match="the learner: its last checkpoint did not come"):
        local_run.train(dataclasses.replace(config, launch=impatient))


def test_a_learner_that_was_told_to_stop_is_not_started_again(
    config: Config, scripts: dict[str, str]
) -> None:
    scripts["learner"] = 'echo "{\\"ended\\": \\"stopped\\"}" > $(dirname $1)/summary.json; exit 10'
    with pytest.raises(StoppedError):
        local_run.train(config)


def test_ctrl_c_twice_kills_at_once(
    config: Config, scripts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt = f"kill -INT {os.getpid()}"
    scripts["learner"] = f'trap "{interrupt}" TERM; {interrupt}; while :; do sleep 0.05; done'
    with pytest.raises(KeyboardInterrupt):
        local_run.train(config)
    assert "killed" in capsys.readouterr().err


@pytest.mark.usefixtures("scripts")
def test_a_folder_that_holds_a_run_is_refused_unless_resumed(config: Config, tmp_path: Path) -> None:
    with claimed_run_folder(config):
        pass
    (tmp_path / "it" / "metrics.jsonl").write_text('{"version": 1}\n')
    with pytest.raises(ConfigError, match=r"holds a run already.*run\.resume=true"):
        local_run.train(config)
    resumed = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True))
    assert local_run.train(resumed) == {"versions": 3}


def test_checkpoints_without_metrics_are_a_run_too(config: Config, tmp_path: Path) -> None:
    with claimed_run_folder(config):
        pass
    (tmp_path / "it" / "checkpoints" / "v000050").mkdir(parents=True)
    with (
        pytest.raises(ConfigError, match=r"holds a run already.*run\.resume=true"),
        claimed_run_folder(config),
    ):
        pass


def test_the_summary_of_the_life_before_says_nothing_of_this_one(
    config: Config, scripts: dict[str, str], tmp_path: Path
) -> None:
    """A resumed run whose learner dies was not stopped by anybody, though the one before was."""
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "summary.json").write_text('{"ended": "stopped", "versions": 2}')
    scripts["learner"] = "echo no luck; exit 7"
    resumed = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True))
    with pytest.raises(ProcessDiedError, match=r"(?s)learner ended \(exit code 7\).*no luck"):
        local_run.train(resumed)


@pytest.mark.usefixtures("scripts")
def test_a_folder_in_use_is_refused(config: Config, tmp_path: Path) -> None:
    (tmp_path / "it").mkdir()
    with (tmp_path / "it" / "lock").open("w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"a live run uses .* \(process 4711\)"):
            local_run.train(config)


def test_a_run_keeps_others_out_of_its_folder_while_it_lives(config: Config, tmp_path: Path) -> None:
    """The second one must touch nothing: the address and the summary are those of the first."""
    with claimed_run_folder(config) as (folder, _):
        (folder / "address").write_text("tcp://127.0.0.1:1")
        for resume in (False, True):
            second = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=resume))
            with (
                pytest.raises(ConfigError, match=rf"a live run uses {folder} \(process {os.getpid()}\)"),
                claimed_run_folder(second),
            ):
                pass
        assert (folder / "address").exists()
    with claimed_run_folder(config):
        assert not (folder / "address").exists(), "free again"


def test_a_learner_gets_its_threads_and_devices(config: Config, tmp_path: Path) -> None:
    started: dict[str, Any] = {}

    class Recorder:
        def start(self, name: str, command: list[str], env: dict[str, str], **more: bool) -> None:
            started[name] = (command, env)
            assert more == {"announces": False, "starts_others": True}

    learner = dataclasses.replace(config.learner, processes=2, threads=3, devices="0,1")
    recorder: Any = Recorder()
    split = dataclasses.replace(config, learner=learner)
    processes.Processes(split, tmp_path, recorder, ProcessReports(tmp_path)).start_learner()
    command, env = started["learner"]
    assert command[1:4] == ["-m", "asyncrl", "learner"]
    assert (env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]) == ("3", "0,1")


def test_pools_of_generators_are_started_with_their_own_and_scaled_by_themselves(
    config: Config, tmp_path: Path
) -> None:
    started: dict[str, tuple[list[str], dict[str, str]]] = {}
    told: list[tuple[str, int]] = []

    class Recorder:
        def start(self, name: str, command: list[str], env: dict[str, str], **more: bool) -> None:
            started[name] = (command, env)

        def code(self, name: str) -> None:
            """It runs."""

        def send(self, name: str, number: int) -> None:
            told.append((name, number))

    small = {"count": 2, "devices": "2,3", "threads": 5, "grace_s": 600}
    generator = dataclasses.replace(config.generator, count=1, devices="0,1", threads=7)
    placement = dataclasses.replace(config.placement, generators={"small": small})
    split, recorder = dataclasses.replace(config, generator=generator, placement=placement), Recorder()
    made = processes.Processes(split, tmp_path, cast(Any, recorder), ProcessReports(tmp_path))
    assert made.workers == ["generator-0", "generator-small-0", "generator-small-1"]
    for name in made.workers:
        made.start_worker(name)
    words = {name: command[5:] for name, (command, _) in started.items()}
    assert words["generator-0"][1:] == ["--name", "generator-0"]
    assert words["generator-small-1"][1:] == ["--name", "generator-small-1", "--pool", "small"]
    shares = {
        name: (env["CUDA_VISIBLE_DEVICES"], env["OMP_NUM_THREADS"]) for name, (_, env) in started.items()
    }
    assert shares == {
        "generator-0": ("0,1", "7"),
        "generator-small-0": ("2", "5"),
        "generator-small-1": ("3", "5"),
    }
    assert made.scale(1, "small") == ([], ["generator-small-1"])
    assert told == [("generator-small-1", signal.SIGTERM)]
    assert made.leaving["generator-small-1"] > time.monotonic() + 600, "its own grace_s"
    assert made.scale(2) == (["generator-1"], [])
    assert made.scale(2, "small") == (["generator-small-2"], []), "the name of one that leaves is not free"
    assert made.workers == ["generator-0", "generator-small-0", "generator-1", "generator-small-2"]


def test_threads_are_shared_out(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10)), raising=False)
    assert processes.shared_threads(config) == 3
    assert processes.shared_threads(with_pool(config, processes=2)) == 2
    small = dataclasses.replace(config.placement, generators={"small": {"count": 2}})
    assert processes.shared_threads(dataclasses.replace(config, placement=small)) == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert processes.shared_threads(config) == 1


@pytest.mark.slow
def test_generators_are_started_and_leave_as_requested(
    config: Config,
    scripts: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The learner requests three, then one, and ends once the other two have left. They are not started again."""
    monkeypatch.setattr(local_run, "REFRESH_S", 0.01)
    (tmp_path / "it").mkdir()
    for name in ("begun", "left"):
        os.mkfifo(tmp_path / "it" / name)
    scripts["generator"] = (
        "cd $(dirname $1); trap 'echo $4 >> left; exit 0' TERM; echo $4 >> begun; while :; do sleep 0.05; done"
    )
    scripts["learner"] = (
        f"cd $(dirname $1); exec 3<>begun 4<>left; read a <&3; read b <&3; echo 3 > generators; read c <&3; "
        f"echo 1 > generators; read d <&4; read e <&4; echo $a $b $c $d $e > seen; {DONE}"
    )
    impatient = dataclasses.replace(config.launch, stop_deadline_s=5.0)
    assert local_run.train(dataclasses.replace(config, launch=impatient)) == {"versions": 3}
    seen = (tmp_path / "it" / "seen").read_text().split()
    assert sorted(seen[:2]) == ["generator-0", "generator-1"]
    assert seen[2] == "generator-2"
    assert sorted(seen[3:]) == ["generator-1", "generator-2"]
    said = capsys.readouterr().err
    assert "generators: 3; generator-2 starts" in said
    assert "generators: 1; generator-1 leaves, generator-2 leaves" in said
    assert "started again" not in said


def test_a_generator_that_dies_as_it_is_told_to_leave_has_left(
    config: Config,
    scripts: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request is taken once generator-1 has died, and before the launcher has looked at its end."""
    scripts["generator"] = "[ $4 = generator-1 ] && exit 1; exec sleep 600"
    scripts["learner"] = f"cd $(dirname $1); while [ ! -e asked ]; do sleep 0.02; done; sleep 0.3; {DONE}"
    started: list[processes.Processes] = []
    made = processes.Processes.__init__

    def remembered(self: processes.Processes, *words: Any) -> None:
        made(self, *words)
        started.append(self)

    def request(folder: Path, pool: str) -> ScaleRequest | None:
        if not started or (folder / "asked").exists():
            return None
        if started[0]._supervisor.code("generator-1") is None:
            return None
        (folder / "asked").touch()
        return ScaleRequest(1, pool)

    monkeypatch.setattr(processes.Processes, "__init__", remembered)
    monkeypatch.setattr(local_run, "take_request", request)
    monkeypatch.setattr(local_run, "REFRESH_S", 0.01)
    none = dataclasses.replace(config.launch, generator_restarts=0, stop_deadline_s=5.0)
    assert local_run.train(dataclasses.replace(config, launch=none)) == {"versions": 3}
    said = capsys.readouterr().err
    assert "generators: 1; generator-1 leaves" in said
    assert "generator-1 has left (exit code 1)" in said
    assert "started again" not in said


def test_a_generator_that_does_not_leave_is_killed(
    config: Config,
    scripts: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_run, "REFRESH_S", 0.01)
    (tmp_path / "it").mkdir()
    os.mkfifo(tmp_path / "it" / "begun")
    scripts["generator"] = "cd $(dirname $1); trap '' TERM; echo $4 $$ > begun; while :; do sleep 0.05; done"
    scripts["learner"] = (
        "cd $(dirname $1); exec 3<>begun; read a p <&3; read b q <&3; [ $b = generator-1 ] || q=$p; "
        f"echo 1 > generators; while kill -0 $q; do sleep 0.02; done; {DONE}"
    )
    impatient = dataclasses.replace(config.launch, stop_deadline_s=0.2)
    assert local_run.train(dataclasses.replace(config, launch=impatient)) == {"versions": 3}
    said = capsys.readouterr().err
    assert "generator-1 did not leave in time and is killed" in said
    assert "generator-1 has left (killed by SIGKILL)" in said
