"""Channels over gloo: a raw process group of two, outside any default group. `auto` never chooses it.

The learner rank is member 0, the generator member 1. They exchange gloo's addresses over the connection at which they
have met (`listener.py`). Each session of a generator has a group of its own, which ends with it: a generator that fails
touches no other.

gloo then opens sockets of its own, which no secret protects: a private network is needed. It serves whoever calls
first, so that the ends prove themselves to each other before they send weights.
"""

from __future__ import annotations

import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from hmac import compare_digest
from typing import Any, Literal

import torch
import torch.distributed as dist

from asyncrl.errors import DeadlineError, WeightSyncError
from asyncrl.sync.channels.channel import ChannelEnd, Meeting, Transfer, named
from asyncrl.sync.channels.pair_store import PairStore

PROOF_BYTES = 32


def make_gloo_channel(joined: socket.socket, meeting: Meeting) -> GlooChannel:
    """A group over a connection; waits for the other member.

    Raises:
        DeadlineError: the other member did not come
        WeightSyncError: any other failure
    """
    begun, who, whom = time.monotonic(), meeting.who, meeting.whom
    try:
        store = PairStore(joined, meeting.deadline_s)
        return GlooChannel(_group(store, joined, meeting), store, joined, meeting)
    except (AttributeError, RuntimeError, OSError) as error:
        joined.close()
        if time.monotonic() - begun >= meeting.deadline_s:
            raise DeadlineError(who, whom, f"weight channel {meeting.name}", meeting.deadline_s) from error
        raise WeightSyncError(f"{who}: no gloo channel {meeting.name} to {whom}: {error}") from error


def _group(store: PairStore, joined: socket.socket, meeting: Meeting) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=meeting.deadline_s)
    own_address = joined.getsockname()[0]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
    group = dist.ProcessGroupGloo(store, meeting.member, 2, options)
    _prove(group, store, meeting)
    return group


def _prove(group: Any, store: PairStore, meeting: Meeting) -> None:
    """Each end sends over the group the bytes that it got over the connection, because gloo serves any first caller.
    Raises ConnectionError for a stranger, before any weights leave."""
    own, peer, within = (
        secrets.token_bytes(PROOF_BYTES),
        1 - meeting.member,
        timedelta(seconds=meeting.deadline_s),
    )
    store.set(f"proof/{meeting.member}", own)
    told = torch.frombuffer(bytearray(store.get(f"proof/{peer}")), dtype=torch.uint8)
    came = torch.zeros(PROOF_BYTES, dtype=torch.uint8)
    leaving = group.send([told], peer, 0)
    group.recv([came], peer, 0).wait(within)
    leaving.wait(within)
    if not compare_digest(came.numpy().tobytes(), own):
        raise ConnectionError("another process has taken its place")


@dataclass(frozen=True, slots=True)
class _GlooTransfer:
    channel: GlooChannel
    work: Any  # torch's Work
    what: str

    def wait(self, seconds: float) -> None:
        begun = time.monotonic()
        try:
            self.work.wait(timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:
            if time.monotonic() - begun >= seconds:
                raise self.channel.late(self.what, seconds) from error
            raise self.channel.breaks(error) from error


class GlooChannel(ChannelEnd):
    """A `Channel` over gloo's group of two."""

    def __init__(self, group: Any, store: PairStore, joined: socket.socket, meeting: Meeting) -> None:
        super().__init__(meeting.who, meeting.whom, torch.device("cpu"))
        self._group: Any = group
        self._store = store  # torch does not keep the Python object
        self._socket, self._peer = joined, 1 - meeting.member
        self._sent = self._received = 0

    def send(self, data: torch.Tensor) -> Transfer:
        self._sent += 1
        return self._begin("send", data, self._sent)

    def recv(self, into: torch.Tensor) -> Transfer:
        self._received += 1
        return self._begin("recv", into, self._received)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self.ends()
        # The group's destructor closes its connections once the last transfer lets go of it.
        self._group = None
        self._socket.close()

    def _begin(self, verb: Literal["send", "recv"], data: torch.Tensor, tag: int) -> Transfer:
        self.check()
        try:
            work = getattr(self._group, verb)([data], self._peer, tag)
        except (RuntimeError, OSError) as error:
            raise self.breaks(error) from error
        return _GlooTransfer(self, work, named(verb, data))
