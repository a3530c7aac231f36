"""`asyncrl scale`: a request in the run's folder, which its launcher takes away."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from asyncrl.config.commented_yaml import render
from asyncrl.config.schema import (
    Config,
    GeneratorConfig,
    ModelConfig,
    PlacementConfig,
    QueueConfig,
    RewardConfig,
)
from asyncrl.errors import ConfigError, DeadlineError
from asyncrl.launch.folder.scale import FILE, ScaleRequest, scale, take_request


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = Config(
        model=ModelConfig(path="model"),
        reward=RewardConfig(function="asyncrl.tasks.addition:reward"),
        generator=GeneratorConfig(count=2, devices="0,1"),
        placement=PlacementConfig(generators={"small": {"devices": "2"}}),
    )
    (tmp_path / "config.yaml").write_text(render(config))
    return tmp_path


@pytest.mark.parametrize("pool", ["", "small"])
def test_the_launcher_takes_a_request_once(run: Path, pool: str) -> None:
    taken: list[ScaleRequest] = []
    asked = threading.Event()

    def launcher() -> None:
        while not taken and not asked.is_set():
            taken.extend(one for one in [take_request(run, pool)] if one is not None)

    thread = threading.Thread(target=launcher, daemon=True)
    thread.start()
    try:
        assert scale(str(run), ScaleRequest(1, pool)) == run
    finally:
        asked.set()
        thread.join()
    assert taken == [ScaleRequest(1, pool)]
    assert take_request(run, pool) is None


def test_requests_for_two_pools_do_not_meet(run: Path) -> None:
    with pytest.raises(DeadlineError):
        scale(str(run), ScaleRequest(1, "small"), deadline_s=0.0)
    (run / f"{FILE}-small").write_text("3")
    (run / FILE).write_text("2")
    assert (take_request(run, "small"), take_request(run)) == (ScaleRequest(3, "small"), ScaleRequest(2))


def test_a_request_that_nobody_takes_ends_by_name_and_leaves_nothing(run: Path) -> None:
    with pytest.raises(DeadlineError, match=r"asyncrl scale .* the launcher of"):
        scale(str(run), ScaleRequest(1), deadline_s=0.1)
    assert not (run / FILE).exists()


@pytest.mark.parametrize(
    ("count", "pool", "message"),
    [
        (0, "", "needs a generator"),
        (3, "", "has GPUs for generator.count=2"),
        (2, "small", "has GPUs for placement.generators.small.count=1"),
        (1, "large", "the run has no such pool. Remedy: it has small"),
    ],
)
def test_numbers_that_cannot_be_are_refused(run: Path, count: int, pool: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scale(str(run), ScaleRequest(count, pool))
    assert not (run / FILE).exists()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.yaml"):
        scale(str(tmp_path), ScaleRequest(1))


@pytest.mark.parametrize("text", ["", "many", "-3", "\xff", "small 2"])
def test_what_is_no_number_counts_for_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text, encoding="latin-1")
    assert take_request(tmp_path) is None


@pytest.mark.parametrize(
    ("address", "count", "refused"),
    [("tcp://127.0.0.1:*", 17, True), ("tcp://127.0.0.1:*", 16, False), ("tcp://10.0.0.1:5", 17, False)],
)
def test_more_generators_than_the_machine_bears_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, count: int, refused: bool
) -> None:
    """Unless others may run elsewhere."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(
        "asyncrl.launch.folder.scale.config_of",
        lambda _: Config(queue=QueueConfig(address=address, keys="keys")),
    )
    with pytest.raises(ConfigError if refused else DeadlineError, match="16 at most" if refused else None):
        scale(str(tmp_path), ScaleRequest(count), deadline_s=0.0)
