"""The queue's process from its start to its end, run here: a real broker, its feeder, and a visitor beside them."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from processes import signals_must_be_heard

from asyncrl.config.config_consistency import AGREED, agreed
from asyncrl.config.schema import Config, GeneratorConfig, QueueConfig, RunConfig
from asyncrl.errors import ConfigError, TaskError
from asyncrl.launch import queue_process
from asyncrl.launch.folder.run_folder import read_address, run_folder
from asyncrl.launch.queue_process import Feeder, QueueChanges, run_queue
from asyncrl.queue.client import connection
from asyncrl.queue.client.client import BlockingClient, QueueClient
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.types import Task

PATIENCE_S = 30.0
TRAIN = StreamSettings(
    groups_per_version=2, max_staleness=1, window=1, depth=8, max_bytes=1 << 20, lease_s=30.0
)
Visit = Callable[[BlockingClient], None]


class Tasks:
    """Without end, or with a first task that cannot be read."""

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken

    def task_at(self, ordinal: int) -> Task:
        if self.broken:
            raise TaskError("tasks.jsonl, line 1: no prompt")
        return Task(ordinal, "1+1=")


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> Tasks:
    tasks = Tasks()
    monkeypatch.setattr(queue_process, "tasks_of_run", lambda config, folder: tasks)
    return tasks


@pytest.fixture
def no_feeder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it would not end by itself, and is not what the test is about."""
    monkeypatch.setattr(Feeder, "run", lambda self: None)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(
        run=RunConfig(name="it", dir=str(tmp_path)),
        generator=GeneratorConfig(heartbeat_s=0.01),
        queue=QueueConfig(store="file", deadline_s=PATIENCE_S),
    )


@pytest.fixture(autouse=True)
def _process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what the queue changes in its process. A signal that it does not handle, or no end in time, is an error."""

    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(connection, "GOODBYE_S", 0.05)
    interval = sys.getswitchinterval()
    with signals_must_be_heard():
        signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)
    sys.setswitchinterval(interval)


def serve(config: Config, visit: Visit, number: signal.Signals | None = None, *, anew: bool = False) -> None:
    """`run_queue` until it ends, with a client that visits it once it has announced its address.

    number: a signal that follows the visit.
    """
    reading, writing = os.pipe()
    failures: list[BaseException] = []

    def come() -> None:
        try:
            with open(reading, encoding="utf-8") as pipe:
                address = pipe.readline().strip()
            client = BlockingClient(QueueClient(address, run="it", who="visitor", deadline_s=PATIENCE_S))
            try:
                client.connect()
                visit(client)
            finally:
                client.close()
            if number is not None:
                os.kill(os.getpid(), number)
        except BaseException as failure:
            failures.append(failure)
            os.kill(os.getpid(), signal.SIGALRM)

    visitor = threading.Thread(target=come)
    visitor.start()
    try:
        run_queue(config, announce=writing, anew=anew)
    finally:
        visitor.join(PATIENCE_S)
    assert failures == []


@pytest.mark.usefixtures("tasks", "no_feeder")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_in_order_and_the_next_one_goes_on(config: Config, number: signal.Signals) -> None:
    found: list[object] = []

    def until_told(visit: Visit) -> None:
        by_hand = number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt) if by_hand else nullcontext():
            serve(config, visit, number)

    until_told(lambda client: client.post("k", "kept"))
    until_told(lambda client: found.append(client.lookup("k", 1.0)))
    assert found == ["kept"]


@pytest.mark.usefixtures("tasks", "no_feeder")
@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://localhost:0"])
def test_one_that_starts_again_listens_where_it_did_before(config: Config, address: str) -> None:
    """Its clients know no other address, and `*` leaves the port open."""
    config = dataclasses.replace(config, queue=dataclasses.replace(config.queue, address=address))
    found: list[str] = []
    for _ in range(2):
        serve(config, lambda client: found.append(client.queue._connection.address), signal.SIGTERM)
    assert found[0] == found[1]
    assert read_address(run_folder(config)) == found[0]


@pytest.mark.usefixtures("tasks", "no_feeder")
def test_one_whose_port_is_taken_meanwhile_says_that_it_has_another(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[str] = []
    serve(config, lambda client: found.append(client.queue._connection.address), signal.SIGTERM)
    port = int(found[0].rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        serve(config, lambda client: found.append(client.queue._connection.address), signal.SIGTERM)
    assert found[1] != found[0]
    assert f"cannot listen at {found[0]} again, where its clients know it" in caplog.text


@pytest.mark.usefixtures("tasks", "no_feeder")
def test_anew_forgets_what_was_left(config: Config) -> None:
    found: list[object] = []
    serve(config, lambda client: client.open("train", TRAIN), signal.SIGTERM)
    serve(config, lambda client: found.append(client.connect().streams), signal.SIGTERM)
    serve(config, lambda client: found.append(client.connect().streams), signal.SIGTERM, anew=True)
    assert found == [("train",), ()]


@pytest.mark.usefixtures("tasks")
def test_it_ends_by_the_error_of_its_feeder_where_the_learner_has_another_configuration(
    config: Config,
) -> None:
    """Its exit code keeps the launcher from starting it again, and its message is the cause that users see."""
    others = {**agreed(config), "run.seed": "7"}
    with pytest.raises(ConfigError, match=r"run\.seed is 7 at the learner and 0 here"):
        serve(config, lambda client: client.post(AGREED, others))


def test_it_ends_by_the_error_of_a_task_that_cannot_be_read(config: Config, tasks: Tasks) -> None:
    tasks.broken = True

    def learner(client: BlockingClient) -> None:
        client.post(AGREED, agreed(config))
        client.open("train", TRAIN)

    with pytest.raises(TaskError, match=r"tasks\.jsonl, line 1: no prompt"):
        serve(config, learner)


@pytest.mark.usefixtures("tasks")
def test_it_ends_by_itself_once_the_run_is_closed(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    def learner(client: BlockingClient) -> None:
        client.post(AGREED, agreed(config))
        client.open("train", TRAIN)
        client.finish("stopped")

    serve(config, learner)
    assert capsys.readouterr().out.endswith("run it: closed by the learner (stopped); the queue ends\n")


@pytest.mark.usefixtures("tasks")
def test_it_outlives_the_run_until_every_generator_has_heard_of_its_end(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator that asks at its last heartbeat finds the queue still there."""
    config = dataclasses.replace(config, generator=GeneratorConfig(heartbeat_s=0.0125))
    slept: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float, result: Any = None) -> Any:
        slept.append(seconds)
        return await sleep(seconds, result)

    def learner(client: BlockingClient) -> None:
        client.post(AGREED, agreed(config))
        client.open("train", TRAIN)
        client.finish("done")

    monkeypatch.setattr(asyncio, "sleep", noted)
    serve(config, learner)
    assert slept.count(3 * 0.0125) == 1


def test_what_changes_at_the_queue_is_in_the_trace(trace: Any) -> None:
    changes = QueueChanges()

    def look(
        silent_s: dict[str, float], refused: dict[str, int], dropped: dict[str, int], **counts: Any
    ) -> None:
        train = {"ready": 2, **counts, "dropped_by_reason": dropped}
        changes.trace({"streams": {"train": train}, "silent_s": silent_s, "refused": refused})

    look({"g0": 0.1, "g1": 0.2}, {}, {}, **{"age/oldest": 3, "age/mean": 1.5})
    look({"g0": 20.0, "g1": 0.2}, {"fenced": 1}, {"reward": 2})
    look({"g0": 21.0, "g1": 0.2}, {"fenced": 1}, {"reward": 2})
    look({"g0": 0.0}, {"fenced": 3}, {"reward": 2, "filtered": 1})
    look({"g0": 99.0}, {"fenced": 3}, {"reward": 2, "filtered": 1})
    look({}, {"fenced": 3}, {"reward": 2, "filtered": 1})  # the queue has forgotten it
    found = [(event.name, *event.about.values()) for event in trace().events]
    assert sorted(found[:2]) == [("joined", "g0"), ("joined", "g1")]
    assert found[2:5] == [("silent", "g0", 20.0), ("refused", "fenced", 1), ("dropped", "reward", 2)]
    assert sorted(found[5:7]) == [("back", "g0"), ("left", "g1")]
    assert found[7:] == [("refused", "fenced", 2), ("dropped", "filtered", 1), ("silent", "g0", 99.0)]
    assert trace().figures["queue/age/oldest"][1] == [3]
    assert trace().figures["queue/ready"][1] == [2] * 6
