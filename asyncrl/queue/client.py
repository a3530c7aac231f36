"""What the three loops ask of the queue: `QueueClient` on asyncio, `BlockingClient` for a plain thread."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import DeadlineError, RefusedError, RunClosedError
from asyncrl.queue import wire
from asyncrl.queue.channel import Answer, Channel
from asyncrl.queue.events import StreamSettings
from asyncrl.types import Group, Task, Version


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What hello tells. streams: those that a learner has opened. closed: why the run is over, if it is."""

    run: str
    streams: tuple[str, ...]
    closed: str | None


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to do a task, until it is not renewed in time. epoch: the fencing token of this lease."""

    task: Task
    epoch: int


@dataclass(frozen=True, slots=True)
class Renewal:
    """lost: (stream, ordinal, epoch) of leases that are over, to be aborted. closed: the run is over."""

    lost: list[tuple[str, int, int]]
    closed: bool


@dataclass(frozen=True, slots=True)
class Opened:
    """learner_epoch goes with every request of the learner; version is the step to train first."""

    learner_epoch: int
    lineage: int
    version: Version


@dataclass(frozen=True, slots=True)
class Claim:
    """This rank's groups of one claim. last: the step is complete. ordinals_all: the step's groups so far."""

    groups: list[Group]
    last: bool
    ordinals_all: int


@dataclass(frozen=True, slots=True)
class Trained:
    """version: the one now published. stats: what each worker said last. depth: the ledger's counts."""

    version: Version
    stats: dict[str, dict[str, Any]]
    depth: dict[str, Any]


class QueueClient:
    """One process's connection to the queue. `who` names it in errors and in the queue's status.

    Every method may raise DeadlineError (no answer for wait_s + deadline_s), RefusedError (the queue said no)
    and WireError (a bad message); those that work on a stream RunClosedError.
    """

    def __init__(self, address: str, *, run: str, who: str, deadline_s: float = 60.0) -> None:
        self.who, self.deadline_s = who, deadline_s
        self._channel = Channel(address, run, who, deadline_s)
        self._leases: dict[str, dict[int, int]] = {}  # stream -> ordinal -> epoch

    async def connect(self) -> RunStatus:
        """Say hello. RefusedError 'wrong_run' if the queue serves another run."""
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

    async def status(self) -> dict[str, Any]:
        """Counts, ages, leases, refusals, bytes and versions per stream; what each worker said last."""
        status = (await self._channel.ask("status")).value
        return {**status, "workers": _stats(status["workers"])}

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
        granted = (await self._channel.ask("lease", args, wait_s=wait_s)).value
        leases = [Lease(wire.task_from_wire(task), epoch) for _, epoch, task in granted]
        held_leases = self._leases.setdefault(stream, {})
        held_leases.update({lease.task.ordinal: lease.epoch for lease in leases})
        return leases

    async def renew(self, stats: Mapping[str, Any] | None = None) -> Renewal:
        """Heartbeat of all leases of this client; `stats` replaces what the queue knows of the worker."""
        leases = {name: [[o, e] for o, e in held.items()] for name, held in self._leases.items()}
        value = (await self._channel.ask("renew", {"leases": leases, "stats": wire.pack(stats or {})})).value
        lost = [(stream, ordinal, epoch) for stream, ordinal, epoch in value["lost"]]
        # A lease that was committed while this request was under way is over, but not lost.
        lost = [(s, o, e) for s, o, e in lost if self._leases.get(s, {}).get(o) == e]
        for stream, ordinal, epoch in lost:
            self._release(stream, ordinal, epoch)
        return Renewal(lost, value["closed"])

    async def commit(self, stream: str, lease: Lease, group: Group) -> None:
        """Hand the finished group over. RefusedError 'fenced' (the lease is over), 'stale' (too old)."""
        payload = wire.encode_group(group)
        args = {
            "stream": stream,
            "ordinal": lease.task.ordinal,
            "epoch": lease.epoch,
            "tokens": payload.tokens,
            "nbytes": payload.nbytes,
            "start_version": payload.start_version,
            "digest": payload.digest,
        }
        await self._end_lease("commit", stream, lease, args, payload.frames)

    async def give_back(self, stream: str, leases: Sequence[Lease]) -> None:
        """Unfinished tasks: others may have them at once."""
        for lease in leases:
            self._release(stream, lease.task.ordinal, lease.epoch)
        pairs = [[lease.task.ordinal, lease.epoch] for lease in leases]
        await self._channel.ask("give_back", {"stream": stream, "leases": pairs})

    async def drop(self, stream: str, lease: Lease, reason: str) -> None:
        """A task that cannot be done ends as DROPPED(reason). RefusedError 'fenced'."""
        args = {"stream": stream, "ordinal": lease.task.ordinal, "epoch": lease.epoch, "reason": reason}
        await self._end_lease("drop", stream, lease, args)

    # ------------------------------------------------------------------ the learner

    async def open(self, stream: str, settings: StreamSettings, snapshot: bytes | None = None) -> Opened:
        """Open the stream, or rewind it to a snapshot under a new lineage. RefusedError 'occupied'."""
        args = {"stream": stream, "settings": settings.to_wire(), "snapshot": snapshot}
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
    ) -> Claim | None:
        """This rank's share of the `index`-th claim of `step`; the same answer however often it is asked.

        whole=False: what is ready now. whole=True: the longest prefix in ordinal order within max_tokens
        a rank, once it cannot grow. None after wait_s.
        """
        args = {"stream": stream, "learner_epoch": learner_epoch, "step": step, "index": index, "rank": rank}
        args |= {"max_tokens": max_tokens, "whole": whole}
        answer = await self._channel.ask("claim", args, wait_s=wait_s)
        if answer.value is None:
            return None
        return Claim(_groups(answer), answer.value["last"], answer.value["so_far"])

    async def trained(self, stream: str, *, learner_epoch: int, step: int) -> Trained:
        """The step is done: its groups are TRAINED and version step + 1 is published, for admission."""
        answer = await self._channel.ask(
            "trained", {"stream": stream, "learner_epoch": learner_epoch, "step": step}
        )
        value = answer.value
        return Trained(value["version"], _stats(value["stats"]), value["depth"])

    async def reject(self, stream: str, *, learner_epoch: int, step: int, reason: str) -> int:
        """The step's groups are DROPPED(reason) and the step starts anew at index 0. Returns how many."""
        args = {"stream": stream, "learner_epoch": learner_epoch, "step": step, "reason": reason}
        return (await self._channel.ask("reject", args)).value

    async def collect(self, stream: str, *, learner_epoch: int, wait_s: float) -> list[Group]:
        """Take all ready groups of an unbounded stream for good; [] after wait_s."""
        args = {"stream": stream, "learner_epoch": learner_epoch}
        return _groups(await self._channel.ask("collect", args, wait_s=wait_s))

    async def snapshot(self, stream: str, *, learner_epoch: int) -> bytes:
        """Where the stream stands after the last trained step, for `open`. Opaque."""
        return (await self._channel.ask("snapshot", {"stream": stream, "learner_epoch": learner_epoch})).value

    # ------------------------------------------------------------------ leases

    async def _end_lease(
        self, op: str, stream: str, lease: Lease, args: dict[str, Any], frames: Sequence[wire.Buffer] = ()
    ) -> None:
        """The lease is over with the answer, whatever it is; without one it stays ours to renew."""
        try:
            await self._channel.ask(op, args, frames)
        except (RefusedError, RunClosedError):
            self._release(stream, lease.task.ordinal, lease.epoch)
            raise
        self._release(stream, lease.task.ordinal, lease.epoch)

    def _release(self, stream: str, ordinal: int, epoch: int) -> None:
        held = self._leases.get(stream, {})
        if held.get(ordinal) == epoch:
            del held[ordinal]


def _stats(packed: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    return {name: wire.unpack(stats) for name, stats in packed.items()}


def _groups(answer: Answer) -> list[Group]:
    """The groups whose frames follow the envelope, as many frames each as value['groups'] says."""
    groups, at = [], 0
    for count in answer.value["groups"]:
        groups.append(wire.decode_group([frame.buffer for frame in answer.frames[at : at + count]]))
        at += count
    return groups


class BlockingClient:
    """`QueueClient` for a plain thread: the same methods, each waiting for its result.

    The client lives on an event loop in a thread of its own; several threads may call at once.
    """

    def __init__(self, address: str, *, run: str, who: str, deadline_s: float = 60.0) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{who} queue", daemon=True)
        self._thread.start()
        self._client = QueueClient(address, run=run, who=who, deadline_s=deadline_s)

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
