"""The pool's end of a model that learns: it does the calls of a learner's ranks, and adds the model's column to groups.

    RPC thread             hello · begin, batch, learn, step … ─▸ checked ─▸ CallBarrier ─▸ calls that are due
                                                                                                │
    calls thread           ◂─ replies ── one after the other on all ranks of the model ◂────────┘
    tasks of the worker    groups ─▸ the model as it is now ─▸ columns

A learner begins with an epoch, that of its stream at the queue; from then on requests with an older one are refused.
A process that is started anew has another incarnation and no session: it cannot be mistaken for the one before.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from asyncrl.errors import DeadlineError, RefusedError, WireError
from asyncrl.generator.threads import in_thread
from asyncrl.learner.remote import remote_protocol
from asyncrl.learner.remote.remote_protocol import BAD_FOLDER, BATCH, BEGIN, HELLO, LEARN, NORM, SAVE, STEP
from asyncrl.learner.training.passes import PassResult
from asyncrl.learner.training.requirements import column_of
from asyncrl.pool.trained_model import TrainedModel
from asyncrl.pool.worker import PoolWork
from asyncrl.rpc.keys import ClientKeys
from asyncrl.rpc.message import Fields
from asyncrl.rpc.server import RpcRequest, RpcServer
from asyncrl.telemetry import tracing
from asyncrl.types import Array, Group

Frames = list[bytes]
MAX_RANKS = 1 << 16


@dataclass(slots=True)
class BarrierCall:
    """batches, tickets: of the ranks that have made the call; a ticket is the request that gets the reply"""

    kind: str
    arguments: Mapping[str, Any]
    batches: dict[int, list[Frames]] = field(default_factory=dict)
    tickets: dict[int, RpcRequest] = field(default_factory=dict)


class CallBarrier:
    """The calls of one learner of `world` ranks. Each is due once every rank has made it.

    rank 0   batch · batch · learn 0 ──────── norm 1 ─▸ ┐
    rank 1   batch · learn 0 ── norm 1 ───────────────▸ ├─▸ learn 0 (batches of rank 0, then of rank 1) ▸ norm 1
    """

    def __init__(self, world: int) -> None:
        if not 0 < world <= MAX_RANKS:
            raise WireError(f"a learner of {world} ranks")
        self._world = world
        self._next = [0] * world  # the number of each rank's next call
        self._batches: list[list[Frames]] = [[] for _ in range(world)]
        self._due: dict[int, BarrierCall] = {}

    def batch(self, rank: int, number: int, frames: Frames) -> None:
        """Add a batch to the rank's next call. Raises WireError for another call."""
        self._check(rank, number)
        self._batches[rank].append(frames)

    def call(
        self,
        rank: int,
        number: int,
        kind: str,
        arguments: Mapping[str, Any],
        ticket: RpcRequest,
        batches: int = 0,
    ) -> BarrierCall | None:
        """Note that a rank has made a call, for which it has sent this number of batches. Returns the call if all ranks
        have made it now.

        Raises:
            WireError: it is out of order, or batches are missing
            RefusedError: ("disagree") another rank has made another call
        """
        self._check(rank, number)
        if len(self._batches[rank]) != batches:
            raise WireError(
                f"{kind} {number} of rank {rank}: {len(self._batches[rank])} of {batches} batches"
            )
        call = self._due.setdefault(number, BarrierCall(kind, arguments))
        if call.kind != kind or not _same(call.arguments, arguments):
            raise RefusedError(
                "disagree",
                f"call {number}: rank {rank} makes {kind} {arguments}, another {call.kind} {call.arguments}",
            )
        call.batches[rank], call.tickets[rank] = self._batches[rank], ticket
        self._batches[rank] = []
        self._next[rank] += 1
        return self._due.pop(number) if len(call.tickets) == self._world else None

    def _check(self, rank: int, number: int) -> None:
        if not 0 <= rank < self._world:
            raise WireError(f"rank {rank} of a learner of {self._world}")
        if number != self._next[rank]:
            raise WireError(f"call {number} of rank {rank}, whose next is {self._next[rank]}")


class TrainingServer(PoolWork):
    """`PoolWork` of a model that learns, in rank 0 of its process. host: address of this machine for the learner."""

    def __init__(self, model: TrainedModel, host: str, keys: ClientKeys | None) -> None:
        self._model, self._incarnation = model, uuid.uuid4().hex
        self._column = column_of(model.name, model.config)
        self._steps, self._epoch, self._session = 0, -1, ""
        self._barrier: CallBarrier | None = None
        self._begun = threading.Event()
        self._broken: BaseException | None = None
        self._due: SimpleQueue[BarrierCall | None] = SimpleQueue()
        self._server = RpcServer(host, f"pool of the {model.name}", self._handle, keys)
        self._thread = threading.Thread(
            target=self._run_calls, name=f"calls of the {model.name}", daemon=True
        )
        self._thread.start()

    @property
    def where(self) -> dict[str, str]:
        """For the run's registry."""
        return {"endpoint": self._server.endpoint, "incarnation": self._incarnation}

    def close(self) -> None:
        self._server.close()
        self._due.put(None)

    # ------------------------------------------------------------------ groups

    def stats(self) -> Mapping[str, float]:
        """steps made · malformed requests · strangers: peers without the right keys."""
        return {"steps": self._steps, "malformed": self._server.malformed, "strangers": self._server.refused}

    async def ready(self) -> None:
        """Returns once a learner has begun. Raises DeadlineError after `learner.groups_deadline_s`."""
        seconds = self._model.config.learner.groups_deadline_s
        if not await in_thread(self._begun.wait, seconds):
            who, what = f"the pool of the {self._model.name}", "the checkpoint to begin with"
            raise DeadlineError(who, "the learner", what, seconds)

    def check(self) -> None:
        """Raises the error of a call that failed."""
        if self._broken is not None:
            raise self._broken

    async def columns(self, group: Group) -> Mapping[str, Array]:
        """By the present weights. The learner deals with values that are not finite, as for a colocated model."""
        return {self._column: (await in_thread(self._model.predict, group)).numpy()}

    # ------------------------------------------------------------------ requests, in the RPC thread

    def _handle(self, request: RpcRequest) -> Fields | None:
        fields = request.fields
        if request.kind == HELLO:
            return {"incarnation": self._incarnation}
        if request.kind == BEGIN:
            self._let_begin(fields["incarnation"], fields["epoch"], fields["world"])
        elif not self._session or fields["session"] != self._session:
            raise RefusedError("session", f"this pool has no session {fields['session']!r}")
        assert self._barrier is not None
        rank, number = fields["rank"], fields["call"]
        if request.kind == BATCH:
            remote_protocol.decode_batch(fields["frames"], self._model.reads)
            self._barrier.batch(rank, number, fields["frames"])
            return {}
        arguments = remote_protocol.call_arguments(request.kind, fields)
        call = self._barrier.call(rank, number, request.kind, arguments, request, fields.get("batches", 0))
        if call is not None:
            self._due.put(call)
        return None

    def _let_begin(self, incarnation: str, epoch: int, world: int) -> None:
        """The first rank of a new learner ends the session of the one before."""
        if incarnation != self._incarnation:
            raise RefusedError("session", f"this pool is not {incarnation!r}: see the run's registry")
        if epoch < self._epoch:
            raise RefusedError("fenced", f"learner epoch {epoch}, this pool has begun with {self._epoch}")
        if epoch > self._epoch:
            self._barrier = CallBarrier(world)
            self._epoch, self._session = epoch, self._session_of(epoch)

    def _session_of(self, epoch: int) -> str:
        return f"{self._incarnation}/{epoch}"

    # ------------------------------------------------------------------ calls, in their thread

    def _run_calls(self) -> None:
        while (call := self._due.get()) is not None:
            try:
                with tracing.span("calls", call.kind, tracing.RESOLUTION_S):
                    replies = self._replies(call)
            except RefusedError as refusal:
                for request in call.tickets.values():
                    self._server.refuse(request, refusal.reason, refusal.detail)
            except BaseException as error:
                self._broken = error  # gradients, or more, are not what the learner thinks: this process ends
                return
            else:
                for rank, request in call.tickets.items():
                    self._server.reply(request, replies[rank])

    def _replies(self, call: BarrierCall) -> Mapping[int, Fields]:
        """Do the call. Returns the reply to each rank. Raises RefusedError."""
        if call.kind == LEARN:
            return self._learned(call)
        value: Any = self._model.together(call.kind, dict(call.arguments))
        if call.kind in (BEGIN, SAVE) and value:
            raise RefusedError(BAD_FOLDER, f"{call.kind}: {value}")
        reply: Fields = {"value": float(value)} if call.kind in (NORM, STEP) else {}
        self._steps += call.kind == STEP
        if call.kind == BEGIN:
            reply = {"session": self._session_of(call.arguments["epoch"])}
            self._begun.set()
        return dict.fromkeys(call.tickets, reply)

    def _learned(self, call: BarrierCall) -> Mapping[int, Fields]:
        batches = [frames for rank in sorted(call.batches) for frames in call.batches[rank]]
        found = iter(self._model.together(LEARN, {**call.arguments, "batches": batches}))
        replies = {}
        for rank in sorted(call.batches):
            mine = [PassResult.from_wire(next(found)) for _ in call.batches[rank]]
            replies[rank] = {"found": PassResult.total(mine).to_wire()}
        return replies


def _same(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Equal; NaN equals NaN, as a scale that ranks agree on."""
    return mine.keys() == theirs.keys() and all(
        mine[name] == theirs[name] or (mine[name] != mine[name] and theirs[name] != theirs[name])
        for name in mine
    )
