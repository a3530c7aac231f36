"""Both ends of `sync.backend=vllm`.

engine                                          learner rank 0
newest, held ──────────────────────────────────▸ as in the weight stream
turn(v)      ──────────────────────────────────▸ Broadcaster
its ranks join the group, receive and load ◂──── Offer, then chunks
closes the offer ──────────────────────────────▸ the next engine's turn
"""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

from asyncrl.config.rules import require
from asyncrl.device import accelerator
from asyncrl.rpc.message import Fields
from asyncrl.rpc.server import RpcRequest
from asyncrl.sync.broadcast.broadcaster import LONGEST_QUEUE, MEET_S, Broadcaster, WholeCopy
from asyncrl.sync.channels.addresses import LOOPBACK
from asyncrl.sync.channels.channel import TARGET, Meeting
from asyncrl.sync.channels.listener import connected
from asyncrl.sync.layout.layout import ITEM_BYTES, Layout
from asyncrl.sync.stream.link import GRACE_S
from asyncrl.sync.stream.publisher import Publisher
from asyncrl.sync.stream.sender import HUNG_UP
from asyncrl.sync.stream.subscriber import Subscriber
from asyncrl.sync.tensors.shards import Shards
from asyncrl.types import Version


class BroadcastPublisher(Publisher):
    """A publisher for the whole copy of rank 0, which sends that to engines."""

    _broadcaster: Broadcaster | None = None

    def meet(self, endpoints: Sequence[str], whole: Layout) -> None:
        """Called before the first version. endpoints: of all ranks · whole: all parameters. Raises ConfigError."""
        if self.rank > 0:
            return
        device, host = self._source.device, self._config.host or LOOPBACK
        on_gpu = accelerator.is_accelerator(device)
        rule = "sends with vLLM's communicator, and learner rank 0 has no package vllm"
        remedy = "pip install 'asyncrl[vllm]'"
        require(not on_gpu or find_spec("vllm") is not None, "sync.backend", "vllm", rule, remedy)

        def open_stream(into: Shards) -> Subscriber:
            return Subscriber(f"{self.name}'s copy", endpoints, into, self._config, self.lineage, self._keys)

        copy = WholeCopy(whole, on_gpu, open_stream)
        broadcaster = Broadcaster(self.name, copy, self._config, host, device, self._server.counts)
        self._broadcaster = broadcaster
        self._server.add_handler("turn", partial(self._turn, broadcaster))

    def close(self, wait_s: float = 0.0) -> None:
        deadline = time.monotonic() + wait_s
        if self._broadcaster is not None:
            self._broadcaster.wait_idle(wait_s)
        super().close(max(0.0, deadline - time.monotonic()))

    def _turn(self, broadcaster: Broadcaster, request: RpcRequest) -> None:
        reply = partial(self._server.server.reply, replace(request, fields={}))
        version, ranks = int(request.fields["version"]), int(request.fields["ranks"])
        broadcaster.turn(self._member(request), version, ranks, reply)


@dataclass(frozen=True, slots=True)
class Offer:
    """A version that learner rank 0 keeps for one engine until `joined` is closed.

    group: the id by which the engine's ranks join · bucket_bytes: of a chunk · params: name, dtype and shape of each
    parameter, in their order
    """

    joined: socket.socket
    group: bytes
    bucket_bytes: int
    params: list[tuple[str, str, list[int]]]

    @property
    def bytes(self) -> int:
        """The size of the version."""
        return sum(math.prod(shape) * ITEM_BYTES[dtype] for _, dtype, shape in self.params)

    @property
    def stands(self) -> bool:
        """Whether learner rank 0 still waits for the engine."""
        poll = select.poll()
        poll.register(self.joined, HUNG_UP)
        return not poll.poll(0)


class BroadcastSubscriber(Subscriber):
    """A subscriber that takes nothing itself: learner rank 0 sends versions to the ranks of its engine."""

    def turn(self, version: Version, ranks: int) -> Offer:
        """Wait until it is this engine's turn, with exactly this version. Raises as `stage`."""
        self._connect(GRACE_S)
        link, deadline_s = self._links[0], self._config.deadline_s
        fields: Fields = self._as_member(lambda: link.turn(version, ranks, LONGEST_QUEUE * deadline_s))
        meet_s = min(MEET_S, deadline_s)
        meeting = Meeting(f"version {version}", TARGET, self.who, link.whom, accelerator.CPU, meet_s)
        joined = connected("tcp", fields["listener"], meeting)
        return Offer(joined, fields["group"], fields["bucket"], [tuple(one) for one in fields["params"]])
