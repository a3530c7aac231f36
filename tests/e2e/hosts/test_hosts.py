"""Runs over several hosts, each with addresses of its own, whose processes are started as docs/launching.md has it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hosts import network_or_skip, started_on
from processes import (
    FOR_EVER,
    Process,
    counts_of,
    finished,
    newest_checkpoint,
    succeeded,
    until,
    until_trained,
    versions,
)

from asyncrl.errors import RankLostError
from asyncrl.rpc.keys import make_keys
from bench.network.hosts import Host, Network

pytestmark = pytest.mark.slow

PORTS = range(20_000, 20_020)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with network_or_skip(4, tmp_path_factory.mktemp("network")) as network:
        yield network


class SpreadRun:
    """A run whose queue is on the first host, with a learner on the next two; the file of one configuration is seen by
    all, and the secret key by the first alone."""

    def __init__(self, config: Path, network: Network, *keys: str, ipv6: bool = False) -> None:
        self.folder, self._config, self._closing = config.parent / "it", config, ExitStack()
        self.first, *self.learners, self.last = network.hosts
        make_keys(config.parent / "server")
        (config.parent / "client").mkdir()
        shutil.copy(config.parent / "server" / "client.key", config.parent / "client")
        where = f"[{self.first.address6}]" if ipv6 else self.first.address
        self._keys = (f"queue.address=tcp://{where}:5555", f"sync.ports={PORTS[0]}-{PORTS[-1]}", *keys)

    def __enter__(self) -> SpreadRun:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()
        for host in (self.first, *self.learners, self.last):
            host.reconnect()

    def start(self, host: Host, role: str, *words: str) -> Process:
        """One of its processes, which is killed in the end."""
        keys = f"queue.keys={self._config.parent / ('server' if role == 'queue' else 'client')}"
        process = started_on(host, "asyncrl", role, str(self._config), keys, *self._keys, *words)
        return self._closing.enter_context(process)

    def start_learner(self, *words: str) -> list[Process]:
        """A rank on each of two hosts."""
        common = ("learner.processes=2", "--nodes", "2", *words)
        return [
            self.start(host, "learner", *common, "--node", str(node))
            for node, host in enumerate(self.learners)
        ]

    def made(self, generator: str) -> int:
        """Groups of a generator, as far as its trace has come to the run's folder."""
        trace = self.folder / "trace" / f"{generator}.jsonl"
        return trace.read_text().count('"generate"') if trace.exists() else 0


def test_hosts_are_cut_off_and_come_back(config_file: Path, network: Network) -> None:
    deadlines = ("queue.deadline_s=10", "launch.rank_deadline_s=5")
    with SpreadRun(config_file, network) as run:
        queue = run.start(run.first, "queue")
        near = run.start(run.first, "generator", "--name", "near")
        far = run.start(run.last, "generator", "--name", "far")
        first, second = run.start_learner(FOR_EVER, *deadlines)
        everybody = (queue, near, far, first, second)
        until(lambda: run.made("near") and run.made("far"), "groups of both generators", *everybody)

        run.last.cut_off()
        until_trained(run.folder, versions(run.folder)[-1] + 5, *everybody)
        made = run.made("far")
        run.last.reconnect()
        until(lambda: run.made("far") > made, "more groups of the generator that was cut off", *everybody)
        until(lambda: newest_checkpoint(run.folder) >= 2, "a checkpoint", *everybody)

        run.learners[1].cut_off()
        code, printed = finished(first)
        assert code == RankLostError.exit_code, printed
        assert (
            "learner: a machine (--node 1, host host-3) gave the others no sign of life for 10 s" in printed
        )
        run.learners[1].reconnect()
        code, printed = finished(second)
        assert code != 0, printed

        last = versions(run.folder)[-1] + 2
        for process in (*run.start_learner("run.resume=true", f"run.versions={last}"), near, far, queue):
            succeeded(process)
    assert versions(run.folder) == list(range(1, last + 1))
    assert counts_of(run.folder) == (last, 4 * last, 0)


@pytest.mark.parametrize(("ipv6", "backend"), [(True, "tcp"), (False, "gloo")])
def test_each_listens_at_its_own_address_alone(
    config_file: Path, network: Network, ipv6: bool, backend: str
) -> None:
    """Also in a network that has IPv6 alone."""
    with ExitStack() as closing:
        if ipv6:
            for host in network.hosts:
                closing.enter_context(host.without_ipv4())
        run = closing.enter_context(SpreadRun(config_file, network, f"sync.backend={backend}", ipv6=ipv6))
        queue, generator = run.start(run.first, "queue"), run.start(run.last, "generator")
        ranks = run.start_learner(FOR_EVER)
        until_trained(run.folder, 2, queue, generator, *ranks)
        heard = {host: host.listens() for host in network.hosts}
        ranks[1].terminate()
        assert [finished(rank)[0] for rank in ranks] == [10, 10]
    for host, places in heard.items():
        assert {address for address, _ in places} <= {host.address6 if ipv6 else host.address}, host.name
    assert {port for _, port in heard[run.first]} == {5555}
    for host in run.learners:
        assert {port for _, port in heard[host]} & {*PORTS}
