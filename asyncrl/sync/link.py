"""A subscriber's line to one learner rank: control messages and, once attached, the channel of bytes.

hello ▸ attach (channel) ▸ ┌ pin v ▸ send v ▸ receive buckets ▸ acknowledged ┐
                           └─────────────── next version ────────────────────┘
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import torch
import zmq

from asyncrl.errors import AsyncRLError, DeadlineError, RefusedError, WeightSyncError
from asyncrl.sync.bucket import Buffers, Shards, receive_buckets
from asyncrl.sync.control import ControlClient
from asyncrl.sync.layout import ParamLayout, from_wire
from asyncrl.sync.plan import SourcePlan, source_to_wire
from asyncrl.sync.snapshot import TakenBackError
from asyncrl.sync.torch_transport import TARGET, join_store, make_channel, own_address
from asyncrl.sync.transport import Channel
from asyncrl.types import Version

GRACE_S = 5.0
"""For an answer that a live publisher gives at once."""


@dataclass(frozen=True, slots=True)
class Hello:
    rank: int
    world: int
    lineage: int
    layout: dict[str, ParamLayout]


@dataclass(slots=True)
class _Session:
    number: int
    channel: Channel
    buffers: Buffers


class Link:
    """Not thread-safe: one thread at a time. After an error `drop` it; the next `attach` makes it new."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, who: str, lineage: int | None
    ) -> None:
        self.who, self.whom = who, endpoint
        self.lineage = lineage
        self._control = ControlClient(context, endpoint, who)
        self._session: _Session | None = None

    def hello(self, seconds: float) -> Hello:
        """Fixes the lineage if it was not given. Raises DeadlineError, RefusedError("lineage")."""
        fields = self._ask("hello", {}, "a hello", seconds)
        hello = Hello(fields["rank"], fields["world"], fields["lineage"], from_wire(fields["layout"]))
        self.lineage = hello.lineage
        self.whom = f"learner rank {hello.rank} at {self._control.endpoint}"
        return hello

    def newest(self, newer_than: Version, wait_s: float) -> Version | None:
        """The newest version above `newer_than`; None when none came in `wait_s`."""
        request = {"newer_than": newer_than, "wait_s": wait_s}
        version: Version | None = self._ask(
            "newest", request, f"word of a version above {newer_than}", wait_s + GRACE_S
        )["version"]
        return version

    def attach(self, source: SourcePlan, staging: Shards, deadline_s: float) -> None:
        """Make the channel, unless there is one."""
        if self._session is not None:
            return
        deadline = time.monotonic() + deadline_s
        offer = self._ask("attach", {"plan": source_to_wire(source)}, "a channel", deadline_s)
        store = join_store(offer["host"], offer["port"], deadline_s)
        channel = make_channel(
            offer["backend"],
            store,
            offer["channel"],
            TARGET,
            who=self.who,
            whom=self.whom,
            own_host=own_address(offer["host"], offer["port"]),
            device=staging.device,
            deadline_s=max(0.001, deadline - time.monotonic()),
        )
        self._session = _Session(offer["session"], channel, Buffers(source, staging, channel.device))

    def pin(self, version: Version, wait_s: float) -> bool:
        """Whether this rank now holds the version for us; waits when the rank has not published it yet."""
        request = {"version": version, "wait_s": wait_s, "session": self._attached.number}
        fields = self._ask("pin", request, f"a hold on version {version}", wait_s + GRACE_S)
        return bool(fields["pinned"])

    def receive(self, version: Version, source: SourcePlan, staging: Shards, deadline_s: float) -> int | None:
        """Fill the staging memory with this rank's part of a pinned version; returns the hash of what was
        sent.

        Raises TakenBackError when the learner wanted its snapshot back, WeightSyncError and DeadlineError.
        """
        session, deadline = self._attached, time.monotonic() + deadline_s
        if staging.device.type == "cuda":
            torch.cuda.set_device(staging.device)
        request = {"version": version, "session": session.number, "who": self.who, "lineage": self.lineage}
        number = self._control.begin("send", request)
        what = f"version {version}"
        try:
            receive_buckets(
                source, staging, session.channel, session.buffers, lambda: deadline - time.monotonic()
            )
        except (DeadlineError, WeightSyncError) as error:
            self._explain(number, what, error)
        fields = self._control.finish(
            number, f"acknowledgement of {what}", max(deadline - time.monotonic(), 0.0)
        )
        self._check(fields, what)
        digest: int | None = fields["digest"]
        return digest

    def unpin(self) -> None:
        """Best effort; the publisher forgets the hold anyway when it wants the memory."""
        if self._session is not None:
            request = {"session": self._session.number, "who": self.who, "lineage": self.lineage}
            with contextlib.suppress(WeightSyncError):
                self._control.begin("unpin", request)

    def drop(self) -> None:
        """Close the channel and the session."""
        if self._session is None:
            return
        session, self._session = self._session, None
        with contextlib.suppress(AsyncRLError):
            self._control.begin("bye", {"session": session.number, "lineage": self.lineage})
        session.channel.close()

    def close(self) -> None:
        self.drop()
        self._control.close()

    @property
    def _attached(self) -> _Session:
        if self._session is None:
            raise WeightSyncError(f"{self.who} is not attached to {self.whom}")
        return self._session

    def _ask(self, kind: str, fields: dict[str, Any], what: str, seconds: float) -> dict[str, Any]:
        return self._control.request(
            kind, {**fields, "who": self.who, "lineage": self.lineage}, what, seconds
        )

    def _explain(self, number: int, what: str, broken: AsyncRLError) -> None:
        """A broken channel is a symptom: the publisher's answer, if one comes, says what happened."""
        with contextlib.suppress(DeadlineError, RefusedError):
            self._check(self._control.finish(number, what, GRACE_S), what)
        raise WeightSyncError(f"{self.who}: {what} did not arrive from {self.whom}: {broken}") from broken

    def _check(self, fields: dict[str, Any], what: str) -> None:
        if fields["status"] == "gone":
            raise TakenBackError(fields["detail"])
        if fields["status"] != "sent":
            raise WeightSyncError(f"{self.who}: {what} was not sent by {self.whom}: {fields['detail']}")
