"""The queue's methods for the three loops: `QueueClient` on asyncio, `BlockingClient` for a plain thread."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from asyncrl.config.schema import Config
from asyncrl.errors import DeadlineError, RefusedError, RunClosedError, WireError
from asyncrl.queue.client.connection import Connection
from asyncrl.queue.client.decoding import Received, granted_leases, groups_of, read_groups
from asyncrl.queue.client.link import Link, SocketLink
from asyncrl.queue.client.session import Undo
from asyncrl.queue.client.trace_link import TraceLink
from asyncrl.queue.ledger.state.tasks import CORRUPT
from asyncrl.queue.protocol import requests as rq
from asyncrl.queue.protocol.replies import (
    Claim,
    Lease,
    Opened,
    Peek,
    Renewal,
    RunStatus,
    StageLease,
    Trained,
)
from asyncrl.queue.protocol.settings import StreamSettings
from asyncrl.queue.wire import wire
from asyncrl.queue.wire.columns import REWARDS, encode_columns
from asyncrl.queue.wire.payload import encode_group
from asyncrl.rpc.keys import ClientKeys, client_keys
from asyncrl.telemetry import tracing
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import NO_VERSION, Array, Group, Task, Version

AnyLease = Lease | StageLease

SUBMIT_BYTES = 1 << 24
"""Bytes of the tasks of one request, unless a single task has more."""


class QueueClient:
    """One process's connection to the queue. `who` names it in errors and in the queue's status.

    It has one method for each verb, and therefore more than other classes.

    Args:
        keys: for a queue that requires them.
        link: carries the messages instead of a socket to `address`.
        status: of this process, which shows the wait for a queue that is gone.

    Every method may raise DeadlineError (no reply for wait_s + deadline_s), RefusedError (the queue refuses)
    and WireError (a bad message); those that work on a stream RunClosedError.
    """

    def __init__(
        self,
        address: str,
        *,
        run: str,
        who: str,
        deadline_s: float = 60.0,
        keys: ClientKeys | None = None,
        link: Link | None = None,
        status: ProcessStatus | None = None,
    ) -> None:
        self.who, self.deadline_s = who, deadline_s
        self._connection = Connection(link or SocketLink(address, keys), run, who, deadline_s, status)
        self._leases: dict[str, set[tuple[int, int]]] = {}  # stream -> (ordinal, epoch)
        # stream -> ordinals of the last collect (readable, corrupt), which the next one reports to the queue
        self._collected: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._opens = itertools.count(1)
        self._linking: asyncio.Task[None] | None = None

    @classmethod
    def of(
        cls, config: Config, who: str, status: ProcessStatus | None = None, address: str = ""
    ) -> QueueClient:
        """The client of a process of a run. address: if it is not `queue.address`."""
        queue = config.queue
        keys = client_keys(queue.keys)
        run, deadline_s = config.run.name, queue.deadline_s
        return cls(
            address or queue.address, run=run, who=who, deadline_s=deadline_s, keys=keys, status=status
        )

    async def connect(self) -> RunStatus:
        """Connect. RefusedError 'wrong_run' if the queue serves another run, ConfigError if the keys do not fit."""
        self._connection.open()
        sent = tracing.now()
        value = await self._value(rq.HelloRequest())
        self._link_trace(sent, value["time"], value["trace"])
        return RunStatus(value["run"], tuple(value["streams"]), value["closed"])

    async def close(self) -> None:
        """Give all leases back at once and disconnect. Idempotent."""
        try:
            if self._linking is not None:
                self._linking.cancel()
                self._linking = None
                await self._trace_link.close()
        finally:
            await self._connection.close()

    def _link_trace(self, sent: float, there: float, mark: str) -> None:
        """Begin to compare the clock of this process's trace with the queue's, and to send its rows if need be."""
        trace = tracing.current()
        if trace is not None and trace.link() and self._linking is None:
            self._trace_link = TraceLink(trace, self._value, mark)
            self._trace_link.observe(sent, there, trace.now())
            self._linking = asyncio.create_task(self._trace_link.run())

    # ------------------------------------------------------------------ the run

    async def post(self, key: str, value: Any) -> None:
        """Put a small msgpack-able value into the run's registry; it replaces an earlier one."""
        await self._value(rq.PostRequest(key=key, value=wire.pack({"value": value})))

    async def lookup(self, key: str, wait_s: float) -> Any:
        """The value posted under `key`; parks until there is one, DeadlineError after wait_s."""
        value = await self._value(rq.LookupRequest(key=key, wait_s=wait_s))
        if not value["found"]:
            raise DeadlineError(
                self.who, f"the queue at {self._connection.address}", f"the entry '{key}'", wait_s
            )
        return wire.unpack(value["value"])["value"]

    async def finish(self, reason: str) -> None:
        """Close all streams: unfinished tasks are DROPPED(end); parked requests get RunClosedError."""
        await self._value(rq.FinishRequest(reason=reason))

    async def drain(self, stream: str) -> int:
        """End the stream early: pending tasks are DROPPED(drained), leased ones are finished, then the stream is
        exhausted. Returns how many were dropped."""
        return await self._value(rq.DrainRequest(stream=stream))

    async def status(self) -> dict[str, Any]:
        """Counts, ages, leases, refusals, bytes and versions per stream; the latest stats of each worker.

        It works for any run that the queue serves, and without `connect`.
        """
        self._connection.open()
        status = await self._value(rq.StatusRequest())
        return {**status, "workers": _stats(status["workers"])}

    async def peek(self, stream: str, ordinal: int) -> Peek:
        """A look at one task; nothing changes by it. RefusedError 'unknown': it is not there yet, or has ended."""
        answer = await self._connection.request(rq.PeekRequest(stream=stream, ordinal=ordinal))
        value, got = answer.value, read_groups(answer.value, answer.frames)
        return Peek(
            value["state"],
            None if value["task"] is None else wire.task_from_wire(value["task"]),
            value["worker"],
            value["since_s"],
            got.groups[0] if got.groups else None,
            next((str(error) for error in got.corrupt.values()), None),
        )

    # ------------------------------------------------------------------ the task feeder

    async def room(self, stream: str, wait_s: float) -> tuple[int, int]:
        """(the ordinal wanted next, how many tasks); parks until some are wanted, 0 of them after wait_s."""
        first, count = await self._value(rq.RoomRequest(stream=stream, wait_s=wait_s))
        return first, count

    async def submit(self, stream: str, tasks: Sequence[Task], min_version: Version = 0) -> None:
        """Add tasks with consecutive ordinals; those known already are ignored. RefusedError 'gap', 'full'.

        No worker that holds less than `min_version` gets them. Parks until the stream is open.
        """
        for packed in _shared_out([(task.ordinal, wire.task_to_wire(task)) for task in tasks]):
            await self._value(
                rq.SubmitRequest(stream=stream, tasks=packed, min_version=min_version, wait_s=self.deadline_s)
            )

    async def exhaust(self, stream: str, at: int) -> None:
        """There is no task at ordinal `at` or beyond: the run ends with those before. RefusedError 'gap'."""
        await self._value(rq.ExhaustRequest(stream=stream, at=at))

    async def scores(self, stream: str, since: int) -> tuple[int, list[tuple[int, float]]]:
        """The number of the next score, and (ordinal, score) of the groups that came with one, from number `since` on.

        Those before are forgotten.
        """
        after, found = await self._value(rq.ScoresRequest(stream=stream, since=since))
        return after, [(ordinal, score) for ordinal, score in found]

    # ------------------------------------------------------------------ generators

    async def lease(
        self, stream: str, *, held: Version, lineage: int, most: int, wait_s: float
    ) -> list[Lease]:
        """Up to `most` tasks; parks until there is one, [] after wait_s. RefusedError 'lineage'.

        A cancelled request leaves nothing behind: its leases are given back.
        """
        request = rq.LeaseRequest(stream=stream, held=held, lineage=lineage, most=most, wait_s=wait_s)
        answer = await self._connection.request(request, undo=_give_back(stream))
        leases = granted_leases(answer.value, answer.frames)
        self._hold(stream, leases)
        return leases

    async def progress(self, stream: str, lease: Lease, frames: Sequence[wire.Buffer]) -> None:
        """Store the finished part of a task for the next lease of it; it replaces the part stored before.

        frames: opaque bytes, with versions and everything needed to go on. RefusedError 'fenced', 'full'.
        """
        request = rq.ProgressRequest(
            stream=stream, ordinal=lease.task.ordinal, epoch=lease.epoch, nbytes=sum(map(len, frames))
        )
        await self._connection.request(request, frames)

    async def renew(self, stats: Mapping[str, Any] | None = None) -> Renewal:
        """Heartbeat of all leases of this client; `stats` replaces the worker's earlier stats."""
        leases = {name: tuple(sorted(held)) for name, held in self._leases.items()}
        request = rq.RenewRequest(leases=leases, stats=wire.pack(stats or {}))
        value = await self._value(request)
        lost = [(stream, ordinal, epoch) for stream, ordinal, epoch in value["lost"]]
        # A lease that was committed while this request was under way is over, but not lost.
        lost = [(s, o, e) for s, o, e in lost if (o, e) in self._leases.get(s, ())]
        for stream, ordinal, epoch in lost:
            self._leases[stream].discard((ordinal, epoch))
        return Renewal(lost, value["closed"])

    async def commit(
        self,
        stream: str,
        lease: Lease,
        group: Group,
        columns: Sequence[str] | None = None,
        score: float | None = None,
    ) -> None:
        """Hand the finished group over. RefusedError 'fenced' (the lease is over), 'stale' (too old).

        columns: those that stages and claims may rely on; by default its rewards and its own columns.
        score: for whoever asks for `scores`
        """
        payload = encode_group(group)
        request = rq.CommitRequest(
            stream=stream,
            ordinal=lease.task.ordinal,
            epoch=lease.epoch,
            tokens=payload.tokens,
            squares=payload.squares,
            nbytes=payload.nbytes,
            start_version=payload.start_version,
            digest=payload.digest,
            columns=(REWARDS, *group.columns) if columns is None else tuple(columns),
            score=score,
        )
        await self._end_lease(lease, request, payload.frames)

    async def give_back(self, stream: str, leases: Sequence[AnyLease]) -> None:
        """Unfinished tasks or stages: others may have them at once."""
        pairs = tuple((lease.task.ordinal, lease.epoch) for lease in leases)
        self._leases.get(stream, set()).difference_update(pairs)
        await self._value(rq.GiveBackRequest(stream=stream, leases=pairs))

    async def drop(self, stream: str, lease: Lease, reason: str, score: float | None = None) -> None:
        """A task that cannot be done ends as DROPPED(reason). RefusedError 'fenced'. score: as for `commit`"""
        request = rq.DropRequest(
            stream=stream, ordinal=lease.task.ordinal, epoch=lease.epoch, reason=reason, score=score
        )
        await self._end_lease(lease, request)

    # ------------------------------------------------------------------ stages

    async def stage_lease(self, stream: str, stage: str, *, most: int, wait_s: float) -> list[StageLease]:
        """Up to `most` groups that wait for the stage, the oldest first; parks until there is one, [] after wait_s.

        They are renewed with the other leases; one that cannot be read is DROPPED(corrupt). RefusedError
        'unknown_stage'.
        """
        request = rq.StageLeaseRequest(stream=stream, stage=stage, most=most, wait_s=wait_s)
        undo = _give_back(stream)
        answer = await self._connection.request(request, undo=undo)
        granted = answer.value
        read = groups_of([n for _, _, n, _ in granted], [parts for *_, parts in granted], answer.frames)
        keys = [(ordinal, epoch) for ordinal, epoch, *_ in granted]
        held = self._leases.setdefault(stream, set())
        held.update(keys)  # before anything is waited for: they are renewed from now on
        leases: list[StageLease] = []
        try:
            for key, one in zip(keys, read, strict=True):
                if isinstance(one, WireError):
                    await self._drop_corrupt(stream, stage, key)
                else:
                    leases.append(StageLease(stage, one[0], key[1], one[1]))
        except BaseException:  # the caller gets none of them
            held.difference_update(keys)
            self._connection.give_back(undo, granted)
            raise
        return leases

    async def _drop_corrupt(self, stream: str, stage: str, key: tuple[int, int]) -> None:
        """A group that cannot be read."""
        ordinal, epoch = key
        drop = rq.StageDropRequest(stream=stream, stage=stage, ordinal=ordinal, epoch=epoch, reason=CORRUPT)
        with suppress(RefusedError):  # its lease was over already
            await self._value(drop)
        self._leases[stream].discard(key)

    async def stage_commit(
        self, stream: str, lease: StageLease, columns: Mapping[str, Array], version: Version = NO_VERSION
    ) -> None:
        """Give the group the stage's columns: one value or row a token ('rewards' and its parts: one value a rollout).

        version: of the policy that they depend on. RefusedError 'fenced': the lease is over, or the group was claimed.
        """
        payload = encode_columns(columns)
        request = rq.StageCommitRequest(
            stream=stream,
            stage=lease.stage,
            ordinal=lease.task.ordinal,
            epoch=lease.epoch,
            nbytes=payload.nbytes,
            version=version,
            digest=payload.digest,
        )
        await self._end_lease(lease, request, payload.frames)

    async def stage_drop(self, stream: str, lease: StageLease, reason: str) -> None:
        """A group that the stage cannot do ends as DROPPED(reason). RefusedError 'fenced'."""
        request = rq.StageDropRequest(
            stream=stream, stage=lease.stage, ordinal=lease.task.ordinal, epoch=lease.epoch, reason=reason
        )
        await self._end_lease(lease, request)

    # ------------------------------------------------------------------ the learner

    async def open(self, stream: str, settings: StreamSettings, snapshot: bytes | None = None) -> Opened:
        """Open the stream, or rewind it to a snapshot under a new lineage. RefusedError 'occupied'.

        A rewind hands out the steps since the snapshot again as they were, if the queue still has all of them.
        """
        self._collected.pop(stream, None)
        request = rq.OpenRequest(stream=stream, settings=settings, snapshot=snapshot, call=next(self._opens))
        return Opened(**(await self._value(request)))

    async def claim(
        self,
        stream: str,
        *,
        learner_epoch: int,
        step: int,
        index: int,
        rank: int,
        max_tokens: int,
        whole: bool,
        wait_s: float,
        attempt: int | None = None,
        received: int = 0,
        ahead: bool = False,
    ) -> Claim | None:
        """This rank's share of the `index`-th claim of `step`; None after wait_s. A repetition returns the same.

        Args:
            whole: False: the groups that are ready now. True: the longest run of ready groups in ordinal order
                within max_tokens a rank, once no group can be added to it.
            attempt: that of the step's earlier claims.
            received: groups of the share that are here already: the reply brings the others.
            ahead: the first claim of the step may come while the step before runs (`Claim.ahead`), once no group can
                be added to it. Requested again with its attempt, it comes when the step runs.

        Raises:
            RefusedError: 'abandoned', the step has begun anew since, at index 0. This also happens if one of its
                groups cannot be read: that one is DROPPED(corrupt), unless the claim came ahead.
        """
        request = rq.ClaimRequest(
            stream=stream,
            learner_epoch=learner_epoch,
            step=step,
            index=index,
            rank=rank,
            max_tokens=max_tokens,
            whole=whole,
            attempt=attempt,
            received=received,
            ahead=ahead,
            wait_s=wait_s,
        )
        answer = await self._connection.request(request)
        if answer.value is None:
            return None
        value, got = answer.value, read_groups(answer.value, answer.frames)
        while received + got.count < value["share"]:
            got.add(await self._next_part(request, value["attempt"], received + got.count))
        ahead = value.get("ahead", False)  # brokers of before do not have it
        if got.corrupt and ahead:
            raise RefusedError("abandoned", f"step {step} will begin without {got.corrupt}")
        if got.corrupt:
            at = {"learner_epoch": learner_epoch, "step": step, "attempt": value["attempt"]}
            await self.abandon(stream, **at, dropped=list(got.corrupt), reason=CORRUPT)
            raise RefusedError("abandoned", f"step {step} begins anew without {got.corrupt}")
        about = (value["last"], value["so_far"], value["attempt"], ahead, value.get("share_ordinals", ()))
        return Claim(got.groups, *about, stamps=got.stamps, workers=got.workers)

    async def _next_part(self, request: rq.ClaimRequest, attempt: int, count: int) -> Received:
        """Further groups of a claim whose first `count` groups are here."""
        request = msgspec.structs.replace(request, attempt=attempt, received=count, wait_s=0.0)
        answer = await self._connection.request(request)
        if not answer.value or not answer.value["ordinals"]:
            raise RefusedError("abandoned", f"step {request.step} is not the one in training any more")
        return read_groups(answer.value, answer.frames)

    async def trained(
        self, stream: str, *, learner_epoch: int, step: int, waited: float | None = None
    ) -> Trained:
        """The step is done: its groups are TRAINED and version step + 1 is published, for admission.

        waited: the share of the step's time that the learner waited for groups, from which the queue finds how far
        generators should work ahead.
        """
        request = rq.TrainedRequest(stream=stream, learner_epoch=learner_epoch, step=step, waited=waited)
        value = await self._value(request)
        return Trained(value["version"], _stats(value["stats"]), value["depth"])

    async def reject(self, stream: str, *, learner_epoch: int, step: int, reason: str) -> int:
        """The step's groups are DROPPED(reason) and the step starts anew at index 0. Returns how many."""
        request = rq.RejectRequest(stream=stream, learner_epoch=learner_epoch, step=step, reason=reason)
        return await self._value(request)

    async def abandon(
        self,
        stream: str,
        *,
        learner_epoch: int,
        step: int,
        attempt: int,
        dropped: Sequence[int] = (),
        reason: str = "",
    ) -> int:
        """The running step begins anew at index 0: its groups in `dropped` are DROPPED(reason), the others come back.

        Returns the attempt that the step is at now; a repetition for the same attempt changes nothing.
        """
        request = rq.AbandonRequest(
            stream=stream,
            learner_epoch=learner_epoch,
            step=step,
            attempt=attempt,
            dropped=tuple(dropped),
            reason=reason,
        )
        return await self._value(request)

    async def checkpointed(self, stream: str, *, learner_epoch: int, version: Version) -> None:
        """A checkpoint of `version` is committed: the queue need not keep the steps that it contains."""
        request = rq.CheckpointedRequest(stream=stream, learner_epoch=learner_epoch, version=version)
        await self._value(request)

    async def collect(self, stream: str, *, learner_epoch: int, wait_s: float) -> list[Group]:
        """Take all ready groups of an unbounded stream for good; [] after wait_s.

        Unreadable groups are DROPPED(corrupt).
        """
        got, corrupt = self._collected.get(stream, ((), ()))
        request = rq.CollectRequest(
            stream=stream, learner_epoch=learner_epoch, got=got, corrupt=corrupt, wait_s=wait_s
        )
        answer = await self._connection.request(request)
        result = read_groups(answer.value, answer.frames)
        self._collected[stream] = tuple(result.ordinals), tuple(result.corrupt)
        return result.groups

    async def snapshot(self, stream: str, *, learner_epoch: int) -> bytes:
        """Where the stream stands after the last trained step, for `open`. Opaque."""
        return await self._value(rq.SnapshotRequest(stream=stream, learner_epoch=learner_epoch))

    # ------------------------------------------------------------------ replies and leases

    async def _value(self, request: rq.Request) -> Any:
        """The value of the reply to a request without a payload."""
        return (await self._connection.request(request)).value

    async def _end_lease(
        self, lease: AnyLease, request: rq.StreamRequest, frames: Sequence[wire.Buffer] = ()
    ) -> None:
        """A reply ends the lease, a refusal too. While none comes, the client keeps renewing it."""
        try:
            await self._connection.request(request, frames)
        except (RefusedError, RunClosedError):
            self._release(request.stream, lease)
            raise
        self._release(request.stream, lease)

    def _hold(self, stream: str, leases: Sequence[AnyLease]) -> None:
        pairs = ((lease.task.ordinal, lease.epoch) for lease in leases)
        self._leases.setdefault(stream, set()).update(pairs)

    def _release(self, stream: str, lease: AnyLease) -> None:
        self._leases.get(stream, set()).discard((lease.task.ordinal, lease.epoch))


def _give_back(stream: str) -> Undo:
    """The request that gives back a grant, a list of [ordinal, epoch, …]."""

    def give_back(granted: Any) -> rq.Request | None:
        pairs = tuple((ordinal, epoch) for ordinal, epoch, *_ in granted)
        return rq.GiveBackRequest(stream=stream, leases=pairs) if pairs else None

    return give_back


def _shared_out(packed: Sequence[tuple[int, bytes]]) -> Iterator[tuple[tuple[int, bytes], ...]]:
    """Tasks for one request each time, in their order; none come in one request, too."""
    start, nbytes = 0, 0
    for at, (_, task) in enumerate(packed):
        if at > start and nbytes + len(task) > SUBMIT_BYTES:
            yield tuple(packed[start:at])
            start, nbytes = at, 0
        nbytes += len(task)
    yield tuple(packed[start:])


def _stats(packed: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    return {name: wire.unpack(stats) for name, stats in packed.items()}


P = ParamSpec("P")
R = TypeVar("R")


def _blocking(
    method: Callable[Concatenate[QueueClient, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[BlockingClient, P], R]:
    """The same method, which waits for its result."""

    @functools.wraps(method)
    def call(self: BlockingClient, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.wait(method(self.queue, *args, **kwargs))

    return call


class BlockingClient:
    """A `QueueClient` for the learner's plain threads: its methods, each waiting for its result.

    The client lives on an event loop in a thread of its own; several threads may call at once.
    """

    def __init__(self, queue: QueueClient) -> None:
        self.queue = queue
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{queue.who} queue", daemon=True)
        self._thread.start()

    def wait(self, call: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def close(self) -> None:
        """Disconnect and end the thread. Does nothing the second time."""
        if self._loop.is_closed():
            return
        self.wait(self.queue.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    connect = _blocking(QueueClient.connect)
    post = _blocking(QueueClient.post)
    lookup = _blocking(QueueClient.lookup)
    finish = _blocking(QueueClient.finish)
    status = _blocking(QueueClient.status)
    room = _blocking(QueueClient.room)
    submit = _blocking(QueueClient.submit)
    open = _blocking(QueueClient.open)
    claim = _blocking(QueueClient.claim)
    trained = _blocking(QueueClient.trained)
    reject = _blocking(QueueClient.reject)
    abandon = _blocking(QueueClient.abandon)
    checkpointed = _blocking(QueueClient.checkpointed)
    collect = _blocking(QueueClient.collect)
    snapshot = _blocking(QueueClient.snapshot)
