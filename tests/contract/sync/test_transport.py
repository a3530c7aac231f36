"""One suite over every `Channel`: the golden one in process, TCP, gloo, NCCL, shared memory."""

from __future__ import annotations

import gc
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest
import torch
from fake_nccl import nccl_channels
from hypothesis import given
from hypothesis import strategies as st
from local_channel import local_channels

import asyncrl.sync.channels.shared_memory as memory
from asyncrl.errors import DeadlineError, RefusedError, WeightSyncError
from asyncrl.sync.channels.addresses import own_address
from asyncrl.sync.channels.channel import SOURCE, TARGET, Channel, Meeting
from asyncrl.sync.channels.choose import EndPlace, Kind, accept, choose, connect, listen, place_of
from asyncrl.sync.channels.gloo_transport import GlooChannel
from asyncrl.sync.channels.shared_memory import located, mapped, shared_memory
from asyncrl.sync.channels.shm_transport import MOST_PARTS, ShmChannel

Pair = tuple[Channel, Channel]
NAMES = ("learner rank 0", "generator-0")
DEADLINE_S = 20.0
START_S = 90.0
"""A process starts and imports torch."""

GPUS = torch.cuda.device_count()


def meeting(
    member: int, device: str = "cpu", deadline_s: float = DEADLINE_S, name: str = "epoch-1"
) -> Meeting:
    own, other = NAMES[member], NAMES[1 - member]
    return Meeting(name, member, own, other, torch.device(device), deadline_s)


def joined(kind: Kind, devices: tuple[str, str] = ("cpu", "cpu")) -> Pair:
    listener = listen(kind, "127.0.0.1")
    with ThreadPoolExecutor(1) as threads:
        source = threads.submit(accept, kind, listener, meeting(SOURCE, devices[SOURCE]))
        target = connect(kind, listener.offer, meeting(TARGET, devices[TARGET]))
        return source.result(DEADLINE_S), target


MAKERS: dict[str, Callable[[], Pair]] = {
    "local": lambda: local_channels(*NAMES),
    "tcp": lambda: joined("tcp"),
    "gloo": lambda: joined("gloo"),
    "shm": lambda: joined("shm"),
    "nccl, made up": lambda: nccl_channels(*NAMES),
    "nccl": lambda: joined("nccl", ("cuda:0", "cuda:1")),
}
NEEDS_GPUS = {"nccl": 2}


def kinds(names: list[str], needed: dict[str, int]) -> list[object]:
    """Parameters of a test; those that need GPUs say so where there are none."""
    return [
        pytest.param(
            name, marks=pytest.mark.skipif(n > GPUS, reason=f"{name} needs {n} GPU(s), here are {GPUS}")
        )
        for name in names
        for n in [needed.get(name, 0)]
    ]


@pytest.fixture(params=kinds(list(MAKERS), NEEDS_GPUS))
def channels(request: pytest.FixtureRequest) -> Iterator[Pair]:
    source, target = MAKERS[request.param]()
    yield source, target
    source.close()
    target.close()


def send_all(channel: Channel, messages: list[torch.Tensor]) -> None:
    for transfer in [channel.send(data.to(channel.device)) for data in messages]:
        transfer.wait(DEADLINE_S)


def received(channel: Channel, sizes: list[int]) -> list[torch.Tensor]:
    into = [torch.zeros(size, dtype=torch.uint8, device=channel.device) for size in sizes]
    for transfer in [channel.recv(data) for data in into]:
        transfer.wait(DEADLINE_S)
    return [data.cpu() for data in into]


def eight(channel: Channel) -> torch.Tensor:
    return torch.zeros(8, dtype=torch.uint8, device=channel.device)


@pytest.mark.parametrize("seed", range(3))
def test_bytes_arrive_in_order_with_several_on_their_way(
    seed: int, channels: Pair, threads: ThreadPoolExecutor
) -> None:
    source, target = channels
    rng, random_bits = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [1, 70_001, 3, 1 << 20] + [rng.choice((2, 4097, 300_000)) for _ in range(8)]
    sent = [torch.randint(0, 256, (size,), generator=random_bits).to(torch.uint8) for size in sizes]
    leaving = threads.submit(send_all, source, sent)
    arrived = received(target, sizes)
    leaving.result(DEADLINE_S)
    assert all(torch.equal(a, b) for a, b in zip(sent, arrived, strict=True))


def test_a_send_may_begin_before_its_receive(channels: Pair, threads: ThreadPoolExecutor) -> None:
    source, target = channels
    data = torch.arange(100, dtype=torch.uint8)
    leaving = source.send(data.to(source.device))
    arriving = threads.submit(received, target, [100])
    leaving.wait(DEADLINE_S)
    assert torch.equal(arriving.result(DEADLINE_S)[0], data)


def test_both_directions_are_one_channel(channels: Pair, threads: ThreadPoolExecutor) -> None:
    ends, data = channels, torch.arange(100, dtype=torch.uint8)
    for there in (0, 1, 0):
        leaving = threads.submit(send_all, ends[there], [data])
        assert torch.equal(received(ends[1 - there], [100])[0], data)
        leaving.result(DEADLINE_S)


def test_a_receive_that_nobody_serves_names_both_ends_and_kills_the_channel(channels: Pair) -> None:
    _, target = channels
    with pytest.raises(DeadlineError, match=r"generator-0 waited 0.1 s for learner rank 0: recv of 8 bytes"):
        target.recv(eight(target)).wait(0.1)
    for begin in (target.send, target.recv):
        with pytest.raises(
            WeightSyncError, match="generator-0: the channel to learner rank 0 broke: recv of 8"
        ):
            begin(eight(target))


def test_a_closed_end_is_noticed_by_the_other(channels: Pair) -> None:
    source, target = channels
    arriving = target.recv(eight(target))
    source.close()
    source.close()
    with pytest.raises(WeightSyncError, match="learner rank 0"):
        arriving.wait(DEADLINE_S)
    for end in channels:
        with pytest.raises(WeightSyncError):
            end.send(eight(end))


def test_closing_wakes_a_thread_that_waits(channels: Pair, threads: ThreadPoolExecutor) -> None:
    source, target = channels
    begun = threading.Event()

    def wait() -> None:
        transfer = target.recv(eight(target))
        begun.set()
        transfer.wait(DEADLINE_S)

    waiting = threads.submit(wait)
    assert begun.wait(DEADLINE_S)
    target.close()
    if isinstance(target, GlooChannel):  # whose wait ends with the other end
        source.close()
    with pytest.raises(WeightSyncError, match="generator-0"):
        waiting.result(DEADLINE_S)


# ------------------------------------------------------------------ a peer in a process of its own

PROCESSES = kinds(["tcp", "gloo", "shm", "nccl", "cuda-ipc"], {"nccl": 2, "cuda-ipc": 1})


@contextmanager
def peer(kind: str) -> Iterator[tuple[Channel, subprocess.Popen[str]]]:
    """(the learner's end, the process with the generator's)."""
    listener = listen("shm" if kind in ("shm", "cuda-ipc") else "tcp", "127.0.0.1")
    words = [
        sys.executable,
        str(Path(__file__).with_name("channel_peer.py")),
        kind,
        msgpack.packb(listener.offer).hex(),
    ]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            device = "cuda" if kind in ("nccl", "cuda-ipc") else "cpu"
            channel = accept(
                "shm" if kind == "cuda-ipc" else kind,  # type: ignore[arg-type]
                listener,
                meeting(SOURCE, device, deadline_s=START_S),
            )
            assert said(process) == "ready"
            yield channel, process
            channel.close()
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdin is not None
    print(words, file=process.stdin, flush=True)


def pattern(size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(size, device=device).remainder(251).to(torch.uint8)


@pytest.mark.parametrize("kind", PROCESSES)
def test_another_process_receives_plain_and_shared_memory_and_sends(kind: str) -> None:
    with peer(kind) as (channel, process):
        shared = shared_memory(1 << 20, channel.device)
        shared[100:70_100].copy_(pattern(70_000, channel.device))
        for data in (pattern(70_000, channel.device), shared[100:70_100], shared[100:100_000][:7]):
            tell(process, f"recv {data.numel()}")
            channel.send(data).wait(DEADLINE_S)
            assert said(process) == "done"
        tell(process, "send 5000")
        assert torch.equal(received(channel, [5000])[0], pattern(5000, torch.device("cpu")))


@pytest.mark.parametrize("verb", ["send", "recv"])
@pytest.mark.parametrize("kind", PROCESSES)
def test_a_killed_process_ends_what_waits_for_it(kind: str, verb: str) -> None:
    with peer(kind) as (channel, process):
        data = torch.zeros(64 << 20, dtype=torch.uint8, device=channel.device)  # more than a socket holds
        transfer = getattr(channel, verb)(data)
        process.kill()
        process.wait()
        with pytest.raises((WeightSyncError, DeadlineError), match=r"learner rank 0.*generator-0"):
            transfer.wait(5.0)
        with pytest.raises(WeightSyncError, match="the channel to generator-0 broke"):
            channel.send(data)


@pytest.mark.parametrize("kind", ["tcp", "gloo", "shm"])
def test_an_end_that_never_comes_is_named_at_the_deadline(kind: Kind) -> None:
    admitting, entering = listen(kind, "127.0.0.1"), listen(kind, "127.0.0.1")
    with pytest.raises(
        DeadlineError, match=r"learner rank 0 waited 0.2 s for generator-0: weight channel never"
    ):
        accept(kind, admitting, meeting(SOURCE, deadline_s=0.2, name="never"))
    with pytest.raises(WeightSyncError, match="generator-0: no weight channel never to learner rank 0"):
        connect(kind, admitting.offer, meeting(TARGET, name="never"))
    with pytest.raises(
        DeadlineError, match=r"generator-0 waited 0.2 s for learner rank 0: weight channel never"
    ):
        connect(kind, entering.offer, meeting(TARGET, deadline_s=0.2, name="never"))
    entering.close()


def test_own_address_towards_this_machine_is_loopback() -> None:
    assert own_address("127.0.0.1", 1) == "127.0.0.1"


# ------------------------------------------------------------------ shared memory alone


def mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("asyncrl-weights")


def test_what_lies_in_shared_memory_is_not_copied_to_be_sent(threads: ThreadPoolExecutor) -> None:
    gc.collect()  # what earlier tests left
    before = len(memory._segments)
    source, target = joined("shm")
    data, sizes = shared_memory(1000), [10, 990]
    leaving = threads.submit(send_all, source, [data[:10], data[10:]])
    received(target, sizes)
    leaving.result(DEADLINE_S)
    assert len(memory._segments) == before + 1
    leaving = threads.submit(send_all, source, [data.clone(), data.clone()])
    received(target, [1000, 1000])
    leaving.result(DEADLINE_S)
    assert len(memory._segments) == before + 3, "two slots, for two on their way"
    for _ in range(3):
        leaving = threads.submit(send_all, source, [data[:500].clone(), data.clone()])
        received(target, [500, 1000])
        leaving.result(DEADLINE_S)
    assert len(memory._segments) == before + 3, "and they are used again"
    source.close()
    target.close()


@pytest.mark.parametrize("count", [3, MOST_PARTS + 1])
def test_tensors_are_copied_once_from_where_they_lie_to_where_they_belong(
    count: int, threads: ThreadPoolExecutor
) -> None:
    """Strided at both ends, in shared memory and in plain; more of them than one packet tells of."""
    source, target = joined("shm")
    shared = shared_memory(80 * count).view(torch.float32).view(count, 5, 4)
    shared.copy_(torch.randn(count, 5, 4))
    before = len(memory._segments)
    for parts in ([each[1:4, 1:3] for each in shared], [each.clone()[1:4, 1:3] for each in shared]):
        into = [torch.zeros(2, 3).t() for _ in parts]
        leaving = threads.submit(lambda parts=parts: source.send_parts(parts).wait(DEADLINE_S))
        target.recv_parts(into).wait(DEADLINE_S)
        leaving.result(DEADLINE_S)
        assert all(map(torch.equal, into, parts))
        if parts[0].untyped_storage().data_ptr() == shared.untyped_storage().data_ptr():
            assert len(memory._segments) == before, "no buffers"
    source.close()
    target.close()


def test_no_memory_and_no_descriptor_stays_behind(threads: ThreadPoolExecutor) -> None:
    before = mappings()
    source, target = joined("shm")
    leaving = threads.submit(send_all, source, [torch.zeros(5000, dtype=torch.uint8), shared_memory(70)])
    received(target, [5000, 70])
    leaving.result(DEADLINE_S)
    assert mappings() > before
    source.close()
    target.close()
    del leaving
    assert mappings() == before
    assert not memory._segments


def test_a_view_keeps_its_segment_and_knows_its_place() -> None:
    data = shared_memory(4096).view(torch.int16)[3:10]
    found = located(data)
    assert found is not None
    assert found[1] == 6
    assert located(data.clone()) is None
    number = found[0].number
    del data, found
    gc.collect()
    assert number not in memory._segments


def test_only_sealed_memory_is_mapped(tmp_path: Path) -> None:
    segment, _ = located(shared := shared_memory(100)) or pytest.fail("not shared")
    with pytest.raises(WeightSyncError, match="not a shared segment of 101 bytes"):
        mapped(101, segment.fd, b"")
    shared[5] = 7
    assert mapped(100, segment.fd, b"")[5] == 7
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(100)
        with pytest.raises((WeightSyncError, OSError)):
            mapped(100, file.fileno(), b"")


def test_another_size_than_expected_is_refused(threads: ThreadPoolExecutor) -> None:
    for make in (MAKERS["local"], MAKERS["shm"], MAKERS["tcp"]):
        source, target = make()
        source.send(eight(source))
        with pytest.raises(WeightSyncError, match="8 bytes came where 9 were expected"):
            target.recv(torch.zeros(9, dtype=torch.uint8)).wait(DEADLINE_S)
        source.close()
        target.close()


@given(packets=st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=4), kind=st.integers(0, 3))
def test_packets_that_are_none_break_the_channel_and_nothing_else(packets: list[bytes], kind: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = ShmChannel(ours, *NAMES, torch.device("cpu"))
    arriving = channel.recv(eight(channel))
    with theirs:
        for packet in packets:
            theirs.send(bytes([kind]) + packet)
    with pytest.raises(WeightSyncError, match="the channel to generator-0 broke"):
        arriving.wait(DEADLINE_S)
    channel.close()


HERE, ELSEWHERE = EndPlace("a"), EndPlace("b")
GPU_0, GPU_1 = EndPlace("a", "gpu-0", ("gpu-0",)), EndPlace("a", "gpu-1", ("gpu-0", "gpu-1"))
BOTH_0 = EndPlace("a", "gpu-0", ("gpu-0", "gpu-1"))
FAR_GPU = EndPlace("b", "gpu-2", ("gpu-2",))


@pytest.mark.parametrize(
    ("here", "there", "kind"),
    [
        (HERE, HERE, "shm"),
        (HERE, ELSEWHERE, "tcp"),
        (EndPlace(""), EndPlace(""), "tcp"),
        (HERE, GPU_0, "tcp"),
        (GPU_0, GPU_0, "shm"),
        (GPU_0, GPU_1, "nccl"),
        (BOTH_0, GPU_1, "shm"),
        (GPU_0, FAR_GPU, "nccl"),
    ],
)
def test_the_fastest_kind_that_joins_two_places(here: EndPlace, there: EndPlace, kind: str) -> None:
    assert choose("auto", here, there) == kind
    assert choose("auto", there, here) == kind
    assert choose(kind, here, there) == kind


def test_a_kind_that_cannot_join_them_is_refused_by_name() -> None:
    with pytest.raises(RefusedError, match=r"backend: sync\.backend is shm, and"):
        choose("shm", HERE, ELSEWHERE)
    with pytest.raises(RefusedError, match=r"backend: sync\.backend is nccl, and"):
        choose("nccl", HERE, HERE)


def test_a_place_survives_the_wire() -> None:
    for place in (place_of(torch.device("cpu")), GPU_1):
        assert EndPlace.from_wire(place.to_wire()) == place
    assert place_of(torch.device("cpu")).shares_memory_with(place_of(torch.device("cpu")))
