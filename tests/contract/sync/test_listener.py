"""Who enters a channel: the one that has the offer, among any number of strangers, and nobody else."""

from __future__ import annotations

import gc
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

import msgpack
import pytest
import torch
import torch.distributed as dist

from asyncrl.errors import DeadlineError, WeightSyncError
from asyncrl.sync.channels.channel import SOURCE, TARGET, Channel, Meeting
from asyncrl.sync.channels.choose import Kind, accept, connect, listen
from asyncrl.sync.channels.listener import MOST_CALLERS, SECRET_BYTES, ChannelListener
from asyncrl.sync.channels.pair_store import FRAME, LONGEST_ENTRY, MOST_ENTRIES, PairStore
from asyncrl.sync.stream.sender import HUNG_UP

WAIT_S = 20.0
CPU = torch.device("cpu")
KINDS: list[Kind] = ["tcp", "shm"]


def meeting(member: int, deadline_s: float = WAIT_S) -> Meeting:
    names = ("learner rank 0", "generator-0")
    return Meeting("epoch-1", member, names[member], names[1 - member], CPU, deadline_s)


def called(listener: ChannelListener) -> socket.socket:
    """A stranger's connection, without the secret."""
    address = listener.offer["address"]
    if isinstance(address, str):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(f"\0{address}")
    else:
        stranger = socket.create_connection(tuple(address))
    stranger.settimeout(WAIT_S)
    return stranger


def broken_off(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except ConnectionError:
        return True


@contextmanager
def admitting(kind: Kind, threads: ThreadPoolExecutor) -> Iterator[tuple[ChannelListener, Future[Channel]]]:
    listener = listen(kind, "127.0.0.1")
    admitted = threads.submit(accept, kind, listener, meeting(SOURCE))
    yield listener, admitted
    listener.close()
    admitted.result(WAIT_S).close()


def carries(source: Channel, target: Channel) -> bool:
    data, into = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    leaving = source.send(data)
    target.recv(into).wait(WAIT_S)
    leaving.wait(WAIT_S)
    return torch.equal(data, into)


@pytest.mark.parametrize("words", [b"", b"x", b"x" * SECRET_BYTES, b"x" * 1000], ids=len)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stranger_gets_no_byte_and_keeps_nobody_out(
    kind: Kind, words: bytes, threads: ThreadPoolExecutor
) -> None:
    with ExitStack() as stack, admitting(kind, threads) as (listener, admitted):
        strangers = [stack.enter_context(called(listener)) for _ in range(10)]
        for stranger in strangers:
            if words:
                stranger.sendall(words)
        target = connect(kind, listener.offer, meeting(TARGET))
        assert carries(admitted.result(WAIT_S), target)
        assert all(map(broken_off, strangers))
        with pytest.raises(ConnectionRefusedError):
            called(listener)  # one end has come: nobody listens any more
        target.close()


def test_the_oldest_of_too_many_strangers_is_sent_away(threads: ThreadPoolExecutor) -> None:
    with ExitStack() as stack, admitting("tcp", threads) as (listener, admitted):
        strangers = [stack.enter_context(called(listener)) for _ in range(MOST_CALLERS + 1)]
        assert broken_off(strangers[0])
        target = connect("tcp", listener.offer, meeting(TARGET))
        assert carries(admitted.result(WAIT_S), target)
        target.close()


def test_strangers_who_fill_the_queue_of_a_listener_keep_nobody_out(threads: ThreadPoolExecutor) -> None:
    """Those of other users can do so too, before the listener sends them away."""
    listener = listen("shm", "127.0.0.1")
    with ExitStack() as stack:
        with suppress(BlockingIOError):  # it is full
            while True:
                stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                stranger.setblocking(False)
                stranger.connect(f"\0{listener.offer['address']}")
        with pytest.raises(DeadlineError, match=r"generator-0 waited 0\.1 s for learner rank 0"):
            connect("shm", listener.offer, meeting(TARGET, 0.1))
        target = threads.submit(connect, "shm", listener.offer, meeting(TARGET))
        source = accept("shm", listener, meeting(SOURCE))
        assert carries(source, target.result(WAIT_S))
        source.close()
        target.result(WAIT_S).close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_secret_in_two_parts_is_one(kind: Kind, threads: ThreadPoolExecutor) -> None:
    with admitting(kind, threads) as (listener, admitted), called(listener) as caller:
        hello = listener.offer["hello"]
        caller.sendall(hello[:5])
        assert not admitted.done()
        caller.sendall(hello[5:])
        assert caller.recv(SECRET_BYTES) == listener.offer["answer"]
        admitted.result(WAIT_S)


def test_two_doors_have_nothing_in_common() -> None:
    first, second = listen("tcp", "127.0.0.1"), listen("tcp", "127.0.0.1")
    secrets = {listener.offer[name] for listener in (first, second) for name in ("hello", "answer")}
    assert len(secrets) == 4
    assert {len(secret) for secret in secrets} == {SECRET_BYTES}
    first.close()
    second.close()


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_where_the_door_was_is_found_out(kind: Kind, threads: ThreadPoolExecutor) -> None:
    listener, other = listen(kind, "127.0.0.1"), listen(kind, "127.0.0.1")
    other._hello = listener.offer["hello"]
    admitted = threads.submit(accept, kind, other, meeting(SOURCE))
    with pytest.raises(WeightSyncError, match=r"generator-0: no weight channel .*: another process answered"):
        connect(kind, {**listener.offer, "address": other.offer["address"]}, meeting(TARGET))
    admitted.result(WAIT_S).close()
    listener.close()


def test_one_that_listens_and_is_silent_ends_at_the_deadline() -> None:
    listener = listen("tcp", "127.0.0.1")
    with pytest.raises(
        DeadlineError, match=r"generator-0 waited 0.1 s for learner rank 0: weight channel epoch-1"
    ):
        connect("tcp", listener.offer, meeting(TARGET, 0.1))
    listener.close()


def test_one_that_answers_byte_by_byte_ends_at_the_deadline(threads: ThreadPoolExecutor) -> None:
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as entrance:
        offer = {
            "address": entrance.getsockname(),
            "hello": b"h" * SECRET_BYTES,
            "answer": b"a" * SECRET_BYTES,
        }

        def dribble() -> None:
            caller, _ = entrance.accept()
            with caller, suppress(OSError):
                while not over.wait(0.05):
                    caller.sendall(b"a")

        dribbling = threads.submit(dribble)
        with pytest.raises(DeadlineError, match=r"generator-0 waited 0\.1 s for learner rank 0"):
            connect("tcp", offer, meeting(TARGET, 0.1))
        over.set()
        dribbling.result(WAIT_S)


@pytest.mark.parametrize("kind", KINDS)
def test_closing_a_door_wakes_the_one_who_waits_there(kind: Kind, threads: ThreadPoolExecutor) -> None:
    listener = listen(kind, "127.0.0.1")
    with called(listener) as stranger:
        admitted = threads.submit(accept, kind, listener, meeting(SOURCE))
        stranger.sendall(b"x" * SECRET_BYTES)
        assert broken_off(stranger), "it waits"
        listener.close()
        with pytest.raises(WeightSyncError, match="it was closed here"):
            admitted.result(WAIT_S)
    with pytest.raises(WeightSyncError, match="it was closed here"):
        accept(kind, listener, meeting(SOURCE))


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_that_is_gone_hangs_up_and_one_that_sent_something_does_not(
    kind: Kind, threads: ThreadPoolExecutor
) -> None:
    with admitting(kind, threads) as (listener, admitted):
        target = connect(kind, listener.offer, meeting(TARGET))
        source, poll = admitted.result(WAIT_S), select.poll()
        poll.register(source.fileno(), HUNG_UP)
        target.send(torch.zeros(8, dtype=torch.uint8))
        assert not poll.poll(0)
        target.close()
        assert poll.poll(1000 * WAIT_S)


# ------------------------------------------------------------------ the store of two


@pytest.fixture
def stores() -> Iterator[tuple[PairStore, PairStore]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield PairStore(ours, WAIT_S), PairStore(theirs, WAIT_S)


def test_torch_makes_a_group_of_two_over_one_connection(
    stores: tuple[PairStore, PairStore], threads: ThreadPoolExecutor
) -> None:
    def member(number: int) -> Any:
        return dist.ProcessGroupGloo(stores[number], number, 2, timedelta(seconds=WAIT_S))

    second = threads.submit(member, 1)
    groups = [member(0), second.result(WAIT_S)]
    data, into = torch.arange(9.0), torch.zeros(9)
    leaving, arriving = groups[0].send([data], 1, 5), groups[1].recv([into], 0, 5)
    arriving.wait()
    leaving.wait()
    assert torch.equal(data, into)


def test_what_one_sets_both_have(stores: tuple[PairStore, PairStore]) -> None:
    one, other = stores
    assert not other.check(["a"])
    one.set("a", "text")
    one.set("b", b"bytes")
    assert other.get("b") == one.get("b") == b"bytes"
    assert other.check(["a", "b"])
    assert other.get("a") == b"text"
    assert one.num_keys() == 2


def test_a_wait_for_an_entry_ends_with_its_time_or_the_other_end(
    stores: tuple[PairStore, PairStore], threads: ThreadPoolExecutor
) -> None:
    one, other = stores
    one.set_timeout(timedelta(seconds=0.05))
    with pytest.raises(TimeoutError):
        one.get("never")
    one.set_timeout(timedelta(seconds=WAIT_S))
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        one.get("never")

    waiting = threads.submit(wait)
    assert begun.wait(WAIT_S)
    other._socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionError):
        waiting.result(WAIT_S)


def test_bytes_that_make_no_entry_do_not_prolong_a_wait(
    stores: tuple[PairStore, PairStore], threads: ThreadPoolExecutor
) -> None:
    one, other = stores
    entry = msgpack.packb(["slow", b"x" * 100])
    one.set_timeout(timedelta(seconds=0.1))
    over = threading.Event()

    def dribble() -> None:
        for byte in FRAME.pack(len(entry)) + entry:
            if over.wait(0.05):
                return
            other._socket.sendall(bytes([byte]))

    dribbling = threads.submit(dribble)
    with pytest.raises(TimeoutError):
        one.get("slow")
    over.set()
    dribbling.result(WAIT_S)


def test_a_store_is_bounded(stores: tuple[PairStore, PairStore]) -> None:
    one, other = stores
    with pytest.raises(ConnectionError, match="at most"):
        one.set("long", b"x" * (LONGEST_ENTRY + 1))
    for number in range(MOST_ENTRIES):
        one.set(f"{number}", b"")
    with pytest.raises(ConnectionError, match="at most"):
        one.set("one more", b"")
    one._socket.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ConnectionError, match="at most"):
        other.get("one more")


def test_the_store_of_a_channel_lives_as_long_as_the_channel(threads: ThreadPoolExecutor) -> None:
    """torch keeps its part in C++ alone, which fails once the Python object is gone; NCCL calls it in the first
    transfer."""
    gc.collect()
    before = sum(isinstance(one, PairStore) for one in gc.get_objects())
    listener = listen("gloo", "127.0.0.1")
    admitted = threads.submit(accept, "gloo", listener, meeting(SOURCE))
    ends = [connect("gloo", listener.offer, meeting(TARGET)), admitted.result(WAIT_S)]
    gc.collect()
    assert sum(isinstance(one, PairStore) for one in gc.get_objects()) == before + 2
    for end in ends:
        end.close()
    listener.close()


def test_a_stranger_in_a_group_of_gloo_is_found_out_before_weights_leave(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener, get = listen("gloo", "127.0.0.1"), PairStore.get

    def other(store: PairStore, key: str) -> bytes:
        """The stranger does not see the connection."""
        return b"x" * 32 if key == f"proof/{SOURCE}" else get(store, key)

    monkeypatch.setattr(PairStore, "get", other)
    admitted = threads.submit(accept, "gloo", listener, meeting(SOURCE))
    connect("gloo", listener.offer, meeting(TARGET)).close()
    with pytest.raises(WeightSyncError, match=r"learner rank 0: .*another process has taken its place"):
        admitted.result(WAIT_S)
