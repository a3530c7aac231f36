"""NCCL's channels on GPUs that are made up: no order of launches stops them; a peer that dies ends its own alone."""

from __future__ import annotations

import gc
import os
import random
import socket
import threading
import weakref
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_nccl import WAIT_S, Deaf, Fabric, FakeGroup, Kernel, nccl_channels

from asyncrl.errors import DeadlineError, WeightSyncError
from asyncrl.sync.channels import nccl_transport
from asyncrl.sync.channels.channel import SOURCE, Meeting
from asyncrl.sync.channels.nccl_transport import BLOCKING_WAIT, NcclChannel, make_nccl_channel
from asyncrl.sync.channels.transfer_locks import TransferLocks

RANKS, GENERATORS = ("rank 0", "rank 1"), ("A", "B")
CPU = torch.device("cpu")


def data(value: int, size: int = 8) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def both(pair: tuple[NcclChannel, NcclChannel], value: int, threads: ThreadPoolExecutor) -> None:
    """One transfer of eight bytes, checked."""
    into = data(0)
    leaving = threads.submit(pair[0].send(data(value)).wait, WAIT_S)
    pair[1].recv(into).wait(WAIT_S)
    leaving.result(WAIT_S)
    assert torch.equal(into, data(value))


def test_launched_at_will_two_ranks_and_two_generators_wait_in_a_circle() -> None:
    fabric = Fabric()
    groups = {(a, b): FakeGroup(fabric, a, b, 0) for a in RANKS for b in GENERATORS}
    groups |= {(b, a): FakeGroup(fabric, b, a, 1) for a in RANKS for b in GENERATORS}
    kernels = [
        *(groups["rank 0", to].send([data(1)], 1, 0) for to in ("A", "B")),
        *(groups["rank 1", to].send([data(1)], 1, 0) for to in ("B", "A")),
        *(groups["A", of].recv([data(0)], 0, 0) for of in ("rank 1", "rank 0")),
        *(groups["B", of].recv([data(0)], 0, 0) for of in ("rank 0", "rank 1")),
    ]
    assert sorted(fabric.circles[-1]) == ["A", "B", "rank 0", "rank 1"]
    assert not any(kernel.done for kernel in kernels)


@pytest.mark.parametrize("seed", range(3))
def test_with_locks_every_order_of_every_thread_ends(seed: int) -> None:
    """A relay too: B passes on to C what comes to it."""
    fabric, locks = Fabric(), defaultdict(TransferLocks)
    routes = [(a, b) for a in RANKS for b in GENERATORS] + [("B", "C")]
    pairs = {route: nccl_channels(*route, fabric, locks) for route in routes}
    count, calls = 6, []
    into = {route: [data(0) for _ in range(count)] for route in routes}
    for route, (source, target) in pairs.items():

        def send(source: NcclChannel = source) -> None:
            for transfer in [source.send(data(number)) for number in range(count)]:
                transfer.wait(WAIT_S)

        def receive(target: NcclChannel = target, buffers: list[torch.Tensor] = into[route]) -> None:
            for transfer in [target.recv(buffer) for buffer in buffers]:
                transfer.wait(WAIT_S)

        calls += [send, receive]
    random.Random(seed).shuffle(calls)
    with ThreadPoolExecutor(len(calls)) as threads:
        for done in [threads.submit(call) for call in calls]:
            done.result(WAIT_S)
    for buffers in into.values():
        assert [int(buffer[0]) for buffer in buffers] == list(range(count))
    assert fabric.circles == []
    for source, target in pairs.values():
        source.close()
        target.close()


@pytest.mark.parametrize(("who", "lock"), [("rank 0", "sends"), ("A", "receives")])
def test_without_its_lock_neither_end_launches(who: str, lock: str, threads: ThreadPoolExecutor) -> None:
    fabric, locks = Fabric(), defaultdict(TransferLocks)
    source, target = nccl_channels("rank 0", "A", fabric, locks)
    before = len(fabric.launched)
    with getattr(locks[who], lock).held(WAIT_S):
        leaving = threads.submit(source.send(data(1)).wait, 0.2)
        with pytest.raises(DeadlineError, match=r"A waited 0.2 s for rank 0: recv of 8 bytes"):
            target.recv(data(0)).wait(0.2)
        with pytest.raises((DeadlineError, WeightSyncError)):
            leaving.result(WAIT_S)
    assert len(fabric.launched) == before


@pytest.mark.parametrize("end", ["dies", "stands still"])
def test_a_peer_that_is_gone_ends_its_own_pair_alone(
    end: str, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has said that it takes the bytes, and never launches."""
    monkeypatch.setattr(nccl_transport, "GONE_S", 0.0)
    monkeypatch.setattr(nccl_transport, "LAUNCHED_S", 0.1 if end == "stands still" else WAIT_S)
    fabric, locks = Fabric(), defaultdict(TransferLocks)
    gone, stays = (nccl_channels("rank 0", to, fabric, locks) for to in GENERATORS)
    fabric.begun.clear()
    gone[1]._socket.send(b"T")
    leaving = gone[0].send(data(1))
    waiting = threads.submit(leaving.wait, WAIT_S)
    assert fabric.begun.wait(WAIT_S)
    if end == "dies":
        gone[1]._socket.shutdown(socket.SHUT_RDWR)
    error, words = (
        (WeightSyncError, "A closed it, or died") if end == "dies" else (DeadlineError, "for A: send")
    )
    with pytest.raises(error, match=f"rank 0 .*{words}|rank 0: .*{words}"):
        waiting.result(WAIT_S)
    assert fabric.aborted == ["rank 0"]
    with pytest.raises(WeightSyncError, match="rank 0: the channel to A broke"):
        gone[0].send(data(1))
    both(stays, 7, threads)
    gone[0].close()
    assert fabric.aborted == ["rank 0"], "once"
    stays[0].close()
    assert fabric.aborted == ["rank 0", "rank 0"]


@pytest.mark.parametrize("dies", [False, True])
def test_an_nccl_that_never_connects_costs_the_deadline_and_not_the_thread(
    dies: bool, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, (ours, theirs) = Deaf(), socket.socketpair()
    monkeypatch.setattr(nccl_transport, "_new_group", lambda store, meeting: group)
    deadline_s = WAIT_S if dies else 0.3
    meeting = Meeting("epoch-1", SOURCE, "rank 0", "A", CPU, deadline_s)
    theirs.send(b"T")
    making = threads.submit(make_nccl_channel, ours, meeting)
    if dies:
        theirs.close()
    expected: Any = WeightSyncError if dies else DeadlineError
    with pytest.raises(
        expected, match=r"rank 0.*weight channel epoch-1|rank 0: no nccl channel epoch-1 to A"
    ):
        making.result(WAIT_S)
    assert group.over.is_set()
    theirs.close()


def test_an_error_of_a_transfer_that_has_ended_breaks_the_channel() -> None:
    class Failing(FakeGroup):
        def _launch(self, verb: str, direction: int, data: torch.Tensor) -> Kernel:
            return Kernel(self.gpu, self.pair, direction, 0, data, aborted=True)

    source, target = nccl_channels("rank 0", "A")
    source._group = Failing(source._group.fabric, "rank 0", "A", 0)
    target._socket.send(b"T")
    with pytest.raises(WeightSyncError, match="the channel to A broke: the communicator was aborted"):
        source.send(data(1)).wait(WAIT_S)
    source.close()
    target.close()


def test_a_channel_keeps_the_store_that_nccl_calls() -> None:
    """torch does not keep the Python object, and NCCL reads the store in the first transfer of a direction."""
    ours, theirs = socket.socketpair()
    store = Fabric()  # anything that a weak reference can name
    alive = weakref.ref(store)
    meeting = Meeting("epoch-1", SOURCE, "rank 0", "A", CPU, WAIT_S)
    channel = NcclChannel(FakeGroup(Fabric(), "rank 0", "A", 0), store, ours, meeting, TransferLocks())
    del store
    gc.collect()
    assert alive() is not None
    channel.close()
    theirs.close()


def test_only_groups_of_pairs_are_made_without_a_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (BLOCKING_WAIT, nccl_transport.NONBLOCKING_TIMEOUT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(nccl_transport, "_users_own", False)
    with nccl_transport._without_watchdog(2.5):
        assert os.environ[BLOCKING_WAIT] == "1"
        assert os.environ[nccl_transport.NONBLOCKING_TIMEOUT] == "3"
    assert os.environ[BLOCKING_WAIT] == "0"
    monkeypatch.setattr(nccl_transport, "_users_own", True)
    with nccl_transport._without_watchdog(2.5):
        assert os.environ[BLOCKING_WAIT] == "0"


def test_a_group_is_made_without_blocking_calls_and_takes_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL aborts only communicators whose calls do not block."""

    class Made:
        def __init__(self, store: object, member: int, size: int, options: Any) -> None:
            self.place, self.options, self.watchdog = (member, size), options, os.environ[BLOCKING_WAIT]

        @staticmethod
        def Options() -> SimpleNamespace:  # noqa: N802
            return SimpleNamespace(config=SimpleNamespace())

    monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    monkeypatch.setattr(nccl_transport, "_users_own", False)
    monkeypatch.setattr(nccl_transport, "dist", SimpleNamespace(ProcessGroupNCCL=Made))
    made = nccl_transport._new_group(Any, Meeting("a", SOURCE, "rank 0", "A", CPU, 2.5))  # type: ignore[arg-type]
    assert (made.place, made.watchdog) == ((SOURCE, 2), "1")
    assert vars(made.options.config) == {"blocking": 0, "max_ctas": nccl_transport.MOST_CTAS}


def test_a_call_into_nccl_is_given_up_when_the_other_end_is_gone() -> None:
    never = threading.Event()
    with pytest.raises(OSError, match="the other end closed it"):
        nccl_transport._within(0.2, lambda: never.wait(WAIT_S) and None, lambda: True)
    never.set()
