"""`asyncrl train` when its queue is killed: it goes on from its journal, and every task still ends once."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import (
    FOR_EVER,
    child,
    counts_of,
    finished,
    kill_after,
    newest_checkpoint,
    queue_address,
    ran,
    rows,
    started,
    succeeded,
    summary_of,
    until,
    until_trained,
    versions,
)
from redis_server import RedisServer

KEPT = {
    "metadata": ("queue.durable=metadata",),
    "payload": ("queue.durable=payload",),
    "redis": ("queue.store=redis", "queue.durable=payload"),
}


@pytest.mark.parametrize(
    "kept", [pytest.param(kept, marks=pytest.mark.slow if kept != "metadata" else ()) for kept in KEPT]
)
def test_a_killed_queue_goes_on_and_every_task_ends_once(
    config_file: Path, redis_server: RedisServer, kept: str
) -> None:
    run = config_file.parent / "it"
    words = [*KEPT[kept], *([f"queue.redis_url={redis_server.url}"] if kept == "redis" else [])]
    with started("asyncrl", "train", str(config_file), "run.versions=40", *words) as launcher:
        kill_after(run, (2, 6), launcher, "asyncrl", "queue")
        printed = succeeded(launcher)
    assert "queue ended (killed by SIGKILL) and is started again from its journal, 2 of 3 restarts" in printed
    assert versions(run) == list(range(1, 41))
    assert counts_of(run) == (40, 160, 0)
    assert summary_of(run)["staleness"]["max"] <= 2


@pytest.mark.slow
def test_a_queue_that_was_started_by_hand_is_found_again_at_its_free_port(config_file: Path) -> None:
    run, config = config_file.parent / "it", str(config_file)
    with started("asyncrl", "queue", config) as queue:
        address = queue_address(run, queue)
        with (
            started("asyncrl", "generator", config, address, "--name", "steady") as generator,
            started("asyncrl", "learner", config, address, "run.versions=30") as learner,
        ):
            until_trained(run, 2, queue, generator, learner)
            queue.kill()
            queue.wait()
            with started("asyncrl", "queue", config) as again:
                for process in (learner, generator, again):
                    succeeded(process)
    assert versions(run) == list(range(1, 31))
    assert counts_of(run) == (30, 120, 0)


@pytest.mark.slow
def test_a_queue_that_keeps_nothing_ends_the_run(config_file: Path) -> None:
    run = config_file.parent / "it"
    with started("asyncrl", "train", str(config_file), FOR_EVER, "queue.store=memory") as launcher:
        until_trained(run, 2, launcher)
        child(launcher, "asyncrl", "queue").kill()
        code, printed = finished(launcher)
    assert code == 5
    assert "queue ended (killed by SIGKILL)" in printed


@pytest.mark.slow
def test_a_resumed_run_repeats_the_steps_that_its_queue_has_kept(config_file: Path) -> None:
    """The learner dies some versions after a checkpoint, and all with it; the next queue has the groups since."""
    run = config_file.parent / "it"
    words = (
        "queue.durable=payload",
        "checkpoint.every=4",
        "checkpoint.asynchronous=false",
        "launch.learner_restarts=0",
    )
    with started("asyncrl", "train", str(config_file), FOR_EVER, *words) as launcher:
        until_trained(run, 6, launcher)
        learner = child(launcher, "asyncrl", "learner")

        def stands_behind_a_checkpoint() -> bool:
            """Stopped, with a version that its newest checkpoint lacks."""
            learner.suspend()
            if versions(run)[-1] > newest_checkpoint(run) >= 4:
                return True
            learner.resume()
            return False

        until(stands_behind_a_checkpoint, "a version after a checkpoint", launcher)
        learner.kill()
        assert finished(launcher)[0] == 5
    before = {row["version"]: row for row in rows(run)}
    saved = newest_checkpoint(run)
    words = (*words, "run.resume=true", f"run.versions={saved + 2}")
    ran("asyncrl", "train", str(config_file), *words)
    assert "going on from its journal" in (run / "logs" / "queue.log").read_text()
    after = {row["version"]: row for row in rows(run)}
    assert list(after) == list(range(1, saved + 3))
    repeated = saved + 1
    assert repeated in before
    for name in ("rollout/reward/mean", "train/tokens", "train/staleness/mean"):
        assert after[repeated][name] == before[repeated][name]  # of the very same groups
