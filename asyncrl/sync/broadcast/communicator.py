"""The group of one broadcast: learner rank 0 as its rank 0, and all ranks of one engine of vLLM.

    learner rank 0 ── id, over the control line ─▸ the engine's ranks
    all join by it ─▸ broadcast, once for each chunk ─▸ destroy

Between GPUs the communicator is vLLM's `PyNcclCommunicator`. vLLM has none for CPUs, where it is `GlooCommunicator`.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Protocol

import msgpack
import torch
import torch.distributed as dist

from asyncrl.device import accelerator
from asyncrl.errors import DeadlineError
from asyncrl.rpc.ports import first_free, numeric
from asyncrl.sync.channels.addresses import own_address

ID_BYTES = 128
"""Bytes of an id of NCCL, the only size that vLLM accepts."""


class Communicator(Protocol):
    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None: ...

    def destroy(self) -> None:
        """Leave the group, from any thread. Between GPUs this ends a broadcast in progress."""


def new_group(
    device: torch.device, host: str, ports: range, deadline_s: float
) -> tuple[bytes, Callable[[int], Communicator]]:
    """The id of a new group, and join(world), which blocks until all have joined. host, ports: of this machine, where
    gloo's members meet. Raises OSError."""
    if not accelerator.is_accelerator(device):
        return _gloo_group(numeric(host), ports, deadline_s)
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

    unique_id = bytes(NCCLLibrary().ncclGetUniqueId())
    return unique_id, lambda world: uid_init_process_group(unique_id, 0, world, device.index)


def _gloo_group(address: str, ports: range, deadline_s: float) -> tuple[bytes, Callable[[int], Communicator]]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = first_free(ports, lambda port: socket.create_server((address, port), family=family))
    port, timeout = listener.getsockname()[1], timedelta(seconds=deadline_s)
    store = dist.TCPStore(
        address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    place = msgpack.packb([secrets.token_hex(16), address, port, deadline_s]).ljust(ID_BYTES, b"\0")
    return place, lambda world: GlooCommunicator(place, 0, world, store)


def _place(packed: bytes) -> tuple[str, str, int, float]:
    """The secret, the address and port of the store, and the deadline in seconds."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(packed)
    secret, address, port, deadline_s = unpacker.unpack()
    return secret, address, port, deadline_s


class GlooCommunicator:
    """A group of gloo with the interface of vLLM's communicator. place: the id"""

    def __init__(self, place: bytes, rank: int, world: int, store: dist.Store | None = None) -> None:
        secret, address, port, deadline_s = _place(place)
        self._timeout = timedelta(seconds=deadline_s)
        self._store: dist.Store | None = store or dist.TCPStore(address, port, None, False, self._timeout)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address(address, port))]
        meeting = dist.PrefixStore(secret, self._store)
        self._group: Any = dist.ProcessGroupGloo(meeting, rank, world, options)

    @classmethod
    def from_unique_id_bytes(
        cls, unique_id_bytes: bytes, rank: int, world_size: int, device: object
    ) -> GlooCommunicator:
        """Raises DeadlineError. In a thread of its own: `TCPStore` waits without end for a process that stands
        still."""
        made = Future[GlooCommunicator]()

        def work() -> None:
            try:
                made.set_result(cls(unique_id_bytes, rank, world_size))
            except Exception as error:
                made.set_exception(error)

        threading.Thread(target=work, name="join", daemon=True).start()
        *_, deadline_s = _place(unique_id_bytes)
        if not wait([made], deadline_s).done:
            raise DeadlineError(f"rank {rank}", "learner rank 0", "the group of a broadcast", deadline_s)
        return made.result()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Raises RuntimeError: a member is gone, or the deadline is over."""
        self._group.broadcast(tensor, src).wait(self._timeout)

    def destroy(self) -> None:
        self._group = self._store = None
