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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.config.schema import SyncConfig
from asyncrl.errors import RefusedError
from asyncrl.rpc.keys import ClientKeys
from asyncrl.rpc.message import Fields
from asyncrl.rpc.server import RpcRequest
from asyncrl.sync.channels.channels import place_of
from asyncrl.sync.channels.torch_transport import LOOPBACK
from asyncrl.sync.delta.delta_chain import DeltaChain
from asyncrl.sync.delta.delta_stream import Deltas
from asyncrl.sync.layout.layout import Layout, to_wire
from asyncrl.sync.plan.plan import SourcePlan, source_from_wire
from asyncrl.sync.plan.tree import Links, Member
from asyncrl.sync.stream.membership import Joined, Membership
from asyncrl.sync.stream.snapshot import Pin, Snapshots
from asyncrl.sync.stream.version_server import Handler, VersionServer
from asyncrl.sync.tensors.bucket import BoxTensors, Shards
from asyncrl.sync.tensors.checksum import ChecksumShare
from asyncrl.sync.tensors.tensor_buffer import TensorBuffer
from asyncrl.types import Version

log = logging.getLogger(__name__)

REMEASURE = 50
"""Publishes between two measurements of the copy that is the floor of the learner's pause."""


@dataclass(frozen=True, slots=True)
class PublishReport:
    """pause_s: how long the learner stood still · bytes copied · floor_s: one plain copy of as many bytes."""

    pause_s: float
    bytes: int
    floor_s: float


class Publisher:
    """Serves this rank's live shards to any number of subscribers.

    Its methods are many because it is a `VersionSource` too and handles six kinds of requests.

    Args:
        tensors: the live shards, cut as `layout`
        lineage: the learner's; a subscriber of another one is refused by name
        keys: that subscribers must hold too

    Raises:
        WeightSyncError: tensors and layout do not match
    """

    def __init__(
        self,
        rank: int,
        world: int,
        layout: Layout,
        tensors: Mapping[str, BoxTensors],
        config: SyncConfig,
        lineage: int,
        keys: ClientKeys | None = None,
    ) -> None:
        self.rank, self.world, self.lineage = rank, world, lineage
        self.name = f"learner rank {rank}"
        self._config = config
        self._live = Shards(layout, tensors)
        self._buffers = [TensorBuffer(self._live) for _ in range(config.snapshots)]
        # Twice each: the first time also gets the memory from the system.
        self._floor_s = min(buffer.floor() for buffer in self._buffers for _ in range(2))
        self._snapshots = Snapshots(config.snapshots)
        self._published = 0
        self._chain: DeltaChain | None = None
        if config.delta != "never" and config.snapshots == 2:
            most_bytes = int(config.delta_share * self._buffers[0].bytes)
            self._chain = DeltaChain(self.name, layout, most_bytes, self._shards_of)
        self._shares: dict[tuple[Version, SourcePlan], ChecksumShare] = {}
        self._share_lock = threading.Lock()
        self._members = Membership(
            place_of(self._live.device).host,
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
            self,
            config,
            lineage=lineage,
            host=config.host or LOOPBACK,
            handlers={"hello": self._hello, **(at_rank_0 if rank == 0 else {})},
            keys=keys,
            on_wake=self._fence,
        )
        self.endpoint = self._server.endpoint
        # A thread that is inside torch while the interpreter is taken down aborts the process.
        atexit.register(self.close)

    def publish(self, version: Version) -> PublishReport:
        """Copy the live shards and return; generators take the copy from then on. Versions must rise."""
        slot = self._snapshots.begin(version)
        buffer = self._buffers[slot]
        self._published += 1
        if self._published % REMEASURE == 0:
            self._floor_s = min(buffer.floor() for _ in range(2))
        pause_s = buffer.take(self._live)
        self._snapshots.commit(slot)
        if self._chain is not None:
            self._chain.published(version)
        self._server.server.wake()
        return PublishReport(pause_s, buffer.bytes, self._floor_s)

    def stats(self) -> dict[str, float]:
        """Since the start: transfers, bytes, failures, taken_back, malformed, refused, fenced, reports. Now:
        subscribers, members, snapshot_bytes, and over the members that hold any version: held (the lowest) and lag.
        """
        held = [version for version in self._members.versions().values() if version >= 0]
        newest = self._snapshots.newest
        behind = {} if not held or newest is None else {"held": min(held), "lag": newest - min(held)}
        allocated = sum(len(buffer.memory) for buffer in self._buffers)
        return {**self._server.stats(), **self._members.stats(), "snapshot_bytes": allocated, **behind}

    def held(self) -> dict[str, Version]:
        """At rank 0: the version that each member has acknowledged; NO_VERSION before the first."""
        return self._members.versions()

    def close(self, wait_s: float = 0.0) -> None:
        """Let transfers in flight end, at most `wait_s`, then stop answering. May be called again."""
        atexit.unregister(self.close)
        self._snapshots.wait_idle(wait_s)
        self._server.close()
        if self._chain is not None:
            self._chain.close()

    # As a VersionSource.

    @property
    def device(self) -> torch.device:
        return self._live.device

    def requested_plan(self, wire: Any) -> SourcePlan:
        return source_from_wire(wire, self.rank, self._live.layout)

    def pin(self, version: Version, who: str) -> Pin | None:
        return self._snapshots.pin(version, who)

    def moved(self, pin: Pin) -> None:
        self._snapshots.moved(pin)

    def release(self, pin: Pin) -> None:
        self._snapshots.release(pin)

    def shards(self, pin: Pin) -> Shards:
        return self._buffers[pin.slot].shards

    def ready(self, pin: Pin, bucket: int, seconds: float) -> None:
        """A snapshot is whole before it can be pinned."""

    def share(self, pin: Pin, source: SourcePlan, seconds: float = 0.0) -> ChecksumShare | None:
        """Computed once for all generators of the same plan."""
        if not self._config.verify:
            return None
        key = (pin.version, source)
        with self._share_lock:
            if key not in self._shares:
                self._shares = {k: d for k, d in self._shares.items() if k[0] >= pin.version - 1}
                self._shares[key] = ChecksumShare.of(source.pieces, self.shards(pin))
            return self._shares[key]

    def deltas(
        self, pin: Pin, base: Version | None, source: SourcePlan, slow: bool, seconds: float
    ) -> Deltas | None:
        if self._chain is None or not (slow or self._config.delta == "always"):
            return None
        return self._chain.find(base, pin.version, source, seconds)

    def _shards_of(self, version: Version) -> Shards | None:
        slot = self._snapshots.slot_of(version)
        return None if slot is None else self._buffers[slot].shards

    # Requests, in the RPC thread.

    def _hello(self, request: RpcRequest) -> Fields:
        return {
            "rank": self.rank,
            "world": self.world,
            "lineage": self.lineage,
            "layout": to_wire(self._live.layout),
        }

    def _newest(self, request: RpcRequest) -> Fields | None:
        self._member(request)
        newer_than = int(request.fields["newer_than"])

        def newer() -> Fields | None:
            newest = self._snapshots.newest
            return {"version": newest} if newest is not None and newest > newer_than else None

        if (found := newer()) is not None:
            return found
        self._server.server.park(request, newer, float(request.fields["wait_s"]), {"version": None})
        return None

    def _join(self, request: RpcRequest) -> Fields:
        fields = request.fields
        endpoint = fields["endpoint"]
        joined = Joined(
            Member(str(fields["who"]), str(fields["host"]), str(fields["layout"])),
            int(fields["bytes"]),
            None if endpoint is None else str(endpoint),
        )
        self._members.join(joined)
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
        self._members.leave(str(request.fields["who"]))
        return {}

    def _fence(self) -> None:
        for silent in self._members.fence():
            log.warning("%s: %s is silent for more than %.0f s", self.name, silent, self._config.silence_s)
            self._server.drop(silent)

    def _member(self, request: RpcRequest) -> str:
        """The member that sent the request. RefusedError("member") for one that was fenced."""
        who = str(request.fields["who"])
        if not self._members.heard(who):
            raise RefusedError("member", f"{who} must join the generators of {self.name} again")
        return who
