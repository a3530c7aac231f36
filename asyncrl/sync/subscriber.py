"""The generator's end of the weight stream: pulls the newest version into staging memory, all or nothing.

      fetch(newer_than)
        ask rank 0 for the newest ──▸ pin it on every rank of the plan ──▸ receive from all at once ──▸ Staged
              ▲                            │ gone                                │ taken back, broken
              └────────────────────────────┴─────────────────────────────────────┘ at most ATTEMPTS breaks

Waits for the learner's ranks alone, never for another generator. Whoever calls flips the engine from the
staging memory before it calls again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import zmq

from asyncrl.config.schema import SyncConfig
from asyncrl.errors import DeadlineError, RefusedError, WeightSyncError
from asyncrl.sync.bucket import Shards
from asyncrl.sync.digest import MOD
from asyncrl.sync.layout import Layout
from asyncrl.sync.link import GRACE_S, Hello, Link
from asyncrl.sync.plan import Plan, SourcePlan, plan
from asyncrl.sync.snapshot import TakenBackError
from asyncrl.types import Version

ATTEMPTS = 3
"""Transfers that may break in one fetch before it gives up; each comes with new channels."""

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Staged:
    """A whole version in the staging memory.

    digest: the learner's hash of it, None without sync.verify · seconds from pin to acknowledgement · bytes
    received
    """

    version: Version
    digest: int | None
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class _Source:
    """A rank of the plan."""

    link: Link
    plan: SourcePlan


class Subscriber:
    """Fills `staging`, tensors as `layout` says, from the publishers at `endpoints` (any order, all ranks).

    Blocking; one thread at a time. `who` must be unique among the generators. `lineage` (None: whatever the
    first publisher says) must be the publishers'. Raises WeightSyncError when staging and layout do not
    match.
    """

    def __init__(
        self,
        who: str,
        endpoints: Sequence[str],
        layout: Layout,
        config: SyncConfig,
        staging: Mapping[str, torch.Tensor],
        lineage: int | None = None,
    ) -> None:
        self.who, self.lineage = who, lineage
        self._endpoints = list(endpoints)
        self._layout = layout
        self._staging = Shards(layout, staging)
        self._config = config
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: list[Link] = []  # by rank
        self._sources: list[_Source] = []
        self._threads = ThreadPoolExecutor(len(self._endpoints), thread_name_prefix=f"weights of {who}")

    def fetch(self, newer_than: Version, wait_s: float) -> Staged | None:
        """Stage the newest version above `newer_than`; None when none came, or none stayed long enough, in
        `wait_s`.

        A transfer that has begun may take sync.deadline_s longer. Raises DeadlineError when a publisher does
        not answer, RefusedError("lineage") when it has another lineage, WeightSyncError when transfers keep
        breaking.
        """
        deadline = time.monotonic() + wait_s
        while True:
            version = self.newest(newer_than, max(0.0, deadline - time.monotonic()))
            if version is None:
                return None
            try:
                return self.stage(version)
            except TakenBackError as error:
                log.info("%s: %s", self.who, error)
                if time.monotonic() >= deadline:
                    return None

    def newest(self, newer_than: Version, wait_s: float) -> Version | None:
        """The newest version above `newer_than`; None when none came in `wait_s`."""
        self._connect(max(wait_s, GRACE_S))
        return self._links[0].newest(newer_than, wait_s)

    def stage(self, version: Version) -> Staged:
        """Stage exactly this version. Raises TakenBackError when it is gone, else as `fetch`."""
        self._connect(GRACE_S)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._stage(version)
            except TakenBackError:
                raise
            except (DeadlineError, WeightSyncError, RefusedError) as error:
                lasting = isinstance(error, RefusedError) and error.reason != "session"
                if lasting or attempt == ATTEMPTS:
                    raise
                log.warning("%s: version %d: %s; trying again", self.who, version, error)
                self._links[0].newest(
                    version - 1, 0.0
                )  # raises soon if the learner is gone; an attach would wait
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Not while a fetch runs."""
        self._threads.shutdown()
        for link in self._links:
            link.close()
        self._context.term()

    def _connect(self, seconds: float) -> None:
        """Say hello to every rank and make the plan; once."""
        if self._links:
            return
        links = [Link(self._context, endpoint, self.who, self.lineage) for endpoint in self._endpoints]
        try:
            hellos = self._all([partial(link.hello, seconds) for link in links])
            by_rank = sorted(zip(hellos, links, strict=True), key=lambda pair: pair[0].rank)
            _check_one_learner(self.who, [hello for hello, _ in by_rank])
            made = plan([hello.layout for hello, _ in by_rank], self._layout, self._bucket_bytes)
        except Exception:
            for link in links:
                link.close()
            raise
        self._adopt(made, [link for _, link in by_rank])

    def _adopt(self, made: Plan, links: list[Link]) -> None:
        self._links = links
        self.lineage = links[0].lineage
        self._sources = [_Source(links[source.rank], source) for source in made.sources]
        log.info(
            "%s: weights of lineage %s from %d learner rank(s): %.1f MB in %d buckets",
            self.who,
            self.lineage,
            len(self._sources),
            made.bytes / 1e6,
            sum(len(source.buckets) for source in made.sources),
        )

    @property
    def _bucket_bytes(self) -> int:
        return int(self._config.bucket_mb * 2**20)

    def _stage(self, version: Version) -> Staged:
        """Pin on all, receive from all. A failure drops all channels: some are in the middle of a stream."""
        begun = time.monotonic()
        deadline_s = self._config.deadline_s
        sources, staging = self._sources, self._staging
        try:
            self._each(lambda s: s.link.attach(s.plan, staging, deadline_s))
            if not all(self._each(lambda s: s.link.pin(version, deadline_s))):
                for source in sources:
                    source.link.unpin()
                raise _gone(self.who, version)
            digests = self._each(lambda s: s.link.receive(version, s.plan, staging, deadline_s))
        except _GoneError:
            raise
        except Exception:
            for source in sources:
                source.link.drop()
            raise
        digest = None if any(d is None for d in digests) else sum(d or 0 for d in digests) % MOD
        return Staged(version, digest, time.monotonic() - begun, sum(s.plan.bytes for s in sources))

    def _each(self, work: Callable[[_Source], T]) -> list[T]:
        return self._all([partial(work, source) for source in self._sources])

    def _all(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """All at once; returns when all have ended, and raises the first error among them."""
        if len(calls) == 1:
            return [calls[0]()]
        futures = [self._threads.submit(call) for call in calls]
        wait(futures)
        return [future.result() for future in futures]


def _check_one_learner(who: str, hellos: Sequence[Hello]) -> None:
    ranks, lineages = [hello.rank for hello in hellos], {hello.lineage for hello in hellos}
    if ranks != list(range(hellos[0].world)):
        raise WeightSyncError(f"{who}: a learner of {hellos[0].world} ranks, but endpoints of ranks {ranks}")
    if len(lineages) > 1:
        raise WeightSyncError(f"{who}: learner ranks of several lineages: {sorted(lineages)}")


class _GoneError(TakenBackError):
    """The version was gone before anything was sent: the channels are good."""


def _gone(who: str, version: Version) -> _GoneError:
    return _GoneError(f"version {version} was gone before {who} could pin it")
