"""Learner rank 0's end: it takes a version whole, and sends it to the engine whose turn it is.

      learner ranks ── snapshots, over the channels that `auto` chooses ─▸ whole copy in the memory of the host
      turn thread   waits for its turn ─▸ whole copy ─▸ offer ─▸ meets the engine ─▸ waits until that hangs up
      its sender    ─────────────────────────────────────────── joins the group ─▸ sends chunks

Each engine's turn has two threads of its own. Rank 0 is a subscriber of the weight stream like any other: no rank, and
not the trainer, waits for an engine. Other engines wait for their turn, and go on decoding.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

import torch

from asyncrl.config.schema import SyncConfig
from asyncrl.device import accelerator
from asyncrl.device.streams import SideStream
from asyncrl.errors import DeadlineError, WeightSyncError
from asyncrl.rpc.message import Fields
from asyncrl.rpc.sockets import Wakeup
from asyncrl.sync.broadcast.communicator import Communicator, new_group
from asyncrl.sync.channels.channel import SOURCE, Meeting
from asyncrl.sync.channels.listener import ChannelListener
from asyncrl.sync.channels.transfer_locks import FairLock
from asyncrl.sync.layout.layout import ITEM_BYTES, Layout
from asyncrl.sync.stream.sender import HUNG_UP, TransferCounts
from asyncrl.sync.stream.snapshot import SnapshotEvictedError
from asyncrl.sync.stream.subscriber import Subscriber
from asyncrl.sync.tensors.shards import Shards, TensorBuffer, flat_bytes
from asyncrl.telemetry import tracing
from asyncrl.types import Version

MEET_S = 10.0
"""Longest wait for the engine whose turn it is."""

LONGEST_QUEUE = 16
"""How many turns of others an engine waits for, each of at most sync.deadline_s."""

GRACE_S = 1.0
"""Seconds by which an engine may have all of a version before the sender notices."""

log = logging.getLogger(__name__)


class WholeCopy:
    """One version in the memory of the host. One thread at a time.

    whole: all parameters · pinned: the copy feeds an accelerator · open_stream: of versions, into the given memory
    """

    def __init__(self, whole: Layout, pinned: bool, open_stream: Callable[[Shards], Subscriber]) -> None:
        # The widest first: vLLM views the parts of a chunk in their dtypes, where they lie.
        order = sorted(whole, key=lambda name: -ITEM_BYTES[whole[name].dtype])
        self._shards = TensorBuffer({name: whole[name] for name in order}, accelerator.CPU, pinned).shards
        self._stream = open_stream(self._shards)
        self._version: Version | None = None

    def take(self, version: Version) -> Shards:
        """Exactly this version, until the next call. Raises as `Subscriber.stage`."""
        if self._version != version:
            self._version = None
            self._stream.stage(version)
            self._version = version
        return self._shards


class Broadcaster:
    """name: of this end · host: of this machine · device: from which chunks are sent"""

    def __init__(
        self,
        name: str,
        copy: WholeCopy,
        config: SyncConfig,
        host: str,
        device: torch.device,
        counts: TransferCounts,
    ) -> None:
        self._name, self._copy, self._config = name, copy, config
        self._host, self._device, self._counts = host, device, counts
        self._turns = FairLock()

    def turn(self, who: str, version: Version, ranks: int, reply: Callable[[Fields], None]) -> None:
        """Send a version to an engine of so many ranks. Does not wait; `reply` gets the offer, or why there is none."""

        def work() -> None:
            try:
                with (
                    self._turns.held(LONGEST_QUEUE * self._config.deadline_s),
                    tracing.span("weights", "broadcast", version=version, generator=who) as at_end,
                ):
                    at_end["bytes"] = self._transfer(who, version, ranks, reply)
            except SnapshotEvictedError as error:
                reply({"status": "gone", "detail": str(error)})
            except Exception as error:
                self._counts.add("failures")
                log.warning("version %d to %s: %s", version, who, str(error))  # the error holds the buffers
                reply({"status": "failed", "detail": str(error)})

        threading.Thread(target=work, name=f"version {version} to {who}", daemon=True).start()

    def wait_idle(self, seconds: float) -> None:
        """Wait until the turns so far have ended, at most so long."""
        with suppress(TimeoutError), self._turns.held(seconds):
            pass

    def _transfer(self, who: str, version: Version, ranks: int, reply: Callable[[Fields], None]) -> int:
        """Returns the bytes sent. Raises the error of a turn that its engine did not end in order."""
        config, what = self._config, f"version {version}"
        shards = self._copy.take(version)
        group, join = new_group(self._device, self._host, config.port_range, config.deadline_s)
        listener = ChannelListener(self._host, config.port_range)
        params = [[name, param.dtype, list(param.shape)] for name, param in shards.layout.items()]
        offer = {"listener": listener.offer, "group": group, "bucket": config.bucket_bytes, "params": params}
        reply({"status": "offered", **offer})
        meet_s = min(MEET_S, config.deadline_s)
        with listener.accept(Meeting(what, SOURCE, self._name, who, self._device, meet_s)) as joined:
            data = chunks(shards, config.bucket_bytes, self._device)
            sending = Sending(partial(join, ranks + 1), data, self._device)
            try:
                self._wait(who, what, joined.fileno(), sending)
            finally:
                sending.stop()
        self._counts.add("transfers")
        sent = ranks * sum(param.bytes for param in shards.layout.values())
        self._counts.add("bytes", sent)
        return sent

    def _wait(self, who: str, what: str, joined: int, sending: Sending) -> None:
        """Wait until the engine closes the connection, which it does once its ranks have everything."""
        deadline = time.monotonic() + self._config.deadline_s
        poll = select.poll()
        poll.register(joined, HUNG_UP)
        poll.register(sending.ended, select.POLLIN)
        while ready := [fd for fd, _ in poll.poll(1000 * max(0.0, deadline - time.monotonic()))]:
            if joined not in ready:
                sending.done.result()
                poll.unregister(sending.ended)
                continue
            try:
                sending.done.result(GRACE_S)
            except TimeoutError:
                raise WeightSyncError(f"{who} hung up before it had {what}") from None
            return
        raise DeadlineError(self._name, who, f"its end of {what}", self._config.deadline_s)


class Sending:
    """Sends in a thread of its own: a group of NCCL that never comes about keeps it for ever.

    done: fails with the error of sending · ended: readable once it is done
    """

    def __init__(
        self, join: Callable[[], Communicator], data: Iterator[torch.Tensor], device: torch.device
    ) -> None:
        self.done, self.ended = Future[None](), Wakeup()
        self.done.add_done_callback(lambda _: self.ended.set())
        self._join, self._data, self._device = join, data, device
        self._communicator: Communicator | None = None
        self._stopped = False
        threading.Thread(target=self._run, name="broadcast", daemon=True).start()

    def stop(self) -> None:
        """Leave the group, in the middle of a broadcast too."""
        self._stopped = True
        self._leave()
        self.ended.close()

    def _run(self) -> None:
        try:
            communicator = self._communicator = self._join()
            with SideStream(self._device).entered() as stream:
                for chunk in self._data:
                    if self._stopped:
                        break
                    communicator.broadcast(chunk, 0, stream)
                    accelerator.wait_for_stream(self._device)
            self.done.set_result(None)
        except Exception as error:
            self.done.set_exception(error)
        if self._stopped:
            self._leave()  # it was stopped while it joined

    def _leave(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.destroy()


def chunks(shards: Shards, most_bytes: int, device: torch.device) -> Iterator[torch.Tensor]:
    """[bytes] uint8 on `device`: whole parameters one after another until they are more than `most_bytes`, as vLLM's
    receiver cuts its stream."""
    parts: list[torch.Tensor] = []
    for whole in shards.parts:
        parts.append(flat_bytes(whole).to(device, non_blocking=True))
        if sum(part.nbytes for part in parts) > most_bytes:
            yield torch.cat(parts)
            parts = []
    if parts:
        yield torch.cat(parts)
