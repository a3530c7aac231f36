"""Where the two ends of a channel meet: a socket that listens for one caller, and is closed once that one has come.

      source                                                                       target
      ChannelListener, two new secrets ── offer, in the reply to `attach` ───────▸ connected(offer)
      accept ◂─────────────────────────── hello, the first secret ──────────────── connects
        └──────────────────────────────── answer, the second ────────────────────▸ checks it

The offer travels over the control line, which is encrypted and admits only holders of the run's keys. A stranger finds
the port, but has no secret and is refused. So is a process that listens in the place of the listener. At most
MOST_CALLERS wait to show their secret; a further one takes the place of the oldest.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Any, Literal

from asyncrl.errors import DeadlineError, WeightSyncError
from asyncrl.rpc.ports import ANY, first_free, numeric
from asyncrl.sync.channels.channel import Meeting

SECRET_BYTES = 32
MOST_CALLERS = 64
CREDENTIALS = struct.Struct("3i")
"""SO_PEERCRED: process, user, group."""
TIMEVAL = struct.Struct("ll")
"""SO_SNDTIMEO: seconds, microseconds."""

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""Seconds of silence, seconds between probes, probes: by these the kernel notices that the other machine is gone."""


class ChannelListener:
    """Listens from the start. `close` may come from another thread and wakes `accept`.

    host: TCP at that address of this machine, at one of `ports`; None: a Unix socket without a file, for processes of
    the same user. Raises OSError.
    """

    def __init__(self, host: str | None, ports: range = ANY) -> None:
        self._hello, self._answer = secrets.token_bytes(SECRET_BYTES), secrets.token_bytes(SECRET_BYTES)
        self._lock = threading.Lock()  # of the next two
        self._admitting = self._closed = False
        self._own_user = host is None
        address: Any
        if host is None:
            address = f"asyncrl-{secrets.token_hex(16)}"
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(f"\0{address}")  # Linux's abstract names: gone with the socket
            self._listener.listen(MOST_CALLERS)
        else:
            at = numeric(host)
            family = socket.AF_INET6 if ":" in at else socket.AF_INET
            self._listener = first_free(
                ports, lambda port: socket.create_server((at, port), family=family, backlog=MOST_CALLERS)
            )
            address = [host, self._listener.getsockname()[1]]
        self._listener.setblocking(False)
        self.offer = {"address": address, "hello": self._hello, "answer": self._answer}
        """For `connected`, at the other end."""

    def accept(self, meeting: Meeting) -> socket.socket:
        """The connection of the caller with the secret; closes the listener.

        Raises:
            DeadlineError: it did not come
            WeightSyncError: the listener was closed
        """
        with _errors_of(meeting):
            with self._lock:
                if self._closed:
                    raise OSError("it was closed here")
                self._admitting = True
            with self._listener:
                return _ready(self._first_admitted(time.monotonic() + meeting.deadline_s))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if not self._admitting:
                self._listener.close()
                return
        with suppress(OSError):  # wakes `accept`, which then closes it
            self._listener.shutdown(socket.SHUT_RDWR)

    def _first_admitted(self, deadline: float) -> socket.socket:
        callers: dict[int, _Caller] = {}  # the oldest first
        poll, entrance = select.poll(), self._listener.fileno()
        poll.register(entrance, select.POLLIN)
        try:
            while not self._closed:
                ready = [fd for fd, _ in poll.poll(1000 * max(0.0, deadline - time.monotonic()))]
                if not ready:
                    raise TimeoutError
                for fd in ready:
                    if fd == entrance:
                        self._let_in(callers, poll)
                    elif fd in callers and (admitted := self._verdict(callers[fd])) is not None:
                        poll.unregister(fd)
                        caller = callers.pop(fd)
                        if admitted:
                            return caller.socket
                        caller.socket.close()
        finally:
            for caller in callers.values():
                caller.socket.close()
        raise OSError("it was closed here")

    def _let_in(self, callers: dict[int, _Caller], poll: select.poll) -> None:
        try:
            caller, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            if self._closed:
                return
            raise
        if self._own_user and _user(caller) != os.getuid():
            caller.close()
            return
        caller.setblocking(False)
        if len(callers) == MOST_CALLERS:
            oldest = next(iter(callers))
            poll.unregister(oldest)
            callers.pop(oldest).socket.close()
        callers[caller.fileno()] = _Caller(caller)
        poll.register(caller, select.POLLIN)

    def _verdict(self, caller: _Caller) -> bool | None:
        """Whether the caller has sent the secret; None: too few bytes so far."""
        try:
            came = caller.socket.recv(SECRET_BYTES - len(caller.sent))
            caller.sent += came
            if compare_digest(bytes(caller.sent), self._hello):
                caller.socket.sendall(self._answer)
                return True
        except BlockingIOError:
            return None
        except OSError:
            return False
        return None if came and len(caller.sent) < SECRET_BYTES else False


@dataclass(slots=True)
class _Caller:
    """sent: what it has sent so far"""

    socket: socket.socket
    sent: bytearray = field(default_factory=bytearray)


def connected(kind: Literal["unix", "tcp"], offer: Mapping[str, Any], meeting: Meeting) -> socket.socket:
    """The other end of `ChannelListener.accept`. offer: the listener's, untouched

    Raises:
        DeadlineError: nobody answered
        WeightSyncError: there is no such listener, or another process answered
    """
    deadline, address = time.monotonic() + meeting.deadline_s, offer["address"]
    with _errors_of(meeting):
        joined = _unix_connection(address, deadline) if kind == "unix" else _tcp_connection(address, deadline)
        try:
            joined.settimeout(_seconds(deadline))
            joined.sendall(offer["hello"])
            answer = b""
            while len(answer) < SECRET_BYTES:
                joined.settimeout(_seconds(deadline))
                if not (came := joined.recv(SECRET_BYTES - len(answer))):
                    raise OSError("it broke off")
                answer += came
            if not compare_digest(answer, offer["answer"]):
                raise OSError("another process answered")
            return _ready(joined)
        except BaseException:
            joined.close()
            raise


def _tcp_connection(address: Sequence[Any], deadline: float) -> socket.socket:
    host, port = address
    return socket.create_connection((host, port), _seconds(deadline))


def _unix_connection(name: str, deadline: float) -> socket.socket:
    joined = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _connect_in_turn(joined, f"\0{name}", _seconds(deadline))
        if _user(joined) != os.getuid():
            raise OSError("the other end belongs to another user")
    except OSError:
        joined.close()
        raise
    return joined


def _connect_in_turn(joined: socket.socket, name: str, seconds: float) -> None:
    """Wait where others wait too. With a timeout of Python's, Linux refuses a caller beyond the listener's queue, which
    other users of the machine can fill. Raises TimeoutError."""
    whole = int(seconds)
    joined.setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIMEVAL.pack(whole, int(1e6 * (seconds - whole)))
    )
    try:
        joined.connect(name)
    except BlockingIOError as full:
        raise TimeoutError from full


def _ready(joined: socket.socket) -> socket.socket:
    if joined.family != socket.AF_UNIX:
        joined.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        joined.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):
                joined.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    joined.setblocking(False)
    return joined


@contextmanager
def _errors_of(meeting: Meeting) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        what = f"weight channel {meeting.name}"
        raise DeadlineError(meeting.who, meeting.whom, what, meeting.deadline_s) from error
    except OSError as error:
        raise WeightSyncError(
            f"{meeting.who}: no weight channel {meeting.name} to {meeting.whom}: {error}"
        ) from error


def _user(joined: socket.socket) -> int:
    packed = joined.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(packed)[1])


def _seconds(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
