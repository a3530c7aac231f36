"""The learner's end of the weight stream: one publisher per rank serves its shards to every generator.

      trainer ── publish(v) ──▸ snapshot (the only pause) ──▸ wakes parked requests
                                      │ pinned by
      RPC thread     ◂── newest? pin v, send v ──  generators      never blocks
      sender threads ── buckets ──▸ one generator each             wait for that generator alone

Generators pull. They request the newest version and its route from rank 0; each rank that the generator's plan needs
pins it, sends its part and acknowledges with a hash of what it sent. Once flipped and verified, the generator reports
the version that it holds. No process gathers the model, and the trainer waits for no generator.
"""

from __future__ import annotations

import atexit
import logging
import threading
from typing import Any

from asyncrl.config.schema import SyncConfig
from asyncrl.device.streams import SideStream
from asyncrl.errors import RefusedError, WireError
from asyncrl.rpc.keys import ClientKeys
from asyncrl.rpc.message import Fields
from asyncrl.rpc.server import RpcRequest
from asyncrl.sync.channels.addresses import LOOPBACK
from asyncrl.sync.channels.choose import place_of
from asyncrl.sync.delta.delta_chain import DeltaChain
from asyncrl.sync.delta.delta_stream import Deltas
from asyncrl.sync.delta.link_speed import LinkSpeed
from asyncrl.sync.layout.layout import to_wire
from asyncrl.sync.plan.plan import SourcePlan, source_from_wire
from asyncrl.sync.plan.tree import Links, Member
from asyncrl.sync.stream.membership import Joined, Membership
from asyncrl.sync.stream.snapshot import Pin, PublishReport, SnapshotMemory
from asyncrl.sync.stream.version_server import Handler, VersionServer
from asyncrl.sync.tensors.checksum import ChecksumShare
from asyncrl.sync.tensors.shards import LiveShards
from asyncrl.telemetry import tracing
from asyncrl.types import Version

LONGEST_TEXT = 512

log = logging.getLogger(__name__)


class SnapshotSource(SnapshotMemory):
    """The snapshots of a rank as a `VersionSource`, with the changes between them."""

    def __init__(self, rank: int, live: LiveShards, config: SyncConfig) -> None:
        super().__init__(live, config.snapshots, config.snapshot_device == "host")
        self._hashing = SideStream(live.device)  # used with `_share_lock` held
        self._rank, self._config = rank, config
        self._chain: DeltaChain | None = None
        if config.delta != "never" and config.snapshots == 2:
            most_bytes = int(config.delta_share * self.bytes)
            self._chain = DeltaChain(f"learner rank {rank}", live.layout, most_bytes, self.shards_of)
        self._shares: dict[tuple[Version, SourcePlan], ChecksumShare] = {}
        self._share_lock = threading.Lock()

    def take(self, version: Version) -> PublishReport:
        report = super().take(version)
        if self._chain is not None:
            self._chain.published(version)
        return report

    def close(self) -> None:
        if self._chain is not None:
            self._chain.close()

    def requested_plan(self, wire: Any) -> SourcePlan:
        return source_from_wire(wire, self._rank, self.live.layout)

    def ready(self, pin: Pin, bucket: int, seconds: float) -> None:
        """A snapshot is whole before it can be pinned."""

    def share(self, pin: Pin, source: SourcePlan, seconds: float) -> ChecksumShare | None:
        """Computed once for all generators of the same plan."""
        if not self._config.verify:
            return None
        key = (pin.version, source)
        with self._share_lock, self._hashing.entered():
            if key not in self._shares:
                self._shares = {k: d for k, d in self._shares.items() if k[0] >= pin.version - 1}
                self._shares[key] = ChecksumShare.of(source.pieces, self.shards(pin))
            return self._shares[key]

    def deltas(
        self, pin: Pin, base: Version | None, source: SourcePlan, speed: LinkSpeed, seconds: float
    ) -> Deltas | None:
        if self._chain is None or not (speed.is_slow or self._config.delta == "always"):
            return None
        return self._chain.find(
            base,
            pin.version,
            source,
            seconds,
            deflated=speed.is_very_slow,
            still_wanted=lambda: self.moved(pin),
        )


class RankPublisher:
    """One learner rank's end of the stream, however versions travel. endpoint: where generators find it."""

    endpoint: str

    def __init__(
        self, rank: int, world: int, lineage: int, config: SyncConfig, snapshots: SnapshotMemory
    ) -> None:
        self.rank, self.world, self.lineage = rank, world, lineage
        self.name = f"learner rank {rank}"
        self._config, self._snapshots = config, snapshots

    def publish(self, version: Version) -> PublishReport:
        """Copy the live shards and return; generators take the copy from then on. Versions must rise."""
        raise NotImplementedError

    def stats(self) -> dict[str, float]:
        """Counts since the start, and values of now."""
        raise NotImplementedError

    def close(self, wait_s: float = 0.0) -> None:
        """Let transfers in flight end, at most `wait_s`, then stop. May be called again."""
        raise NotImplementedError


class Publisher(RankPublisher):
    """Serves this rank's live shards to any number of subscribers.

    lineage: a subscriber of another one is refused by name · keys: that subscribers must hold too
    """

    def __init__(
        self,
        rank: int,
        world: int,
        live: LiveShards,
        config: SyncConfig,
        lineage: int,
        keys: ClientKeys | None = None,
    ) -> None:
        self._source, self._keys = SnapshotSource(rank, live, config), keys
        super().__init__(rank, world, lineage, config, self._source)
        self._members = Membership(
            place_of(self._source.device).host,
            config.bucket_bytes,
            Links(
                learner=1e9 * world * config.network_gb_s,
                member=1e9 * config.network_gb_s,
                local=1e9 * config.local_gb_s,
                hop_s=config.hop_ms / 1e3,
            ),
            config.fanout,
            config.silence_s,
        )
        at_rank_0: dict[str, Handler] = {
            "newest": self._newest,
            "join": self._join,
            "route": self._route,
            "held": self._held,
            "leave": self._leave,
        }
        self._server = VersionServer(
            self.name,
            self._source,
            config,
            lineage=lineage,
            host=config.host or LOOPBACK,
            handlers={"hello": self._hello, **(at_rank_0 if rank == 0 else {})},
            keys=keys,
            on_wake=self._fence,
            on_request=self._members.seen,
        )
        self.endpoint = self._server.endpoint
        # A thread that is inside torch while the interpreter is taken down aborts the process.
        atexit.register(self.close)

    def publish(self, version: Version) -> PublishReport:
        report = self._source.take(version)
        self._server.server.wake()
        return report

    def stats(self) -> dict[str, float]:
        """Since the start: transfers, bytes, failures, taken_back, malformed, refused, fenced, reports. Now:
        subscribers, members, snapshot_bytes, and over the members that hold any version: held (the lowest) and lag.
        """
        held = [version for version in self._members.versions().values() if version >= 0]
        newest = self._source.newest
        behind = {} if not held or newest is None else {"held": min(held), "lag": newest - min(held)}
        allocated = {"snapshot_bytes": self._source.allocated}
        return {**self._server.stats(), **self._members.stats(), **allocated, **behind}

    def close(self, wait_s: float = 0.0) -> None:
        atexit.unregister(self.close)
        self._source.wait_idle(wait_s)
        self._source.close()
        self._server.close()

    # Requests, in the RPC thread.

    def _hello(self, request: RpcRequest) -> Fields:
        return {
            "rank": self.rank,
            "world": self.world,
            "lineage": self.lineage,
            "layout": to_wire(self._source.live.layout),
        }

    def _newest(self, request: RpcRequest) -> Fields | None:
        self._member(request)
        newer_than = int(request.fields["newer_than"])

        def newer() -> Fields | None:
            newest = self._source.newest
            return {"version": newest} if newest is not None and newest > newer_than else None

        if (found := newer()) is not None:
            return found
        self._server.server.park(request, newer, float(request.fields["wait_s"]), {"version": None})
        return None

    def _join(self, request: RpcRequest) -> Fields:
        fields = request.fields
        endpoint = fields["endpoint"]
        joined = Joined(
            Member(str(fields["who"]), _text(fields["host"]), _text(fields["layout"])),
            int(fields["bytes"]),
            None if endpoint is None else _text(endpoint),
        )
        self._members.join(joined)
        tracing.event("subscribed", generator=joined.member.who)
        return {}

    def _route(self, request: RpcRequest) -> Fields:
        """The member to take the next version from; None: the learner's ranks."""
        failed = request.fields.get("failed")
        if failed is not None:
            self._members.report(str(failed))
        parent = self._members.parent(self._member(request))
        return {"parent": None if parent is None else [parent.member.who, parent.endpoint]}

    def _held(self, request: RpcRequest) -> Fields:
        self._members.held(self._member(request), int(request.fields["version"]))
        return {}

    def _leave(self, request: RpcRequest) -> Fields:
        self._members.leave(who := str(request.fields["who"]))
        tracing.event("unsubscribed", generator=who)
        return {}

    def _fence(self) -> None:
        for silent in self._members.fence():
            log.warning("%s: %s is silent for more than %.0f s", self.name, silent, self._config.silence_s)
            tracing.event("fenced", generator=silent, silence_s=self._config.silence_s)
            self._server.drop(silent)

    def _member(self, request: RpcRequest) -> str:
        """The member that sent the request. RefusedError("member") for one that was fenced."""
        who = str(request.fields["who"])
        if not self._members.seen(who):
            raise RefusedError("member", f"{who} must join the generators of {self.name} again")
        return who


def _text(word: object) -> str:
    """A field that is kept as long as its member. Raises WireError."""
    if not isinstance(word, str) or len(word) > LONGEST_TEXT:
        raise WireError(f"the words of a member are texts of at most {LONGEST_TEXT} characters")
    return word
