"""What several folders of tests share: a tiny model, a real Redis, and examples of hypothesis that have no deadline."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import missing
import pytest
from hypothesis import settings
from processes import DEADLINE_S
from redis_server import RedisServer

from asyncrl.observability.timeline import ProcessTrace
from asyncrl.telemetry import tracing

settings.register_profile("untimed", deadline=None)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable" if os.environ.get("CI") else "untimed")


MOST_WAITS = 10
"""Of any one test, each for at most DEADLINE_S."""

RUNS = ("tests/e2e/", "tests/chaos/")
LONG = (
    "tests/contract/engines/",
    "tests/chaos/",
    "tests/e2e/",
    "tests/simulation/",
    "tests/contract/",
)
"""Files that begin first, so that no worker is left alone with one of them in the end."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For slow tests alone, files without any are not imported, which takes half a minute."""
    if config.option.markexpr != "slow" or collection_path.suffix != ".py":
        return None
    is_test = collection_path.name.startswith("test_")
    return not (is_test and "slow" in collection_path.read_text(encoding="utf-8")) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first. A test of whole runs has time for all its waits one after another: the one that runs out says
    who waited for whom."""
    for item in items:
        if item.nodeid.startswith(RUNS):
            item.add_marker(pytest.mark.timeout(MOST_WAITS * DEADLINE_S), append=False)
    items.sort(
        key=lambda item: next((at for at, name in enumerate(LONG) if item.nodeid.startswith(name)), len(LONG))
    )


@pytest.fixture(autouse=True)
def launchers_share_a_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run in the process of the tests; one that is executed begins its own."""
    monkeypatch.setattr("asyncrl.launch.processes.own_server", forked.own_server)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some thousand parameters."""
    from asyncrl.tasks.addition import write_model_folder

    folder = tmp_path_factory.mktemp("model")
    write_model_folder(folder, hidden_size=32, layers=2)
    return folder


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[Callable[[], ProcessTrace]]:
    """Inside, this process writes a trace. Returns it as it is now."""
    with tracing.recording(tmp_path / "traced", "here", "test", 1):

        def read() -> ProcessTrace:
            path = tracing.current().path  # type: ignore[union-attr]
            found = ProcessTrace(path)
            found.read()
            return found

        yield read


@pytest.fixture
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file with the configuration that a module of tests calls BASE."""
    path = tmp_path / "base.yaml"
    path.write_text(request.module.BASE)
    return path


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """For ends of a connection that wait for each other."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """Empty."""
    shared_redis.client.flushall()
    return shared_redis


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """One that a test may kill and start again; it keeps what it has answered."""
    server = RedisServer(tmp_path, "--appendonly", "yes", "--appendfsync", "always")
    yield server
    server.kill()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and missing.fails_ci(_skip_reasons(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = _skip_reasons(terminalreporter.config)
    for line in missing.lines(reasons):
        terminalreporter.write_line(line, yellow=True)
    if missing.fails_ci(reasons):
        terminalreporter.write_line("CI=true: these skips are a failure", red=True)


def _skip_reasons(config: pytest.Config) -> list[str]:
    """Of all skipped tests; empty in a worker of xdist, which reports to its controller."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return []
    return [str(report.longrepr) for report in reporter.stats.get("skipped", [])]
