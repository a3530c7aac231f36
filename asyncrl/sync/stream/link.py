"""A subscriber's line to one learner rank, or to a relay: control messages and, once attached, the channel of bytes.

hello ▸ attach (channel) ▸ ┌ pin v ▸ send v ▸ receive buckets ▸ acknowledged ┐
                           └─────────────── next version ────────────────────┘
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import zmq

from asyncrl.errors import AsyncRLError, DeadlineError, RefusedError, WeightSyncError, WireError
from asyncrl.sync.channels.channels import open_channel, place_of
from asyncrl.sync.channels.torch_transport import TARGET, join_store, own_address
from asyncrl.sync.channels.transport import Channel
from asyncrl.sync.delta.delta_stream import announced, receive_deltas
from asyncrl.sync.layout.layout import ParamLayout, from_wire
from asyncrl.sync.plan.plan import SourcePlan, source_to_wire
from asyncrl.sync.stream.control import ControlClient, SocketKeys
from asyncrl.sync.stream.snapshot import SnapshotEvictedError
from asyncrl.sync.tensors.bucket import Buffers, Shards, receive_buckets
from asyncrl.sync.tensors.checksum import Checksum, ChecksumShare
from asyncrl.types import Version

GRACE_S = 5.0
"""For an answer that a live publisher gives at once."""


@dataclass(frozen=True, slots=True)
class Hello:
    rank: int
    world: int
    lineage: int
    layout: dict[str, ParamLayout]


class Parent(NamedTuple):
    """A member that hands versions on."""

    who: str
    endpoint: str


@dataclass(slots=True)
class _Session:
    number: int
    channel: Channel
    buffers: Buffers


class PublisherLink:
    """Not thread-safe: one thread at a time. After an error `drop` it; the next `attach` makes it new."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        who: str,
        lineage: int | None,
        keys: SocketKeys | None = None,
        whom: str | None = None,
    ) -> None:
        self.who, self.whom = who, whom or endpoint
        self.lineage = lineage
        self._control = ControlClient(context, endpoint, who, keys)
        self._session: _Session | None = None
        self.received_bytes = 0
        """Of the last version: what went over the channel."""

    @property
    def endpoint(self) -> str:
        return self._control.endpoint

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

    # To rank 0 alone.

    def join(self, host: str, layout: str, bytes_: int, endpoint: str | None) -> None:
        """Become a member. `layout`: its key · bytes of a version · endpoint of our relay."""
        fields = {"host": host, "layout": layout, "bytes": bytes_, "endpoint": endpoint}
        self._ask("join", fields, "its membership", GRACE_S)

    def route(self, failed: str | None) -> Parent | None:
        """From whom to take the next version; None: the learner's ranks. `failed`: the parent that did not deliver.

        Raises RefusedError("member") for one that must join again.
        """
        parent = self._ask("route", {"failed": failed}, "a route", GRACE_S)["parent"]
        return None if parent is None else Parent(*parent)

    def held(self, version: Version) -> None:
        """Acknowledge a version: flipped and verified. Raises RefusedError("member")."""
        self._ask("held", {"version": version}, f"word that it may hold version {version}", GRACE_S)

    def leave(self) -> None:
        """Best effort: who just ends is fenced later."""
        with contextlib.suppress(AsyncRLError):
            self._control.begin("leave", {"who": self.who, "lineage": self.lineage})

    # To whoever hands a version on.

    def attach(self, source: SourcePlan, staging: Shards, meet_s: float, transfer_s: float) -> None:
        """Make the channel, unless there is one.

        Args:
            source: what comes through it
            staging: where that belongs
            meet_s: the longest wait for the other side
            transfer_s: the longest that a transfer over the channel may take

        Raises:
            DeadlineError: the other side did not come in time
            WeightSyncError, RefusedError: there is no channel
        """
        if self._session is not None:
            return
        deadline = time.monotonic() + meet_s
        wanted = {"plan": source_to_wire(source), "place": place_of(staging.device).to_wire()}
        offer = self._ask("attach", wanted, "a channel", meet_s)
        store = join_store(offer["host"], offer["port"], max(0.001, deadline - time.monotonic()))
        channel = open_channel(
            offer["backend"],
            store,
            offer["channel"],
            TARGET,
            who=self.who,
            whom=self.whom,
            own_host=own_address(offer["host"], offer["port"]),
            device=staging.device,
            deadline_s=max(0.001, deadline - time.monotonic()),
            transfer_s=transfer_s,
        )
        self._session = _Session(offer["session"], channel, Buffers(source, staging, channel.device))

    def pin(self, version: Version, wait_s: float) -> bool:
        """Whether this one now holds the version for us; False: it is gone.

        Waits when it has not got that far yet; DeadlineError when it does not in `wait_s`.
        """
        request = {"version": version, "wait_s": wait_s, "session": self._attached.number}
        fields = self._ask("pin", request, f"a hold on version {version}", wait_s + GRACE_S)
        if fields.get("late"):
            raise DeadlineError(self.who, self.whom, f"version {version}", wait_s)
        return bool(fields["pinned"])

    def receive(
        self,
        version: Version,
        source: SourcePlan,
        staging: Shards,
        deadline_s: float,
        arrived: Callable[[int], None] = lambda index: None,
        base: Version | None = None,
    ) -> ChecksumShare | None:
        """Fill the staging memory with this one's part of a pinned version; returns the hash of what was sent.

        `base` is the version that lies whole in the staging memory: the sender may answer with what changed since.
        Calls `arrived` for each bucket that lies there. Raises TakenBackError when the learner wanted its snapshot
        back, WeightSyncError (also when the changes do not give what the sender has) and DeadlineError.
        """
        session, deadline = self._attached, time.monotonic() + deadline_s
        if staging.device.type == "cuda":
            torch.cuda.set_device(staging.device)
        request = {
            "version": version,
            "base": base,
            "session": session.number,
            "who": self.who,
            "lineage": self.lineage,
        }
        number = self._control.begin("send", request)
        what = f"version {version}"

        def seconds_left() -> float:
            return deadline - time.monotonic()

        channel, buffers = session.channel, session.buffers
        try:
            sizes = announced(source, channel, seconds_left)
            if sizes is None:
                receive_buckets(source, staging, channel, buffers, seconds_left, arrived)
            else:
                receive_deltas(sizes, source, staging, channel, buffers, seconds_left, arrived)
        except WireError as error:
            raise WeightSyncError(f"{self.who}: {what} from {self.whom} cannot be read: {error}") from error
        except (DeadlineError, WeightSyncError) as error:
            self._explain(number, what, error)
        fields = self._control.finish(number, f"acknowledgement of {what}", max(seconds_left(), 0.0))
        self._check(fields, what)
        self.received_bytes = fields["bytes"]
        share = ChecksumShare.from_wire(fields["share"])
        if (
            sizes is not None
            and share is not None
            and not Checksum(share, tuple(source.pieces)).holds(staging)
        ):
            raise WeightSyncError(
                f"{self.who}: version {base} with the changes from {self.whom} is not its version {version}"
            )
        return share

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
            raise SnapshotEvictedError(fields["detail"])
        if fields["status"] != "sent":
            raise WeightSyncError(f"{self.who}: {what} was not sent by {self.whom}: {fields['detail']}")
