"""NCCL's transfers on GPUs that are made up, strict where real ones may forgive: a GPU runs the kernels in the order in
which they were launched, one at a time, and a kernel ends only once both ends of its transfer run.

A `Fabric` joins the groups of one process. It knows what each GPU was given, in which order, and finds kernels that
wait for each other in a circle.
"""

from __future__ import annotations

import socket
import threading
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncrl.sync.channels.channel import SOURCE, TARGET, Meeting
from asyncrl.sync.channels.nccl_transport import NcclChannel
from asyncrl.sync.channels.transfer_locks import TransferLocks

WAIT_S = 20.0


@dataclass(eq=False)
class Kernel:
    """pair, direction, number: the same at both ends of a transfer · stream: that the launching thread was on"""

    gpu: str
    pair: Any
    direction: int
    number: int
    data: torch.Tensor
    stream: str = ""
    done: bool = False
    aborted: bool = False

    @property
    def key(self) -> tuple[Any, int, int]:
        return (self.pair, self.direction, self.number)

    # As torch's Work.

    def is_completed(self) -> bool:
        return self.done or self.aborted

    def wait(self) -> None:
        if not self.done:
            raise RuntimeError("the communicator was aborted")


@dataclass
class Fabric:
    """All GPUs. launched: every kernel, in order · circles: that were found, as the GPUs in them ·
    begun: set by each launch"""

    launched: list[Kernel] = field(default_factory=list)
    circles: list[list[str]] = field(default_factory=list)
    queues: dict[str, deque[Kernel]] = field(default_factory=lambda: defaultdict(deque))
    aborted: list[str] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def launch(self, kernel: Kernel) -> Kernel:
        with self.lock:
            self.launched.append(kernel)
            self.queues[kernel.gpu].append(kernel)
            self._run()
        self.begun.set()
        return kernel

    def abort(self, gpu: str, pair: Any) -> None:
        with self.lock:
            self.aborted.append(gpu)
            for kernel in [one for one in self.queues[gpu] if one.pair == pair]:
                kernel.aborted = True
                self.queues[gpu].remove(kernel)
            self._run()

    def _run(self) -> None:
        while self._end_one():
            pass
        circle = self._circle()
        if circle:
            self.circles.append(circle)

    def _end_one(self) -> bool:
        running = {queue[0].key: [] for queue in self.queues.values() if queue}
        for queue in self.queues.values():
            if queue:
                running[queue[0].key].append(queue[0])
        for ends in running.values():
            if len(ends) == 2:
                source, target = sorted(ends, key=lambda kernel: kernel.gpu != kernel.pair[kernel.direction])
                target.data.copy_(source.data)
                for kernel in ends:
                    kernel.done = True
                    self.queues[kernel.gpu].popleft()
                return True
        return False

    def _circle(self) -> list[str]:
        """GPUs of which each runs a kernel whose other end is queued behind the first one of the next."""
        waits_for = {}
        for gpu, queue in self.queues.items():
            for other, behind in self.queues.items():
                if queue and other != gpu and queue[0].key in [kernel.key for kernel in list(behind)[1:]]:
                    waits_for[gpu] = other
        for start in waits_for:
            path = [start]
            while (after := waits_for.get(path[-1])) is not None:
                if after in path:
                    return path[path.index(after) :]
                path.append(after)
        return []


class FakeGroup:
    """As torch's ProcessGroupNCCL of two. gpu, peer: of both ends"""

    def __init__(self, fabric: Fabric, gpu: str, peer: str, member: int) -> None:
        self.fabric, self.gpu, self.member = fabric, gpu, member
        self.pair = (gpu, peer) if member == 0 else (peer, gpu)
        self.numbers = {"send": 0, "recv": 0}

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Kernel:
        return self._launch("send", self.member, tensors[0])

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Kernel:
        return self._launch("recv", peer, tensors[0])

    def abort(self) -> None:
        self.fabric.abort(self.gpu, self.pair)

    def _launch(self, verb: str, direction: int, data: torch.Tensor) -> Kernel:
        self.numbers[verb] += 1
        return self.fabric.launch(Kernel(self.gpu, self.pair, direction, self.numbers[verb], data))


class Deaf(FakeGroup):
    """A group whose calls do not return until they are aborted."""

    def __init__(self) -> None:
        super().__init__(Fabric(), "rank 0", "A", 0)
        self.over = threading.Event()

    def _launch(self, verb: str, direction: int, data: torch.Tensor) -> Kernel:
        self.over.wait(WAIT_S)
        raise RuntimeError("aborted")

    def abort(self) -> None:
        self.over.set()


def group_of(fabric: Fabric, meeting: Meeting, kind: type[FakeGroup] = FakeGroup) -> FakeGroup:
    """The group of a meeting between ends whose names are those of their GPUs."""
    return kind(fabric, meeting.who, meeting.whom.partition(" at ")[0], meeting.member)


def nccl_channels(
    source: str,
    target: str,
    fabric: Fabric | None = None,
    locks: dict[str, TransferLocks] | None = None,
) -> tuple[NcclChannel, NcclChannel]:
    """Both ends of a channel between two GPUs, connected. locks: of each GPU; None: its own alone"""
    fabric, locks = fabric or Fabric(), defaultdict(TransferLocks) if locks is None else locks
    cpu, sockets = torch.device("cpu"), socket.socketpair()
    meetings = [
        Meeting("epoch-1", SOURCE, source, target, cpu, WAIT_S),
        Meeting("epoch-1", TARGET, target, source, cpu, WAIT_S),
    ]
    ends = [
        NcclChannel(group_of(fabric, meeting), None, joined, meeting, locks[meeting.who])
        for meeting, joined in zip(meetings, sockets, strict=True)
    ]
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(ends[TARGET].connect, WAIT_S)
        ends[SOURCE].connect(WAIT_S)
        other.result(WAIT_S)
    return ends[SOURCE], ends[TARGET]
