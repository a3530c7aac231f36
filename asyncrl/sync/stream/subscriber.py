"""The generator's end of the weight stream: pulls the newest version into staging memory, all or nothing.

      newest ── at rank 0 ───▸ version                                     ┌──────── the learner's ranks, all at once
      stage(version) ── route from rank 0 ─────────▸ pin ▸ receive from ───┤ or: failed, too late
              │                                                            └──────── a relay that has it, or soon will
              ├──▸ StagedWeights: whole, with the learner's hash
              └──▸ SnapshotEvictedError: the sender needed the memory for a newer version
      held(version): flipped and verified

It waits only for its source, and relays the buckets that it receives to its children (`relay`). The caller flips the
engine from the staging memory before it stages again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

from asyncrl.config.schema import SyncConfig
from asyncrl.errors import AsyncRLError, RefusedError, WeightSyncError
from asyncrl.rpc.keys import ClientKeys
from asyncrl.sync.channels.addresses import own_address
from asyncrl.sync.channels.choose import place_of
from asyncrl.sync.layout.layout import layout_key
from asyncrl.sync.plan.plan import Plan, Plans, SourcePlan
from asyncrl.sync.stream.link import GRACE_S, Hello, Parent, PublisherLink
from asyncrl.sync.stream.relay import Relay
from asyncrl.sync.stream.snapshot import SnapshotEvictedError
from asyncrl.sync.tensors.budget import stream_bucket
from asyncrl.sync.tensors.checksum import Checksum, ChecksumShare
from asyncrl.sync.tensors.shards import Shards
from asyncrl.types import Version

PARENT_S = 2.0
"""How long a parent may take to open a channel, and then to begin with a version, before the learner sends it."""

IMPATIENT = 2
"""After so many versions in a row that the parent evicted, the next comes from the learner."""

PLANS = Plans()
"""The plans of this process: a learner that was started again, cut as before, needs no new one."""

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A whole version in the staging memory.

    checksum: None without sync.verify · seconds from pin to acknowledgement · bytes received · source: the member it
    was taken from, None for the learner
    """

    version: Version
    checksum: Checksum | None
    seconds: float
    bytes: int
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A process to receive from. rank: of the learner; None for a relay."""

    link: PublisherLink
    plan: SourcePlan
    rank: int | None


class Subscriber:
    """Fills staging memory from the publishers of all learner ranks. Blocking; one thread at a time.

    Args:
        who: unique among the subscribers: each rank of an engine has one of its own
        endpoints: of all learner ranks, in any order
        lineage: the publishers must have this one
        keys: that the publishers hold too
    """

    def __init__(
        self,
        who: str,
        endpoints: Sequence[str],
        staging: Shards,
        config: SyncConfig,
        lineage: int,
        keys: ClientKeys | None = None,
    ) -> None:
        self.who, self.lineage = who, lineage
        self._endpoints = list(endpoints)
        self._config, self._keys = config, keys
        threads = ThreadPoolExecutor(len(self._endpoints), thread_name_prefix=f"weights of {who}")
        self._staging = Staging(who, staging, config.deadline_s, threads)
        self._links: list[PublisherLink] = []  # by rank
        self._sources: list[Source] = []  # the learner's ranks of the plan
        self._bytes = 0  # of a version
        self._parent: tuple[Parent, Source] | None = None  # the one it took from last
        self._failed: str | None = None  # a parent, not reported to rank 0 yet
        self._evicted = 0  # versions in a row, by the parent

    def newest(self, newer_than: Version, wait_s: float) -> Version | None:
        """The learner's newest version if it is above `newer_than`; None when there was none in `wait_s`.

        Raises DeadlineError when a publisher does not answer, RefusedError("lineage") when it has another lineage,
        WeightSyncError when it is gone.
        """
        deadline = time.monotonic() + wait_s
        self._connect(max(wait_s, GRACE_S))
        return self._as_member(
            lambda: self._links[0].newest(newer_than, max(0.0, deadline - time.monotonic()))
        )

    def stage(self, version: Version) -> StagedWeights:
        """Stage exactly this version. Each of its waits, for channels, for the version and for all of its bytes, ends
        after sync.deadline_s.

        Raises:
            SnapshotEvictedError: it is gone; take the newest
            DeadlineError, WeightSyncError, RefusedError: the transfer broke. The staging memory then holds no version,
                and the next call makes new channels.
        """
        self._connect(GRACE_S)
        parent = self._as_member(lambda: self._links[0].route(self._failed))
        self._failed = None
        if parent is not None and self._staging.relay is not None and self._evicted < IMPATIENT:
            try:
                staged = self._staging.fill(version, [self._at(parent)], PARENT_S, parent.who)
                self._evicted = 0
                return staged
            except SnapshotEvictedError:
                self._evicted += 1
                raise
            except AsyncRLError as error:
                log.warning("%s takes version %d from the learner: %s", self.who, version, str(error))
                self._failed = parent.who
                self._leave_parent()
        self._evicted = 0
        return self._staging.fill(version, self._sources, self._config.deadline_s, None)

    def held(self, version: Version) -> None:
        """Report to rank 0 that this version is flipped and verified, or still is. Raises as `newest`."""
        self._connect(GRACE_S)
        self._as_member(lambda: self._links[0].held(version))

    def close(self) -> None:
        """Not while a transfer runs."""
        self._staging.close()
        if self._links:
            self._links[0].leave()
        self._leave_parent()
        for link in self._links:
            link.close()

    def _connect(self, seconds: float) -> None:
        """Connect to every rank, make the plan and join; once."""
        if self._links:
            return
        links = [self._link(endpoint) for endpoint in self._endpoints]
        try:
            hellos = self._staging.at_once([partial(link.hello, seconds) for link in links])
            by_rank = sorted(zip(hellos, links, strict=True), key=lambda pair: pair[0].rank)
            _check_all_ranks(self.who, [hello for hello, _ in by_rank])
            bucket = stream_bucket(self._config, len(links))
            plan = PLANS([hello.layout for hello, _ in by_rank], self._staging.shards.layout, bucket)
            self._adopt(plan, [link for _, link in by_rank])
        except Exception:
            for link in links:
                link.close()
            self._links = []
            raise

    def _adopt(self, plan: Plan, links: list[PublisherLink]) -> None:
        self._links, self._bytes = links, plan.bytes
        self._sources = [Source(links[source.rank], source, source.rank) for source in plan.sources]
        if self._config.fanout != 0 and plan.sources and self._staging.relay is None:
            learner = urlsplit(links[0].endpoint)
            host = own_address(str(learner.hostname), int(learner.port or 0))
            self._staging.relay = Relay(
                self.who, self._staging.shards, plan, self._config, self.lineage, host, self._keys
            )
        self._join()
        log.info(
            "%s: weights of lineage %s from %d learner rank(s): %.1f MB in %d buckets",
            self.who,
            self.lineage,
            len(self._sources),
            plan.bytes / 1e6,
            sum(len(source.buckets) for source in plan.sources),
        )

    def _join(self) -> None:
        shards, relay = self._staging.shards, self._staging.relay
        endpoint = None if relay is None else relay.endpoint
        host, layout = place_of(shards.device).host, layout_key(shards.layout)
        self._links[0].join(host, layout, self._bytes, endpoint)

    def _as_member(self, request: Callable[[], T]) -> T:
        """A request to rank 0; once more after joining again, if this one was fenced meanwhile.

        All sources get a sign of life: between two versions they hear nothing else.
        """
        for source in (*self._sources, *(() if self._parent is None else self._parent[1:])):
            source.link.alive()
        try:
            return request()
        except RefusedError as error:
            if error.reason != "member":
                raise
        log.warning("%s was fenced, and joins again", self.who)
        self._join()
        return request()

    def _link(self, endpoint: str, whom: str | None = None) -> PublisherLink:
        return PublisherLink(endpoint, self.who, self.lineage, self._keys, whom)

    def _at(self, parent: Parent) -> Source:
        """The parent as a source; the connection to it is kept while it stays the same."""
        if self._parent is None or self._parent[0] != parent:
            self._leave_parent()
            assert self._staging.relay is not None
            link = self._link(parent.endpoint, f"{parent.who} at {parent.endpoint}")
            self._parent = (parent, Source(link, self._staging.relay.source.plan, None))
        return self._parent[1]

    def _leave_parent(self) -> None:
        if self._parent is not None:
            self._parent[1].link.close()
            self._parent = None


class Staging:
    """The staging memory, filled from several sources at once, all or nothing, and handed on by `relay` meanwhile."""

    def __init__(self, who: str, shards: Shards, deadline_s: float, threads: ThreadPoolExecutor) -> None:
        self.shards = shards
        self.relay: Relay | None = None
        self._who, self._deadline_s, self._threads = who, deadline_s, threads
        self._staged: Version | None = None  # what lies whole in the memory

    def fill(
        self, version: Version, sources: Sequence[Source], pin_s: float, parent: str | None
    ) -> StagedWeights:
        """Pin on all, receive from all. A failure drops all channels: some are in the middle of a stream.

        pin_s: the longest wait for a channel, and then for the version · parent: the relay that is the only source
        """
        begun = time.monotonic()
        relay = self.relay
        try:
            self._pin(version, sources, pin_s)
            if relay is not None:
                relay.begin(version)
            base, self._staged = self._staged, None
            shares = self.at_once([partial(self._receive, version, base, source) for source in sources])
            checksum = Checksum.joined(shares, (piece for source in sources for piece in source.plan.pieces))
            self._staged = version
        except _NotBegunError:
            raise
        except Exception:
            self._give_up(sources)
            raise
        if relay is not None:
            relay.source.complete(None if checksum is None else checksum.share)
        total = sum(source.link.received_bytes for source in sources)
        return StagedWeights(version, checksum, time.monotonic() - begun, total, parent)

    def at_once(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """All at once; returns when all have ended, and raises the first error among them."""
        if len(calls) == 1:
            return [calls[0]()]
        futures = [self._threads.submit(call) for call in calls]
        wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        self._threads.shutdown()
        if self.relay is not None:
            self.relay.close()

    def _pin(self, version: Version, sources: Sequence[Source], pin_s: float) -> None:
        self.at_once([partial(s.link.attach, s.plan, self.shards, pin_s, self._deadline_s) for s in sources])
        if all(self.at_once([partial(source.link.pin, version, pin_s) for source in sources])):
            return
        for source in sources:
            source.link.unpin()
        raise _NotBegunError(f"version {version} was gone before {self._who} could pin it")

    def _receive(self, version: Version, base: Version | None, source: Source) -> ChecksumShare | None:
        def arrived(bucket: int) -> None:
            if self.relay is not None:
                self.relay.arrived(source.rank, bucket)

        return source.link.receive(version, base, arrived)

    def _give_up(self, sources: Sequence[Source]) -> None:
        """The staged version is torn; no member may take it from here."""
        if self.relay is not None:
            self.relay.source.withdraw()
        for source in sources:
            with contextlib.suppress(AsyncRLError):
                source.link.drop()


def _check_all_ranks(who: str, hellos: Sequence[Hello]) -> None:
    ranks = [hello.rank for hello in hellos]
    if ranks != list(range(hellos[0].world)):
        raise WeightSyncError(f"{who}: a learner of {hellos[0].world} ranks, but endpoints of ranks {ranks}")


class _NotBegunError(SnapshotEvictedError):
    """The version was gone before anything was sent: the channels are good, and so is what was staged before."""
