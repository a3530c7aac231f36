"""A process on nodes of a cluster, as the launcher sees it: real processes below actors that are none of Ray's."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_ray import FakeActor, FakeRay
from processes import until

from asyncrl.cluster.ray import hosted
from asyncrl.cluster.ray.host import HostActor, StartOrder
from asyncrl.cluster.ray.hosted import HostedChild
from asyncrl.launch.supervise import ChildMessage

LONG_S = 60.0
SLEEP = "import time; time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"

End = tuple[int, list[str]]


def ends_once(file: Path, code: int) -> str:
    """A program that waits for a file."""
    return f"import os, time\nwhile not os.path.exists({str(file)!r}): time.sleep(0.01)\nraise SystemExit({code})"


class Started:
    """A child with a part for each program."""

    def __init__(
        self,
        run: Path,
        *programs: str,
        start_s: float = LONG_S,
        announces: bool = False,
        unreachable: int = 0,
    ) -> None:
        self.ray, self.messages = FakeRay({"CPU": 4.0}), list[ChildMessage]()
        self._ends: queue.SimpleQueue[End] = queue.SimpleQueue()
        self.actors = [FakeActor(HostActor(), unreachable) for _ in programs]
        (run / "config.yaml").write_text("")
        orders = [
            StartOrder(f"part-{i}", ("-c", program), {}, announces, os.getcwd(), str(run), "")
            for i, program in enumerate(programs)
        ]
        starts = list(zip(self.actors, orders, strict=True))
        self.child = HostedChild(self.ray, starts, start_s, self.messages.append, self._end)
        self.logs = run / "logs"

    def _end(self, code: int, lines: list[str]) -> None:
        self._ends.put((code, lines))

    def end(self) -> End:
        return self._ends.get(timeout=LONG_S)

    def until_printed(self, part: str) -> None:
        log = self.logs / f"{part}.log"
        until(lambda: log.exists() and log.read_text(), f"a line of {part}")


@pytest.fixture
def started(tmp_path: Path) -> Callable[..., Started]:
    return lambda *programs, **words: Started(tmp_path, *programs, **words)


Start = Callable[..., Started]


def test_a_process_that_ends_frees_its_actor(started: Start) -> None:
    one = started("raise SystemExit(7)")
    assert one.end() == (7, [])
    assert one.child.poll() == one.child.wait() == 7
    assert one.actors[0].dead.is_set()


def test_its_line_arrives(started: Start) -> None:
    one = started("import os, sys; os.write(int(sys.argv[-1]), b'tcp://a:1')", announces=True)
    assert one.end()[0] == 0
    assert one.messages == [ChildMessage("part-0", "tcp://a:1")]


def test_a_lost_node_reads_as_a_killed_process_and_its_log_has_the_reason(started: Start) -> None:
    one = started(f"print(1, flush=True); {SLEEP}")
    one.until_printed("part-0")
    one.actors[0].lose()
    assert one.end() == (-signal.SIGKILL, ["its node or its actor is lost: Its node has died."])


def test_an_actor_that_answers_again_is_not_lost(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "PAUSE_S", 0.0)
    one = started("raise SystemExit(7)", unreachable=5)
    assert one.end() == (7, [])


def test_an_actor_that_is_silent_for_too_long_is_lost(
    started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosted, "LOST_S", 0.0)
    one = started(SLEEP)
    code, (line,) = one.end()
    assert (code, line) == (-signal.SIGKILL, "its node or its actor is lost: no answer")


def test_a_start_that_finds_no_node_ends_by_the_deadline_and_names_the_cluster(started: Start) -> None:
    one = started(SLEEP, start_s=0.0)
    code, (line,) = one.end()
    assert code == 4
    assert line.startswith("DeadlineError: the launcher waited 0.0 s for a node of Ray: room for part-0 did")
    assert "its 1 nodes have CPU 4, GPU 0" in line


def test_a_node_that_cannot_run_it_is_bad_input(started: Start, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("in the way")
    code, (line,) = started(SLEEP).end()
    assert code == 2
    assert line.startswith("ConfigError: run.dir")


def test_sigkill_is_not_waited_for_for_ever(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The actor does not pass it on: it is killed itself."""
    monkeypatch.setattr(hosted, "KILL_S", 0.05)
    one = started(f"print(1, flush=True); {SLEEP}")
    one.until_printed("part-0")
    monkeypatch.setattr(one.actors[0].made, "send", lambda number: None)
    one.child.send_signal(signal.SIGKILL)
    assert one.child.wait() == -signal.SIGKILL


@pytest.mark.parametrize(("other", "code"), [(SLEEP, 7), (DEAF, 7), (DEAF, 1)])
def test_parts_end_with_the_one_that_fails_and_as_it_has_ended(
    started: Start, monkeypatch: pytest.MonkeyPatch, other: str, code: int, tmp_path: Path
) -> None:
    """The other one is told first, and killed if it does not end."""
    monkeypatch.setattr(hosted, "END_S", 0.05)
    both = started(other, ends_once(tmp_path / "now", code))
    if other == DEAF:
        both.until_printed("part-0")
    (tmp_path / "now").touch()
    found, lines = both.end()
    assert found == code
    assert lines[0] == f"part-1 ended (exit code {code})"


def test_parts_that_end_in_order_are_awaited(started: Start, tmp_path: Path) -> None:
    both = started("raise SystemExit(10)", ends_once(tmp_path / "now", 10))
    until(both.actors[0].dead.is_set, "the end of the first")
    (tmp_path / "now").touch()
    assert both.end() == (10, [])


def test_a_signal_reaches_all_parts(started: Start) -> None:
    stops = f"import signal, sys; signal.signal(15, lambda *_: sys.exit(10)); print(1, flush=True); {SLEEP}"
    both = started(stops, stops)
    for part in ("part-0", "part-1"):
        both.until_printed(part)
    both.child.send_signal(signal.SIGTERM)
    assert both.end() == (10, [])


def test_what_has_not_begun_is_stopped_at_once(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its actor may wait for a node that is never there."""
    monkeypatch.setattr(HostActor, "start", lambda self, order: threading.Event().wait(LONG_S))
    one = started(SLEEP)
    assert one.child.poll() is None
    one.child.send_signal(signal.SIGTERM)
    assert one.end() == (-signal.SIGTERM, [])
    assert one.child.wait() == one.child.poll() == -signal.SIGTERM
