"""A subscriber's connection to one learner rank, or to a relay: requests and, once attached, the channel of bytes.

hello ▸ attach (channel) ▸ ┌ pin v ▸ send v ▸ receive buckets ▸ acknowledged ┐
                           └─────────────── next version ────────────────────┘
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from asyncrl.device import accelerator
from asyncrl.device.streams import SideStream
from asyncrl.errors import AsyncRLError, DeadlineError, RefusedError, WeightSyncError, WireError
from asyncrl.rpc.client import RpcClient, RpcReply
from asyncrl.rpc.keys import ClientKeys
from asyncrl.rpc.message import Fields
from asyncrl.sync.channels.channel import TARGET, Channel, Meeting
from asyncrl.sync.channels.choose import connect, place_of
from asyncrl.sync.delta.delta_stream import announced, receive_deltas
from asyncrl.sync.layout.layout import ParamLayout, from_wire
from asyncrl.sync.plan.plan import SourcePlan, source_to_wire
from asyncrl.sync.stream.snapshot import SnapshotEvictedError
from asyncrl.sync.tensors.bucket import Buffers, receive_buckets
from asyncrl.sync.tensors.checksum import Checksum, ChecksumShare
from asyncrl.sync.tensors.shards import Shards
from asyncrl.types import Version

GRACE_S = 5.0
"""For a reply that a live publisher gives at once."""


class Hello(NamedTuple):
    """A learner rank, and what it holds."""

    rank: int
    world: int
    layout: dict[str, ParamLayout]


class Parent(NamedTuple):
    """A member with a relay."""

    who: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class _Session:
    """transfer_s: the longest that a transfer may take"""

    number: int
    channel: Channel
    source: SourcePlan
    staging: Shards
    buffers: Buffers
    stream: SideStream
    transfer_s: float


class PublisherLink:
    """Requests to a publisher, a method for each, and therefore more than in other classes.

    Not thread-safe: one thread at a time. After an error `drop` it; the next `attach` makes it new.
    """

    def __init__(
        self,
        endpoint: str,
        who: str,
        lineage: int,
        keys: ClientKeys | None,
        whom: str | None = None,
    ) -> None:
        self.endpoint, self.who, self.whom = endpoint, who, whom or endpoint
        self._lineage = lineage
        self._connect = partial(RpcClient, endpoint, who, "the publisher", WeightSyncError, keys)
        self._rpc = self._connect()
        self._session: _Session | None = None
        self.received_bytes = 0
        """Bytes of the last version that went over the channel."""

    def hello(self, seconds: float) -> Hello:
        """Raises DeadlineError, RefusedError("lineage")."""
        fields = self._call("hello", "a hello", seconds)
        hello = Hello(fields["rank"], fields["world"], from_wire(fields["layout"]))
        self.whom = f"learner rank {hello.rank} at {self.endpoint}"
        return hello

    def newest(self, newer_than: Version, wait_s: float) -> Version | None:
        """The newest version above `newer_than`; None if none came in `wait_s`."""
        what = f"word of a version above {newer_than}"
        found = self._call("newest", what, wait_s + GRACE_S, newer_than=newer_than, wait_s=wait_s)
        version: Version | None = found["version"]
        return version

    # Requests to rank 0 alone.

    def join(self, host: str, layout: str, bytes_: int, endpoint: str | None) -> None:
        """Become a member. `layout`: its key · bytes of a version · endpoint of the member's relay."""
        fields = {"host": host, "layout": layout, "bytes": bytes_, "endpoint": endpoint}
        self._call("join", "its membership", GRACE_S, **fields)

    def route(self, failed: str | None) -> Parent | None:
        """The parent to take the next version from; None: the learner's ranks. failed: the parent that did not deliver
        the last one. Raises RefusedError("member"): this one must join again.
        """
        parent = self._call("route", "a route for the next version", GRACE_S, failed=failed)["parent"]
        return None if parent is None else Parent(*parent)

    def held(self, version: Version) -> None:
        """Acknowledge a version: flipped and verified. Raises RefusedError("member")."""
        self._call("held", f"word that it may hold version {version}", GRACE_S, version=version)

    def turn(self, version: Version, ranks: int, wait_s: float) -> Fields:
        """The offer of a whole version to an engine of so many ranks (`broadcast/`), once it is its turn. Raises
        SnapshotEvictedError, WeightSyncError."""
        fields = self._call("turn", f"its turn with version {version}", wait_s, version=version, ranks=ranks)
        _check_sent(fields, f"version {version}", self.who, self.whom)
        return fields

    def leave(self) -> None:
        """Best effort: a member that just ends is fenced later."""
        self._request("leave")

    # Requests to any source of versions.

    def attach(self, source: SourcePlan, staging: Shards, meet_s: float, transfer_s: float) -> None:
        """Make the channel for `source` into `staging`, unless there is one.

        Args:
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
        offer = self._call("attach", "a channel", meet_s, **wanted)
        left_s = max(0.001, deadline - time.monotonic())
        meeting = Meeting(offer["channel"], TARGET, self.who, self.whom, staging.device, left_s)
        channel = connect(offer["backend"], offer["listener"], meeting)
        buffers = Buffers(source, staging, channel.device)
        stream = SideStream(staging.device)
        self._session = _Session(offer["session"], channel, source, staging, buffers, stream, transfer_s)

    def pin(self, version: Version, wait_s: float) -> bool:
        """Whether the source now holds the version for this subscriber; False: it is gone.

        Waits if the source has not got that far yet; DeadlineError if it does not in `wait_s`.
        """
        request = {"version": version, "wait_s": wait_s, "session": self._attached.number}
        fields = self._call("pin", f"a hold on version {version}", wait_s + GRACE_S, **request)
        if fields.get("late"):
            raise DeadlineError(self.who, self.whom, f"version {version}", wait_s)
        return bool(fields["pinned"])

    def receive(
        self, version: Version, base: Version | None, arrived: Callable[[int], None]
    ) -> ChecksumShare | None:
        """Fill the staging memory with the source's part of a pinned version. Returns the hash of what was sent.

        Args:
            base: the version that lies whole in the staging memory; the sender may send the changes since
            arrived: called for each bucket that lies there

        Raises:
            SnapshotEvictedError: the sender needed the memory for a newer version
            WeightSyncError: the transfer broke, or base and changes do not give the sender's version
            DeadlineError: it took too long
        """
        with self._attached.stream.entered():
            share = self._receive(self._attached, version, base, arrived)
            # Whoever flips, relays or hashes next may do so on any stream.
            accelerator.wait_for_stream(self._attached.staging.device)
        return share

    def _receive(
        self, session: _Session, version: Version, base: Version | None, arrived: Callable[[int], None]
    ) -> ChecksumShare | None:
        source, staging, channel, buffers = session.source, session.staging, session.channel, session.buffers
        deadline = time.monotonic() + session.transfer_s
        reply = self._request("send", version=version, base=base, session=session.number)
        what = f"version {version}"

        def seconds_left() -> float:
            return deadline - time.monotonic()

        try:
            sizes = announced(source, channel, seconds_left)
            if sizes is None:
                receive_buckets(source, staging, channel, buffers, seconds_left, arrived)
            else:
                receive_deltas(sizes, source, staging, channel, buffers, seconds_left, arrived)
        except WireError as error:
            raise WeightSyncError(f"{self.who}: {what} from {self.whom} cannot be read: {error}") from error
        except (DeadlineError, WeightSyncError) as error:
            self._explain(reply, what, error)
        fields = self._wait(reply, f"acknowledgement of {what}", seconds_left())
        _check_sent(fields, what, self.who, self.whom)
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
        """Best effort; the publisher ends the hold anyway when it needs the memory."""
        if self._session is not None:
            self._request("unpin", session=self._session.number)

    def alive(self) -> None:
        """Keep the session, if there is one, while nothing is taken. Best effort; does not wait."""
        if self._session is not None:
            self._request("alive", session=self._session.number)

    def drop(self) -> None:
        """Close the channel and the session."""
        if self._session is None:
            return
        session, self._session = self._session, None
        self._request("bye", session=session.number)
        session.channel.close()

    def close(self) -> None:
        self.drop()
        self._rpc.close()

    @property
    def _attached(self) -> _Session:
        if self._session is None:
            raise WeightSyncError(f"{self.who} is not attached to {self.whom}")
        return self._session

    def _request(self, kind: str, **fields: Any) -> RpcReply:
        return self._rpc.request(kind, {**fields, "who": self.who, "lineage": self._lineage})

    def _wait(self, reply: RpcReply, what: str, seconds: float) -> dict[str, Any]:
        """Raises WeightSyncError where the connection was cut; the next request is made on a new one."""
        try:
            return self._rpc.wait(reply, what, seconds)
        except WeightSyncError:
            self._rpc.close()
            self._rpc = self._connect()
            raise

    def _call(self, kind: str, what: str, seconds: float, **fields: Any) -> dict[str, Any]:
        return self._wait(self._request(kind, **fields), what, seconds)

    def _explain(self, reply: RpcReply, what: str, broken: AsyncRLError) -> None:
        """A broken channel is a symptom: the publisher's reply, if one comes, has the reason."""
        with contextlib.suppress(DeadlineError, RefusedError):
            _check_sent(self._wait(reply, what, GRACE_S), what, self.who, self.whom)
        raise WeightSyncError(f"{self.who}: {what} did not arrive from {self.whom}: {broken}") from broken


def _check_sent(fields: dict[str, Any], what: str, who: str, whom: str) -> None:
    if fields["status"] == "gone":
        raise SnapshotEvictedError(fields["detail"])
    if fields["status"] not in ("sent", "offered"):
        raise WeightSyncError(f"{who}: {what} was not sent by {whom}: {fields['detail']}")
