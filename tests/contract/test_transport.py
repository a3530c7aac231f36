"""One suite over every `Channel`: the golden one in process, and torch's over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from asyncrl.errors import DeadlineError, WeightSyncError
from asyncrl.sync.torch_transport import SOURCE, TARGET, host_store, join_store, make_channel, own_address
from asyncrl.sync.transport import Channel, local_channels

Pair = tuple[Channel, Channel]


def gloo_channels() -> Pair:
    store = host_store("127.0.0.1", 10.0)

    def member(number: int) -> Channel:
        names = ("learner rank 0", "generator-0")
        return make_channel(
            "gloo",
            join_store("127.0.0.1", store.port, 10.0),
            "epoch-1",
            number,
            who=names[number],
            whom=names[1 - number],
            own_host="127.0.0.1",
            device=torch.device("cpu"),
            deadline_s=10.0,
        )

    with ThreadPoolExecutor(2) as threads:
        source, target = threads.map(member, (SOURCE, TARGET))
    return source, target


MAKERS: dict[str, Callable[[], Pair]] = {
    "local": lambda: local_channels("learner rank 0", "generator-0"),
    "gloo": gloo_channels,
}


@pytest.fixture(params=list(MAKERS))
def channels(request: pytest.FixtureRequest) -> Iterator[Pair]:
    source, target = MAKERS[request.param]()
    yield source, target
    source.close()
    target.close()


def test_bytes_arrive_in_order_with_several_on_their_way(channels: Pair) -> None:
    source, target = channels
    sent = [
        torch.full((size,), number, dtype=torch.uint8) for number, size in enumerate((1, 70_000, 3, 1 << 20))
    ]
    received = [torch.zeros_like(data) for data in sent]
    arriving = [target.recv(into) for into in received]
    leaving = [source.send(data) for data in sent]
    for transfer in leaving + arriving:
        transfer.wait(10.0)
    assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True))


def test_a_send_may_begin_before_its_receive(channels: Pair) -> None:
    source, target = channels
    data, into = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    leaving = source.send(data)
    target.recv(into).wait(10.0)
    leaving.wait(10.0)
    assert torch.equal(data, into)


def test_a_receive_that_nobody_serves_names_both_ends(channels: Pair) -> None:
    _, target = channels
    with pytest.raises(DeadlineError, match=r"generator-0 waited 0.1 s for learner rank 0: recv of 8 bytes"):
        target.recv(torch.zeros(8, dtype=torch.uint8)).wait(0.1)


def test_a_closed_end_is_noticed_by_the_other(channels: Pair) -> None:
    source, target = channels
    arriving = target.recv(torch.zeros(8, dtype=torch.uint8))
    source.close()
    source.close()
    with pytest.raises(WeightSyncError, match="learner rank 0"):
        arriving.wait(10.0)
    with pytest.raises(WeightSyncError):
        source.send(torch.zeros(8, dtype=torch.uint8))


def test_a_member_that_never_comes_ends_at_the_deadline() -> None:
    store = host_store("127.0.0.1", 5.0)
    with pytest.raises(DeadlineError, match=r"learner rank 0 waited 0.2 s for generator-9"):
        make_channel(
            "gloo",
            store,
            "never",
            SOURCE,
            who="learner rank 0",
            whom="generator-9",
            own_host="127.0.0.1",
            device=torch.device("cpu"),
            deadline_s=0.2,
        )


def test_own_address_towards_this_machine_is_loopback() -> None:
    assert own_address("127.0.0.1", 1) == "127.0.0.1"
