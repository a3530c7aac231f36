"""Channels over NCCL: a communicator for each pair. On each device one transfer runs at a time (`transfer_locks.py`).

      meet ─▸ PairStore: NCCL's id ─▸ communicator ─▸ one byte each way: it carries      by the meeting's deadline
      send, recv: offered ─▸ wait: launched once both ends hold their locks, then polled on the host
      broken, late, closed ─▸ abort: ends the kernels of this pair, and frees its communicator

The connection at which the two have met stays: its bytes OFFER, TAKE and GO order the launches, and it hangs up when
the other end dies.

The communicator works without blocking calls, as NCCL demands of those that may be aborted, and torch's group has no
watchdog: that thread would end the whole process when one generator dies, with the training in it. torch reads the
variable for this when a group is made, so that it is set for that moment only (`_without_watchdog`). A call into NCCL
that does not return costs the thread that is in it (`_within`), not the sender and not the process.

This has not run on a GPU yet; a stand-in for torch's group runs it in the tests.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from asyncrl.device.streams import SideStream
from asyncrl.errors import DeadlineError, WeightSyncError
from asyncrl.sync.channels.channel import SOURCE, ChannelEnd, Meeting, Transfer, named
from asyncrl.sync.channels.pair_store import PairStore
from asyncrl.sync.channels.transfer_locks import TransferLocks, transfer_locks

MOST_CTAS = 16
"""Blocks, and so multiprocessors, that a transfer keeps busy. Unmeasured: a fifth of the smallest data-centre GPU."""

ABORT_S = 10.0
"""How long the end of a communicator is waited for; NCCL may go on with it."""

POLL_S = 0.0001
LOOK_S = 0.01
"""Between two looks at a transfer, and at a call into NCCL."""

GONE_S = 0.5
"""How long a transfer may go on once the other end has hung up: that may be done with it, and have closed."""

LAUNCHED_S, SLOWEST_BYTES_S = 10.0, 50e6
"""A transfer that both ends have begun may take so long, and as long as its bytes take at this speed: a peer that
stands still keeps others from the lock."""

OFFER, TAKE, GO = b"O", b"T", b"G"

BLOCKING_WAIT, NONBLOCKING_TIMEOUT = "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_NONBLOCKING_TIMEOUT"

HUNG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR

_environment = threading.Lock()
_users_own = BLOCKING_WAIT in os.environ

Verb = Literal["send", "recv"]
VERBS: tuple[Verb, Verb] = ("send", "recv")

Transferring = Callable[[Verb, torch.Tensor, int], None]


def make_nccl_channel(joined: socket.socket, meeting: Meeting) -> NcclChannel:
    """A communicator over a connection; waits for the other member, and for a byte each way.

    Raises:
        DeadlineError: the other member did not come, or NCCL did not connect in time
        WeightSyncError: any other failure
    """
    begun = time.monotonic()
    channel = None
    try:
        store = PairStore(joined, meeting.deadline_s)
        group = _new_group(store, meeting)
        channel = NcclChannel(group, store, joined, meeting, transfer_locks(meeting.device))
        channel.connect(meeting.deadline_s)
        return channel
    except (AttributeError, RuntimeError, OSError, ValueError) as error:
        if channel is not None:
            channel.close()
        joined.close()
        if isinstance(error, TimeoutError) or time.monotonic() - begun >= meeting.deadline_s:
            what = f"weight channel {meeting.name}"
            raise DeadlineError(meeting.who, meeting.whom, what, meeting.deadline_s) from error
        raise WeightSyncError(
            f"{meeting.who}: no nccl channel {meeting.name} to {meeting.whom}: {error}"
        ) from error


def _new_group(store: PairStore, meeting: Meeting) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=ABORT_S)  # its `abort` waits so long at most
    options.config.blocking = 0
    options.config.max_ctas = MOST_CTAS
    with _without_watchdog(meeting.deadline_s):
        return dist.ProcessGroupNCCL(store, meeting.member, 2, options)


@contextmanager
def _without_watchdog(deadline_s: float) -> Iterator[None]:
    """A group that is made in here starts no thread. A value of the user stays.

    The timeout of calls that do not block is read once in a process, at the first of them; training has none.
    """
    with _environment:
        os.environ.setdefault(NONBLOCKING_TIMEOUT, str(math.ceil(deadline_s)))
        if not _users_own:
            os.environ[BLOCKING_WAIT] = "1"
        try:
            yield
        finally:
            if not _users_own:  # replaced, not removed: to remove it moves what other threads may be reading
                os.environ[BLOCKING_WAIT] = "0"


def _within(seconds: float, call: Callable[[], None], gone: Callable[[], bool] = lambda: False) -> None:
    """Run a call in a thread that is given up when the time is over, or the other end is gone.

    Raises TimeoutError and OSError for these, and the errors of the call."""
    result: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(None)

    threading.Thread(target=run, name="a call into NCCL", daemon=True).start()
    deadline = time.monotonic() + seconds
    while not wait([result], LOOK_S).done:
        if gone():
            raise OSError("the other end closed it, or died")
        if time.monotonic() > deadline:
            raise TimeoutError(f"NCCL did not return within {seconds:.1f} s")
    result.result()


@dataclass(frozen=True, slots=True)
class _NcclTransfer:
    channel: NcclChannel
    verb: Verb
    data: torch.Tensor
    number: int

    def wait(self, seconds: float) -> None:
        self.channel.finish(self.verb, self.data, self.number, seconds)


class NcclChannel(ChannelEnd):
    """A `Channel` over torch's NCCL group of two. locks: of its device, shared with all channels there"""

    def __init__(
        self, group: Any, store: Any, joined: socket.socket, meeting: Meeting, locks: TransferLocks
    ) -> None:
        super().__init__(meeting.who, meeting.whom, meeting.device)
        self._group: Any = group
        self._store = store  # NCCL calls it while it connects, and torch does not keep the Python object
        self._socket, self._member, self._locks = joined, meeting.member, locks
        self._begun = {"send": 0, "recv": 0}
        self._came: Counter[bytes] = Counter()  # words of the other end
        self._lock = threading.Lock()  # of calls into NCCL

    def connect(self, seconds: float) -> None:
        """Make the communicator, and prove that it carries a byte each way.

        Raises TimeoutError, OSError, RuntimeError."""
        deadline, stream = time.monotonic() + seconds, SideStream(self.device)
        with stream.entered():
            byte = torch.zeros(1, dtype=torch.uint8, device=self.device)

        def transfer(verb: Verb, data: torch.Tensor, number: int) -> None:
            def call() -> None:
                with stream.entered():
                    self._transfer(verb, data, number, deadline)

            _within(deadline - time.monotonic(), call, self._hung_up)

        for verb in VERBS if self._member == SOURCE else VERBS[::-1]:
            self._begun[verb] += 1
            if verb == "send":
                self._post(OFFER)
            self._in_order(verb, byte, self._begun[verb], deadline, transfer)
        self._socket.setblocking(False)

    def send(self, data: torch.Tensor) -> Transfer:
        self.check()
        try:
            self._post(OFFER)
        except OSError as error:
            raise self.breaks(error) from error
        return self._begin("send", data)

    def recv(self, into: torch.Tensor) -> Transfer:
        self.check()
        return self._begin("recv", into)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self.ends()
        with suppress(OSError):  # wakes a thread that waits here, which then lets go of the lock
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._lock.acquire(timeout=ABORT_S):
            try:
                self._abort()
            finally:
                self._lock.release()
        self._socket.close()

    def finish(self, verb: Verb, data: torch.Tensor, number: int, seconds: float) -> None:
        """Raises as `Transfer.wait`."""
        deadline, what = time.monotonic() + seconds, named(verb, data)
        longest_s = LAUNCHED_S + data.nbytes / SLOWEST_BYTES_S

        def transfer(verb: Verb, data: torch.Tensor, number: int) -> None:
            self._transfer(verb, data, number, min(deadline, time.monotonic() + longest_s))

        with self._lock:
            self.check()
            try:
                self._in_order(verb, data, number, deadline, transfer)
            except TimeoutError as error:
                self._abort()
                raise self.late(what, seconds) from error
            except (RuntimeError, OSError) as error:
                self._abort()
                raise self.breaks(error) from error

    def _begin(self, verb: Verb, data: torch.Tensor) -> Transfer:
        self._begun[verb] += 1
        return _NcclTransfer(self, verb, data, self._begun[verb])

    # These raise TimeoutError, OSError and RuntimeError.

    def _in_order(
        self, verb: Verb, data: torch.Tensor, number: int, deadline: float, transfer: Transferring
    ) -> None:
        """Make the transfer once both ends hold their locks."""
        if verb == "send":
            self._until(TAKE, number, deadline)
            with self._locks.sends.held(deadline - time.monotonic()):
                self._post(GO)
                transfer(verb, data, number)
        else:
            self._until(OFFER, number, deadline)
            with self._locks.receives.held(deadline - time.monotonic()):
                self._post(TAKE)
                self._until(GO, number, deadline)
                transfer(verb, data, number)

    def _post(self, word: bytes) -> None:
        self._socket.send(word)

    def _until(self, word: bytes, number: int, deadline: float) -> None:
        """Wait for that many such words of the other end, byte by byte: the store's entries may follow."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while self._came[word] < number:
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            came = self._socket.recv(1)
            if not came:
                raise OSError(f"{self.whom} closed it, or died")
            self._came[came] += 1

    def _transfer(self, verb: Verb, data: torch.Tensor, number: int, deadline: float) -> None:
        """Launch it and wait on the host. After an error the kernel may still run."""
        work = getattr(self._group, verb)([data], 1 - self._member, number)
        gone_at: float | None = None
        while not work.is_completed():
            now = time.monotonic()
            if gone_at is None and self._hung_up():
                gone_at = now
            if gone_at is not None and now > gone_at + GONE_S:
                raise OSError(f"{self.whom} closed it, or died")
            if now > deadline:
                raise TimeoutError
            time.sleep(POLL_S)
        work.wait()  # raises its error; the wait that it adds to this thread's stream is for what has been done

    def _hung_up(self) -> bool:
        poll = select.poll()
        poll.register(self._socket, HUNG_UP)
        return bool(poll.poll(0))

    def _abort(self) -> None:
        """Once. With the lock held."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError, TimeoutError):
                _within(ABORT_S, group.abort)
