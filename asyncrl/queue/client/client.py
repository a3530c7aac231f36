"""What the three loops ask of the queue: `QueueClient` on asyncio, `BlockingClient` for a plain thread."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncrl.errors import DeadlineError, RefusedError, RunClosedError, WireError
from asyncrl.queue.client.channel import Channel
from asyncrl.queue.client.link import Link, SocketLink
from asyncrl.queue.client.replies import (
    Claim,
    Lease,
    Opened,
    Peek,
    Renewal,
    RunStatus,
    StageLease,
    Trained,
    groups_of,
    leases_of,
    received,
)
from asyncrl.queue.client.session import Undo
from asyncrl.queue.ledger.events import StreamSettings
from asyncrl.queue.ledger.ledger_state import CORRUPT
from asyncrl.queue.wire import wire
from asyncrl.queue.wire.columns import REWARDS, encode_columns
from asyncrl.queue.wire.payload import encode_group
from asyncrl.rpc.keys import ClientKeys
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import NO_VERSION, Array, Group, Task, Version

AnyLease = Lease | StageLease

__all__ = [
    "BlockingClient",
    "Claim",
    "Lease",
    "Opened",
    "QueueClient",
    "Renewal",
    "RunStatus",
    "StageLease",
    "Trained",
]


class QueueClient:
    """One process's connection to the queue. `who` names it in errors and in the queue's status.

    keys: of a queue that asks for them. link: how messages travel, instead of a socket to `address`. status: of this
    process, which shows the wait for a queue that is gone.

    Every method may raise DeadlineError (no answer for wait_s + deadline_s), RefusedError (the queue said no)
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
        self._channel = Channel(link or SocketLink(address, keys), run, who, deadline_s, status)
        self._leases: dict[str, set[tuple[int, int]]] = {}  # stream -> (ordinal, epoch)
        # stream -> 'got', 'corrupt' -> ordinals of the last collect, which the queue hears of with the next
        self._collected: dict[str, dict[str, list[int]]] = {}
        self._opens = itertools.count(1)

    async def connect(self) -> RunStatus:
        """Say hello. RefusedError 'wrong_run' if the queue serves another run, ConfigError if the keys do not fit."""
        self._channel.open()
        value = (await self._channel.ask("hello")).value
        return RunStatus(value["run"], tuple(value["streams"]), value["closed"])

    async def close(self) -> None:
        """Give all leases back at once and disconnect. Again: nothing."""
        await self._channel.close()

    # ------------------------------------------------------------------ the run

    async def post(self, key: str, value: Any) -> None:
        """Put a small msgpack-able value into the run's directory, over what was there."""
        await self._channel.ask("post", {"key": key, "value": wire.pack({"value": value})})

    async def lookup(self, key: str, wait_s: float) -> Any:
        """The value posted under `key`; parks until there is one, DeadlineError after wait_s."""
        value = (await self._channel.ask("lookup", {"key": key}, wait_s=wait_s)).value
        if not value["found"]:
            raise DeadlineError(
                self.who, f"the queue at {self._channel.address}", f"the entry '{key}'", wait_s
            )
        return wire.unpack(value["value"])["value"]

    async def finish(self, reason: str) -> None:
        """Close all streams: what has not ended is DROPPED(end); whoever is parked gets RunClosedError."""
        await self._channel.ask("finish", {"reason": reason})

    async def drain(self, stream: str) -> int:
        """Lease no more tasks: pending ones are DROPPED(drained), what is under way is finished, then the stream
        is exhausted. Returns how many were pending."""
        return (await self._channel.ask("drain", {"stream": stream})).value

    async def status(self) -> dict[str, Any]:
        """Counts, ages, leases, refusals, bytes and versions per stream; what each worker said last.

        Of whatever run the queue serves, and without `connect`.
        """
        self._channel.open()
        status = (await self._channel.ask("status")).value
        return {**status, "workers": _stats(status["workers"])}

    async def peek(self, stream: str, ordinal: int) -> Peek:
        """A look at one task; nothing changes by it. RefusedError 'unknown': it is not there yet, or has ended."""
        answer = await self._channel.ask("peek", {"stream": stream, "ordinal": ordinal})
        value, got = answer.value, received(answer.value, answer.frames)
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
        first, count = (await self._channel.ask("room", {"stream": stream}, wait_s=wait_s)).value
        return first, count

    async def submit(self, stream: str, tasks: Sequence[Task], min_version: Version = 0) -> None:
        """Add tasks with consecutive ordinals; those known already are ignored. RefusedError 'gap', 'full'.

        No worker that holds less than `min_version` gets them. Parks until the stream is open.
        """
        packed = [[task.ordinal, wire.task_to_wire(task)] for task in tasks]
        args = {"stream": stream, "tasks": packed, "min_version": min_version}
        await self._channel.ask("submit", args, wait_s=self.deadline_s)

    async def exhaust(self, stream: str, at: int) -> None:
        """There is no task at ordinal `at` or beyond: the run ends with those before. RefusedError 'gap'."""
        await self._channel.ask("exhaust", {"stream": stream, "at": at})

    # ------------------------------------------------------------------ generators

    async def lease(
        self, stream: str, *, held: Version, lineage: int, most: int, wait_s: float
    ) -> list[Lease]:
        """Up to `most` tasks; parks until there is one, [] after wait_s. RefusedError 'lineage'.

        A lease request that is cancelled leaves nothing behind: what it was granted goes back.
        """
        args = {"stream": stream, "held": held, "lineage": lineage, "most": most}
        answer = await self._channel.ask("lease", args, wait_s=wait_s, undo=_give_back(stream))
        leases = leases_of(answer.value, answer.frames)
        self._hold(stream, leases)
        return leases

    async def progress(self, stream: str, lease: Lease, frames: Sequence[wire.Buffer]) -> None:
        """Keep what is finished of a task, for whoever has to go on with it; it replaces what was kept before.

        frames: opaque bytes, with versions and all that it takes to go on. RefusedError 'fenced', 'full'.
        """
        args = {
            "stream": stream,
            "ordinal": lease.task.ordinal,
            "epoch": lease.epoch,
            "nbytes": sum(map(len, frames)),
        }
        await self._channel.ask("progress", args, frames)

    async def renew(self, stats: Mapping[str, Any] | None = None) -> Renewal:
        """Heartbeat of all leases of this client; `stats` replaces what the queue knows of the worker."""
        leases = {name: [list(pair) for pair in sorted(held)] for name, held in self._leases.items()}
        value = (await self._channel.ask("renew", {"leases": leases, "stats": wire.pack(stats or {})})).value
        lost = [(stream, ordinal, epoch) for stream, ordinal, epoch in value["lost"]]
        # A lease that was committed while this request was under way is over, but not lost.
        lost = [(s, o, e) for s, o, e in lost if (o, e) in self._leases.get(s, ())]
        for stream, ordinal, epoch in lost:
            self._leases[stream].discard((ordinal, epoch))
        return Renewal(lost, value["closed"])

    async def commit(
        self, stream: str, lease: Lease, group: Group, columns: Sequence[str] | None = None
    ) -> None:
        """Hand the finished group over. RefusedError 'fenced' (the lease is over), 'stale' (too old).

        columns: what it has that a stage or claim may need; none given: its rewards and its own columns.
        """
        payload = encode_group(group)
        args = {
            "stream": stream,
            "ordinal": lease.task.ordinal,
            "epoch": lease.epoch,
            "tokens": payload.tokens,
            "squares": payload.squares,
            "nbytes": payload.nbytes,
            "start_version": payload.start_version,
            "digest": payload.digest,
            "columns": [REWARDS, *group.columns] if columns is None else list(columns),
        }
        await self._end_lease("commit", stream, lease, args, payload.frames)

    async def give_back(self, stream: str, leases: Sequence[AnyLease]) -> None:
        """Unfinished tasks or stages: others may have them at once."""
        pairs = [(lease.task.ordinal, lease.epoch) for lease in leases]
        self._leases.get(stream, set()).difference_update(pairs)
        await self._channel.ask("give_back", {"stream": stream, "leases": [list(pair) for pair in pairs]})

    async def drop(self, stream: str, lease: Lease, reason: str) -> None:
        """A task that cannot be done ends as DROPPED(reason). RefusedError 'fenced'."""
        args = {"stream": stream, "ordinal": lease.task.ordinal, "epoch": lease.epoch, "reason": reason}
        await self._end_lease("drop", stream, lease, args)

    # ------------------------------------------------------------------ stages

    async def stage_lease(self, stream: str, stage: str, *, most: int, wait_s: float) -> list[StageLease]:
        """Up to `most` groups that wait for the stage, the oldest first; parks until there is one, [] after wait_s.

        They are renewed with the other leases; one that cannot be read is DROPPED(corrupt). RefusedError
        'unknown_stage'.
        """
        args = {"stream": stream, "stage": stage, "most": most}
        answer = await self._channel.ask("stage_lease", args, wait_s=wait_s, undo=_give_back(stream))
        granted = answer.value
        read = groups_of([n for _, _, n, _ in granted], [parts for *_, parts in granted], answer.frames)
        leases: list[StageLease] = []
        for (ordinal, epoch, *_), one in zip(granted, read, strict=True):
            if isinstance(one, WireError):
                args = {
                    "stream": stream,
                    "stage": stage,
                    "ordinal": ordinal,
                    "epoch": epoch,
                    "reason": CORRUPT,
                }
                await self._channel.ask("stage_drop", args)
            else:
                leases.append(StageLease(stage, one[0], epoch, one[1]))
        self._hold(stream, leases)
        return leases

    async def stage_commit(
        self, stream: str, lease: StageLease, columns: Mapping[str, Array], version: Version = NO_VERSION
    ) -> None:
        """Give the group the stage's columns: flat arrays, one value a token ('rewards' and its parts: one a rollout).

        version: of the policy that they depend on. RefusedError 'fenced': the lease is over, or the group was claimed.
        """
        payload = encode_columns(columns)
        args = {
            **_stage_args(stream, lease),
            "nbytes": payload.nbytes,
            "digest": payload.digest,
            "version": version,
        }
        await self._end_lease("stage_commit", stream, lease, args, payload.frames)

    async def stage_drop(self, stream: str, lease: StageLease, reason: str) -> None:
        """A group that the stage cannot do ends as DROPPED(reason). RefusedError 'fenced'."""
        await self._end_lease("stage_drop", stream, lease, {**_stage_args(stream, lease), "reason": reason})

    # ------------------------------------------------------------------ the learner

    async def open(self, stream: str, settings: StreamSettings, snapshot: bytes | None = None) -> Opened:
        """Open the stream, or rewind it to a snapshot under a new lineage. RefusedError 'occupied'.

        A rewind hands out the steps since the snapshot again as they were, if the queue still has all of them.
        """
        args: dict[str, Any] = {"stream": stream, "settings": settings.to_wire(), "snapshot": snapshot}
        args["call"] = next(self._opens)  # by which the queue knows it, if it comes a second time
        self._collected.pop(stream, None)
        return Opened(**(await self._channel.ask("open", args)).value)

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
    ) -> Claim | None:
        """This rank's share of the `index`-th claim of `step`; the same answer however often it is asked.

        whole=False: what is ready now. whole=True: the longest prefix in ordinal order within max_tokens
        a rank, once it cannot grow. None after wait_s. attempt: that of the step's claims before; RefusedError
        'abandoned' if the step has begun anew since, at index 0, which is also what becomes of it if one of its groups
        cannot be read: that one is DROPPED(corrupt).
        """
        args = {"stream": stream, "learner_epoch": learner_epoch, "step": step, "index": index, "rank": rank}
        args |= {"max_tokens": max_tokens, "whole": whole, "attempt": attempt}
        answer = await self._channel.ask("claim", args, wait_s=wait_s)
        if answer.value is None:
            return None
        value, got = answer.value, received(answer.value, answer.frames)
        if got.corrupt:
            at = {"learner_epoch": learner_epoch, "step": step, "attempt": value["attempt"]}
            await self.abandon(stream, **at, dropped=list(got.corrupt), reason=CORRUPT)
            raise RefusedError("abandoned", f"step {step} begins anew without {got.corrupt}")
        return Claim(got.groups, value["last"], value["so_far"], value["attempt"], got.stamps)

    async def trained(
        self, stream: str, *, learner_epoch: int, step: int, waited: float | None = None
    ) -> Trained:
        """The step is done: its groups are TRAINED and version step + 1 is published, for admission.

        waited: the share of the step's time that the learner waited for groups, from which the queue finds how far
        generators should work ahead.
        """
        args = {"stream": stream, "learner_epoch": learner_epoch, "step": step, "waited": waited}
        value = (await self._channel.ask("trained", args)).value
        return Trained(value["version"], _stats(value["stats"]), value["depth"])

    async def reject(self, stream: str, *, learner_epoch: int, step: int, reason: str) -> int:
        """The step's groups are DROPPED(reason) and the step starts anew at index 0. Returns how many."""
        args = {"stream": stream, "learner_epoch": learner_epoch, "step": step, "reason": reason}
        return (await self._channel.ask("reject", args)).value

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

        Returns the attempt that the step is at now; asking again for the same attempt does nothing more.
        """
        args = {"stream": stream, "learner_epoch": learner_epoch, "step": step, "attempt": attempt}
        args |= {"dropped": list(dropped), "reason": reason}
        return (await self._channel.ask("abandon", args)).value

    async def checkpointed(self, stream: str, *, learner_epoch: int, version: Version) -> None:
        """A checkpoint of `version` is committed: the queue need not keep the steps that it contains."""
        args = {"stream": stream, "learner_epoch": learner_epoch, "version": version}
        await self._channel.ask("checkpointed", args)

    async def collect(self, stream: str, *, learner_epoch: int, wait_s: float) -> list[Group]:
        """Take all ready groups of an unbounded stream for good; [] after wait_s.

        What cannot be read is DROPPED(corrupt).
        """
        before = self._collected.get(stream, {"got": [], "corrupt": []})
        args = {"stream": stream, "learner_epoch": learner_epoch, **before}
        answer = await self._channel.ask("collect", args, wait_s=wait_s)
        got = received(answer.value, answer.frames)
        self._collected[stream] = {"got": got.ordinals, "corrupt": list(got.corrupt)}
        return got.groups

    async def snapshot(self, stream: str, *, learner_epoch: int) -> bytes:
        """Where the stream stands after the last trained step, for `open`. Opaque."""
        return (await self._channel.ask("snapshot", {"stream": stream, "learner_epoch": learner_epoch})).value

    # ------------------------------------------------------------------ leases

    async def _end_lease(
        self,
        op: str,
        stream: str,
        lease: AnyLease,
        args: dict[str, Any],
        frames: Sequence[wire.Buffer] = (),
    ) -> None:
        """The lease is over with the answer, whatever it is; without one it stays ours to renew."""
        try:
            await self._channel.ask(op, args, frames)
        except (RefusedError, RunClosedError):
            self._release(stream, lease)
            raise
        self._release(stream, lease)

    def _hold(self, stream: str, leases: Sequence[AnyLease]) -> None:
        pairs = ((lease.task.ordinal, lease.epoch) for lease in leases)
        self._leases.setdefault(stream, set()).update(pairs)

    def _release(self, stream: str, lease: AnyLease) -> None:
        self._leases.get(stream, set()).discard((lease.task.ordinal, lease.epoch))


def _give_back(stream: str) -> Undo:
    """How a grant is undone: [ordinal, epoch, …] each."""

    def give_back(granted: Any) -> tuple[str, dict[str, Any]] | None:
        pairs = [[ordinal, epoch] for ordinal, epoch, *_ in granted]
        return ("give_back", {"stream": stream, "leases": pairs}) if pairs else None

    return give_back


def _stage_args(stream: str, lease: StageLease) -> dict[str, Any]:
    ordinal = lease.group.task.ordinal
    return {"stream": stream, "stage": lease.stage, "ordinal": ordinal, "epoch": lease.epoch}


def _stats(packed: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    return {name: wire.unpack(stats) for name, stats in packed.items()}


class BlockingClient:
    """`QueueClient` for a plain thread: the same methods, each waiting for its result.

    The client lives on an event loop in a thread of its own; several threads may call at once.
    """

    def __init__(
        self,
        address: str,
        *,
        run: str,
        who: str,
        deadline_s: float = 60.0,
        keys: ClientKeys | None = None,
        status: ProcessStatus | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{who} queue", daemon=True)
        self._thread.start()
        self._client = QueueClient(address, run=run, who=who, deadline_s=deadline_s, keys=keys, status=status)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(QueueClient, name, None)
        if name.startswith("_") or not inspect.iscoroutinefunction(method):
            raise AttributeError(f"{type(self).__name__} has no method {name!r}")

        def blocking(*args: Any, **kwargs: Any) -> Any:
            call = method(self._client, *args, **kwargs)
            return asyncio.run_coroutine_threadsafe(call, self._loop).result()

        return blocking

    def close(self) -> None:
        """Disconnect and end the thread. Does nothing the second time."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
