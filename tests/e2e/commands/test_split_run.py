"""A run taken apart: queue, learner of two ranks and generators, each started by hand, in any order."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from processes import (
    FOR_EVER,
    child,
    counts_of,
    finished,
    queue_address,
    ran,
    rows,
    started,
    succeeded,
    summary_of,
    until_trained,
    versions,
)

from asyncrl.config.load import load_config
from asyncrl.evaluate import evaluate
from asyncrl.queue.client.client import BlockingClient, QueueClient
from asyncrl.rpc.keys import client_keys, make_keys
from asyncrl.sync.channels.addresses import LOOPBACK, own_address


def test_generators_come_and_go_while_two_learner_ranks_train(config_file: Path) -> None:
    """With keys: who has none does not get in."""
    run, config = config_file.parent / "it", str(config_file)
    make_keys(config_file.parent / "keys")
    keys = f"queue.keys={config_file.parent / 'keys'}"
    with started("asyncrl", "queue", config, keys) as queue:
        address = queue_address(run, queue)
        with started("asyncrl", "generator", config, address, "--name", "stranger") as stranger:
            code, printed = finished(stranger)
            assert (code, "did not accept a client without keys" in printed) == (2, True), printed
        learner_words = (
            "asyncrl",
            "learner",
            config,
            keys,
            address,
            "run.versions=30",
            "learner.processes=2",
        )
        with (
            started("asyncrl", "generator", config, keys, address, "--name", "early") as early,
            started(*learner_words) as learner,
        ):
            until_trained(run, 2, queue, early, learner)
            early.send_signal(signal.SIGKILL)
            with started("asyncrl", "generator", config, keys, address, "--name", "late") as late:
                succeeded(learner)
                succeeded(late)
        succeeded(queue)  # leaves by itself once the run is over
    summary = summary_of(run)
    assert counts_of(run) == (30, 120, 0)
    assert summary["staleness"]["max"] <= 2
    assert evaluate(load_config(config), str(run / "final"))["tasks"] == 20


def test_a_killed_learner_comes_back_to_a_queue_that_lives_on(config_file: Path) -> None:
    run, config = config_file.parent / "it", str(config_file)
    with started("asyncrl", "queue", config) as queue:
        address = queue_address(run, queue)
        with started("asyncrl", "generator", config, address, "--name", "steady") as generator:
            with started("asyncrl", "learner", config, address, FOR_EVER) as learner:
                until_trained(run, 5, queue, generator, learner)
                learner.kill()
            with started("asyncrl", "learner", config, address) as again:
                code, printed = finished(again)
            assert code == 2
            assert "run.resume=true" in printed
            goal = rows(run)[-1]["version"] + 2
            ran(*("asyncrl", "learner", config, address, "run.resume=true", f"run.versions={goal}"))
            succeeded(generator)
    assert versions(run) == list(range(1, goal + 1))
    assert max(row["train/staleness/max"] for row in rows(run)) <= 2


@pytest.mark.slow
def test_a_generator_of_another_run_is_kept_out(config_file: Path) -> None:
    run, config = config_file.parent / "it", str(config_file)
    with started("asyncrl", "queue", config) as queue:
        address = queue_address(run, queue)
        with started("asyncrl", "generator", config, address, "run.name=other") as stranger:
            code, printed = finished(stranger)
    assert code == 8
    assert "wrong_run: this queue serves run 'it', not 'other'" in printed


@pytest.mark.slow
def test_a_generator_of_another_configuration_ends_before_it_leases(config_file: Path) -> None:
    run, config = config_file.parent / "it", str(config_file)
    drifted = ("batch.group_size=2", "generator.temperature=0.5", "reward.function=asyncrl.tasks.echo:reward")
    with started("asyncrl", "queue", config) as queue:
        address = queue_address(run, queue)
        with (
            started("asyncrl", "generator", config, address, "--name", "good", "generator.slots=16") as good,
            started("asyncrl", "generator", config, address, "--name", "drift", *drifted) as drift,
            started("asyncrl", "learner", config, address, "run.versions=30") as learner,
        ):
            code, printed = finished(drift)
            succeeded(learner)
            succeeded(good)
    assert code == 2, printed
    for told in (
        "batch.group_size is 4 at the learner and 2 here",
        "generator.temperature is 1.0 at the learner and 0.5 here",
        'reward.function is "asyncrl.tasks.addition:reward" at the learner and "asyncrl.tasks.echo:reward" here',
    ):
        assert told in printed
    assert {row["train/rollouts"] for row in rows(run)} == {16}
    assert summary_of(run)["tasks_dropped"] == 0


@pytest.mark.slow
def test_a_learner_whose_queue_others_can_reach_is_where_they_reach_it_too(config_file: Path) -> None:
    """They have no server.key."""
    run, config = config_file.parent / "it", str(config_file)
    make_keys(config_file.parent / "queues_keys")
    (config_file.parent / "keys").mkdir()
    shutil.copy(config_file.parent / "queues_keys" / "client.key", config_file.parent / "keys")
    queues_keys, keys = (f"queue.keys={config_file.parent / name}" for name in ("queues_keys", "keys"))
    here = network_address()
    with started("asyncrl", "queue", config, queues_keys, f"queue.address=tcp://{here}:*") as queue:
        address = queue_address(run, queue)
        with (
            started("asyncrl", "generator", config, keys, address, "--name", "one") as generator,
            started("asyncrl", "learner", config, keys, address, FOR_EVER) as learner,
        ):
            until_trained(run, 1, queue, generator, learner)
            held = client_keys(keys.partition("=")[2])
            client = BlockingClient(QueueClient(address.partition("=")[2], run="it", who="a test", keys=held))
            client.connect()
            assert client.lookup("weights/0", wait_s=1.0)["endpoint"].startswith(f"tcp://{here}:")
            client.close()
    assert load_config(run / "config.yaml").queue.keys == keys.partition("=")[2]


def network_address() -> str:
    """Of this machine, as others see it; without a network they do not."""
    try:
        return own_address("192.0.2.1", 9)  # for documentation (RFC 5737); nothing is sent to it
    except OSError:
        return LOOPBACK


@pytest.mark.slow
def test_a_queue_with_other_tasks_ends_before_it_gives_one(config_file: Path) -> None:
    run, config = config_file.parent / "it", str(config_file)
    with started("asyncrl", "queue", config, "run.seed=4") as queue:
        address = queue_address(run, queue)
        with started("asyncrl", "learner", config, address, "queue.deadline_s=2"):
            code, printed = finished(queue)
    assert code == 2, printed
    assert "run.seed is 3 at the learner and 4 here" in printed


def test_an_occupied_port_is_bad_input(config_file: Path) -> None:
    run, config = config_file.parent / "it", str(config_file)
    with started("asyncrl", "queue", config) as queue:
        address = queue_address(run, queue)
        with started("asyncrl", "queue", config, address, "run.name=second") as second:
            code, printed = finished(second)
    assert code == 2
    assert "queue.address" in printed
    assert "another process uses this address" in printed


def test_nobody_at_the_address_is_a_deadline(config_file: Path) -> None:
    words = ("queue.address=tcp://127.0.0.1:9", "queue.deadline_s=0.5")
    with started("asyncrl", "generator", str(config_file), *words, "--name", "lonely") as lonely:
        code, printed = finished(lonely)
    assert code == 4
    assert "lonely waited 0.5 s for the queue at tcp://127.0.0.1:9" in printed


@pytest.mark.slow
def test_a_killed_queue_that_may_not_be_started_again_ends_the_run_by_name(config_file: Path) -> None:
    run = config_file.parent / "it"
    words = (FOR_EVER, "launch.queue_restarts=0")
    with started("asyncrl", "train", str(config_file), *words) as launcher:
        until_trained(run, 1, launcher)
        child(launcher, "asyncrl", "queue").kill()
        code, printed = finished(launcher)
    assert code == 5
    assert "queue ended (killed by SIGKILL)" in printed
