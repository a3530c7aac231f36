"""The learner's end of a model that learns on a pool: its passes and steps are made there, in step with the policy's.

    trainer thread   ─ learn ─ the policy's passes ─ results: wait ─ norm: wait ─────── optimizer_step: wait ─▸ publish
                         │                               ▲                    ▲                     ▲
    the pool             └────── the model's passes ──────┴────────────────────┴─────────────────────┘

Each rank of the learner has a connection of its own and makes the same calls in the same order. The pool does a call
once all of them have made it, with the batches of all ranks in their order: the order of arrival changes nothing.
"""

from __future__ import annotations

import errno
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.errors import DeadlineError, PoolLostError, RefusedError, WireError
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.remote import remote_protocol
from asyncrl.learner.remote.remote_protocol import BATCH, BEGIN, FORGET, HELLO, LEARN, NORM, SAVE, STEP
from asyncrl.learner.training.objectives import auxiliary_objective
from asyncrl.learner.training.passes import Inspect, Objective, PassResult
from asyncrl.queue.client.client import BlockingClient
from asyncrl.rpc.client import RpcClient, RpcReply
from asyncrl.rpc.keys import ClientKeys
from asyncrl.telemetry import tracing
from asyncrl.types import Version

HELLO_S = 5.0
"""For a reply that a live pool gives at once; then the registry is read again."""

RETRY_S = 0.2
"""Between two reads of the registry, while it names a process that does not answer."""


class RemoteModel:
    """`LearningModel` of one rank of the learner.

    Calls that wait raise DeadlineError after `placement.<name>.deadline_s`, RefusedError if the pool could not do the
    work, and PoolLostError once it is gone: its gradients are lost, but a checkpoint has the rest. registry: the queue,
    which has the place of the pool.
    """

    def __init__(
        self, name: str, config: Config, backend: Backend, registry: BlockingClient, keys: ClientKeys | None
    ) -> None:
        self.name, self._backend, self._registry, self._keys = name, backend, registry, keys
        self._who, self._whom = f"learner rank {backend.rank}", f"the pool of the {name}"
        self._deadline_s = config.placement.places[name].deadline_s
        self._save_deadline_s = config.checkpoint.deadline_s
        self._reads = auxiliary_objective(name, config).reads
        self._client: RpcClient | None = None
        self._session = ""
        self._version: Version = 0
        self._calls = itertools.count()
        self._learning: deque[RpcReply] = deque()

    # ------------------------------------------------------------------ the run

    def open(self, epoch: int, checkpoint: str | None, version: Version) -> None:
        """Collective: begin.

        epoch       of this learner; the pool refuses older ones
        checkpoint  name of the folder whose model the pool takes; None: it begins anew
        version     of the policy, for errors
        """
        self._version = version
        until = time.monotonic() + self._deadline_s
        while (incarnation := self._connect(until)) is None:
            pass
        world = self._backend.world
        begun = self._call(BEGIN, incarnation=incarnation, epoch=epoch, world=world, checkpoint=checkpoint)
        self._session = str(self._wait(begun, f"the model for version {version}").get("session"))

    def check(self) -> None:
        """Raises PoolLostError if the pool is gone; for waits for something else."""
        if self._client is not None:
            self._client.check()

    def save(self, folder: Path) -> Callable[[], None]:
        """Collective: the pool writes the model as it is now into that folder of the run's checkpoints. Returns a
        function that waits until it is written, in any thread, and raises OSError and the errors of the class."""
        reply = self._call(SAVE, folder=folder.name)

        def written() -> None:
            try:
                self._wait(reply, f"its part of {folder.name}", self._save_deadline_s)
            except RefusedError as refusal:
                if refusal.reason != remote_protocol.BAD_FOLDER:
                    raise
                raise OSError(errno.EIO, refusal.detail, str(folder)) from None

        return written

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    # ------------------------------------------------------------------ training

    def learn(
        self,
        objective: Objective,
        batches: Sequence[MicroBatch],
        passes: int,
        version: Version,
        inspect: Inspect | None = None,
    ) -> None:
        """The pool has the same objective of the same configuration, and makes passes of its own number."""
        self._version = version
        call, mine = next(self._calls), batches if self._backend.is_data_leader else ()
        for batch in mine:
            self._request(BATCH, {"call": call, "frames": remote_protocol.encode_batch(batch, self._reads)})
        self._learning.append(self._request(LEARN, {"call": call, "batches": len(mine), "version": version}))

    def take_results(self, wait: bool) -> PassResult:
        every = []
        while self._learning and (wait or self._learning[0].done()):
            fields = self._wait(self._learning.popleft(), f"its passes for version {self._version}")
            every.append(PassResult.from_wire(fields.get("found")))
        return PassResult.total(every)

    def gradient_norm(self, scale: float) -> float:
        return self._number(self._call(NORM, scale=float(scale)), "the gradient norm")

    def optimizer_step(self, scale: float, lr: float) -> float:
        return self._number(self._call(STEP, scale=float(scale), lr=float(lr)), "the optimizer step")

    def forget_gradients(self) -> None:
        self._learning.clear()
        self._call(FORGET)

    # ------------------------------------------------------------------ the connection

    def _connect(self, until: float) -> str | None:
        """Connect to the pool. Returns its incarnation; None if the process in the registry does not answer, which may
        be one that has died."""
        left_s = until - time.monotonic()
        posted = self._registered(left_s)
        client = RpcClient(str(posted["endpoint"]), self._who, self._whom, PoolLostError, self._keys)
        try:
            fields = client.call(HELLO, {}, "an answer to a hello", min(HELLO_S, left_s))
            if fields.get("incarnation") == posted["incarnation"]:
                self._client = client
                return str(posted["incarnation"])
        except (DeadlineError, PoolLostError, RefusedError):
            pass
        client.close()
        time.sleep(min(RETRY_S, max(0.0, until - time.monotonic())))
        return None

    def _registered(self, left_s: float) -> Mapping[str, Any]:
        """The pool's entry in the run's registry. Raises DeadlineError."""
        detail = "the process in the run's registry does not answer"
        try:
            if left_s > 0:
                key = remote_protocol.registry_key(self.name)
                posted: Mapping[str, Any] = self._registry.lookup(key, left_s)
                return posted
        except DeadlineError as late:
            detail = str(late)
        what = f"a process to begin version {self._version} with"
        raise DeadlineError(self._who, self._whom, what, self._deadline_s, detail)

    def _call(self, kind: str, **arguments: Any) -> RpcReply:
        return self._request(kind, {"call": next(self._calls), **arguments})

    def _request(self, kind: str, fields: Mapping[str, Any]) -> RpcReply:
        sender = {"session": self._session, "rank": self._backend.rank}
        return self._open_client.request(kind, {**sender, **fields})

    def _number(self, reply: RpcReply, what: str) -> float:
        value = self._wait(reply, f"{what} of version {self._version}").get("value")
        if type(value) is not float:
            raise WireError(f"{self._whom} replies {value!r} for {what}")
        return value

    def _wait(self, reply: RpcReply, what: str, seconds: float | None = None) -> Mapping[str, Any]:
        with tracing.span(
            "pools", f"wait/{self.name}", tracing.RESOLUTION_S, version=self._version, what=what
        ):
            return self._open_client.wait(reply, what, seconds or self._deadline_s)

    @property
    def _open_client(self) -> RpcClient:
        assert self._client is not None, "open comes first"
        return self._client
