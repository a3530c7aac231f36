"""A learner of two ranks that `asyncrl learner` and `asyncrl train` start themselves: who can reach them, and what
happens when one of them is killed or stopped."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import psutil
import pytest
from processes import (
    FOR_EVER,
    Process,
    counts_of,
    family,
    finished,
    newest_checkpoint,
    queue_address,
    started,
    succeeded,
    until,
    until_trained,
    versions,
)
from torch.distributed import TCPStore

from asyncrl.errors import ConfigError
from asyncrl.rpc.keys import make_keys

LOOPBACK = ("127.0.0.1", "::1", "::ffff:127.0.0.1")


def ranks_below(process: Process) -> list[psutil.Process]:
    """The learner's two ranks among the descendants of a process, rank 0 first."""

    def find() -> list[psutil.Process]:
        learners = [one for one in family(process.pid) if {"asyncrl", "learner"} <= set(words(one))]
        ranks = [one for one in learners if one.parent() in learners]
        return sorted(ranks, key=lambda one: one.pid) if len(ranks) == 2 else []

    found: list[psutil.Process] = until(find, "two ranks", process)
    return found


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def is_store(port: int) -> bool:
    """Whether a TCPStore listens there: anybody may write to one. It gives a ping's four bytes back."""
    hello, ping = b"\x00\xce\xf7\x85\x3c", b"\x0d\x01\x02\x03\x04"
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(1.0)
        stranger.sendall(hello + ping)
        try:
            return stranger.recv(64) == ping[1:]
        except OSError:
            return False


def test_a_store_is_known_by_its_answer() -> None:
    assert is_store(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False).port)


def test_two_ranks_listen_on_loopback_alone_and_save_together_on_sigterm(config_file: Path) -> None:
    run, config = config_file.parent / "it", str(config_file)
    own = (FOR_EVER, "learner.processes=2", "checkpoint.every=100000")
    # Weights go through files: what listens is of the ranks alone.
    shared = ("sync.backend=file", f"sync.folder={config_file.parent / 'weights'}")
    with started("asyncrl", "queue", config, *shared) as queue:
        address = queue_address(run, queue)
        with (
            started("asyncrl", "generator", config, address, *shared, "--name", "one") as generator,
            started("asyncrl", "learner", config, address, *shared, *own) as learner,
        ):
            until_trained(run, 2, queue, generator, learner)
            everybody = [*ranks_below(learner), psutil.Process(learner.pid)]
            heard = [
                one.laddr
                for process in everybody
                for one in process.net_connections("inet")
                if one.status == psutil.CONN_LISTEN
            ]
            assert len(heard) >= 2, "gloo's, of each rank"
            assert {one.ip for one in heard} <= set(LOOPBACK)
            assert not [one.port for one in heard if is_store(one.port)]
            learner.terminate()
            code, printed = finished(learner)
    assert code == 10, printed
    saved = newest_checkpoint(run)
    assert saved == versions(run)[-1]
    of_ranks = {path.name for path in (run / "checkpoints" / f"v{saved:06d}" / "learner").rglob("*")}
    assert len([name for name in of_ranks if re.match(r"__[01]_", name)]) >= 2, of_ranks


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("kill", "learner ended (killed by SIGKILL) and is started again from the newest checkpoint"),
        pytest.param(
            "suspend",
            "learner ended (exit code 12) and is started again from the newest checkpoint",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_is_lost_takes_the_learner_back_to_its_checkpoint(
    config_file: Path, fault: str, told: str
) -> None:
    run = config_file.parent / "it"
    learner = ("learner.processes=2", "launch.rank_deadline_s=10", "checkpoint.every=2", "run.versions=30")
    with started("asyncrl", "train", str(config_file), *learner) as launcher:
        until_trained(run, 3, launcher)
        getattr(ranks_below(launcher)[1], fault)()
        printed = succeeded(launcher)
    assert told in printed
    assert "rank 1 ended first" in (run / "logs" / "learner.log").read_text()
    assert versions(run) == list(range(1, 31))
    assert counts_of(run) == (30, 120, 0)


def test_ranks_of_two_machines_meet_through_the_queue(config_file: Path) -> None:
    """Here both on one machine, and started again on the queue that has their entries of before."""
    run, config = config_file.parent / "it", str(config_file)
    make_keys(config_file.parent / "keys")
    keys = f"queue.keys={config_file.parent / 'keys'}"
    with started("asyncrl", "queue", config, keys) as queue:
        address = queue_address(run, queue)
        own = (
            "asyncrl",
            "learner",
            config,
            keys,
            address,
            "learner.processes=2",
            "checkpoint.every=2",
            "--nodes",
            "2",
        )
        with started("asyncrl", "generator", config, keys, address, "--name", "one") as generator:
            with (
                started(*own, FOR_EVER, "--node", "1") as second,
                started(*own, FOR_EVER, "--node", "0") as first,
            ):
                until_trained(run, 3, queue, generator, first, second)
                first.kill()
                code, printed = finished(second)
                assert code != 0, printed
            goal = newest_checkpoint(run) + 3
            again = ("run.resume=true", f"run.versions={goal}")
            with (
                started(*own, *again, "--node", "1") as second,
                started(*own, *again, "--node", "0") as first,
            ):
                for learner in (first, second):
                    succeeded(learner)
    assert versions(run)[-1] == goal


@pytest.mark.slow
def test_ranks_of_machines_without_a_common_run_folder_are_refused(config_file: Path) -> None:
    """Each would keep its own part of every checkpoint."""
    run, config = config_file.parent / "it", str(config_file)
    with started("asyncrl", "queue", config) as queue:
        own = ("asyncrl", "learner", config, queue_address(run, queue), "learner.processes=2", "--nodes", "2")
        elsewhere = f"run.dir={config_file.parent / 'elsewhere'}"
        with (
            started(*own, elsewhere, "--node", "1") as second,
            started(*own, "--node", "0") as first,
        ):
            for learner in (first, second):
                code, printed = finished(learner)
                assert code == ConfigError.exit_code, printed
                assert "learner rank 1 does not see the files of rank 0" in printed
