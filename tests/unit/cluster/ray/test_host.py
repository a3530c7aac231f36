"""The actor on a node, without Ray: it starts a process in the run folder, and reports on it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from processes import runs, until

from asyncrl.cluster.ray import host
from asyncrl.cluster.ray.host import HostActor, StartOrder
from asyncrl.launch.supervise import ChildEnded, ChildMessage

LONG_S = 60.0


@pytest.fixture
def order(tmp_path: Path) -> StartOrder:
    (tmp_path / "config.yaml").write_text("a: 1\n")
    words = ("-c", "import os; print('hello', os.environ['WHO']); raise SystemExit(3)")
    return StartOrder("worker", words, {"WHO": "you"}, False, os.getcwd(), str(tmp_path), "a: 1\n")


def test_a_process_writes_its_log_into_the_run_folder_and_its_end_is_an_event(
    order: StartOrder, tmp_path: Path
) -> None:
    actor = HostActor()
    assert actor.start(order) == ""
    assert actor.event(0, LONG_S) == ChildEnded("worker", 3)
    assert actor.event(0, 0.0) == ChildEnded("worker", 3)  # the answer may have been lost
    assert actor.event(1, 0.0) is None
    assert (tmp_path / "logs" / "worker.log").read_text() == "hello you\n"


def test_the_line_that_it_announces_comes_before_its_end(order: StartOrder) -> None:
    actor = HostActor()
    words = ("-c", "import os, sys; os.write(int(sys.argv[-1]), b'tcp://here:5')")
    assert actor.start(replace(order, words=words, announces=True)) == ""
    assert [actor.event(i, LONG_S) for i in range(2)] == [
        ChildMessage("worker", "tcp://here:5"),
        ChildEnded("worker", 0),
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_reach_it_and_sigkill_all_that_it_has_started(
    order: StartOrder, tmp_path: Path, number: int
) -> None:
    actor = HostActor()
    below = (
        "import subprocess; one = subprocess.Popen(['sleep', '600']); print(one.pid, flush=True); one.wait()"
    )
    assert actor.start(replace(order, words=("-c", below))) == ""
    log = tmp_path / "logs" / "worker.log"
    pid = int(until(lambda: log.read_text().strip(), "the process below"))
    actor.send(number)
    assert actor.event(0, LONG_S) == ChildEnded("worker", -number)
    if number == signal.SIGKILL:
        until(lambda: not runs(pid), "the end of the process below")
    else:
        os.kill(pid, signal.SIGKILL)


def test_a_signal_before_the_start_is_for_nobody() -> None:
    HostActor().send(signal.SIGKILL)


@pytest.mark.parametrize("text", [None, "a: 2\n"])
def test_a_node_that_does_not_see_the_run_folder_is_named(
    order: StartOrder, tmp_path: Path, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has none there, or another one."""
    monkeypatch.setattr(host, "LOOK_S", 0.0)
    (tmp_path / "config.yaml").unlink()
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    said = order.problem(0.0)
    assert said.startswith(f"ConfigError: run.dir = '{tmp_path}': node {os.uname().nodename} does not see")


def test_a_node_without_the_folder_of_the_launcher_is_named(order: StartOrder, tmp_path: Path) -> None:
    said = HostActor().start(replace(order, folder=str(tmp_path / "elsewhere")))
    assert "has no folder" in said
    assert str(tmp_path / "elsewhere") in said


def test_a_process_that_cannot_be_started_is_no_wait(order: StartOrder, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    assert "cannot start it" in HostActor().start(order)
