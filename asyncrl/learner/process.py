"""The learner's process: one rank, by RANK and WORLD_SIZE, or the only one."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import signal
import threading
from collections.abc import Mapping
from types import FrameType

import torch

from asyncrl.config.schema import Config
from asyncrl.device import accelerator
from asyncrl.device.turns import TURN, DeviceLock, DeviceTurn, dealt, devices_here, run_locks
from asyncrl.errors import StoppedError
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.models.attention import check_flash
from asyncrl.learner.ranks import process_group
from asyncrl.learner.startup import open_backend, open_trainer
from asyncrl.models.loading import checkpoint_shapes
from asyncrl.queue.client.client import BlockingClient, QueueClient
from asyncrl.rpc.keys import ClientKeys, client_keys
from asyncrl.sync.broadcast.stream import BroadcastPublisher
from asyncrl.sync.channels.addresses import own_host
from asyncrl.sync.factory import open_publisher
from asyncrl.sync.layout.layout import whole_layout
from asyncrl.sync.stream.publisher import RankPublisher
from asyncrl.sync.tensors.quantization import QuantizedShards
from asyncrl.sync.tensors.shards import LiveShards, Shards
from asyncrl.system.rank_process import end_rank, rank_and_world
from asyncrl.system.signals import stop_signals
from asyncrl.telemetry import decisions
from asyncrl.telemetry.status import ProcessStatus

log = logging.getLogger(__name__)


def run_learner(config: Config, heldout: Mapping[str, int], status: ProcessStatus) -> None:
    """Run this rank until the run ends. heldout: the number of tasks of each evaluation set, by its name.

    SIGINT and `stop_signals` request a clean end of all ranks, whichever gets them. A rank of several leaves the
    process here when all went well. Raises StoppedError after a requested stop; KeyboardInterrupt instead, after
    SIGINT.
    """
    lock = rank_lock(config)
    if lock is not None:
        with status.waiting(TURN, config.placement.turn_deadline_s):
            lock.take(config.placement.turn_deadline_s)
    backend = open_rank(config)
    turn = DeviceTurn(lock, backend.park, backend.fetch, status.waiting, config.placement.turn_deadline_s)
    status.loaded.set()
    keys = client_keys(config.queue.keys)
    client = BlockingClient(QueueClient.of(config, f"learner rank {backend.rank}", status))
    stop = threading.Event()
    interrupts: list[int] = []
    for number in stop_signals():
        signal.signal(number, lambda *_: stop.set())
    code = 0
    try:
        client.connect()
        stop_on_interrupt(stop, interrupts)  # before this there is nothing to save
        make_publisher = functools.partial(_publisher, config, backend, keys)
        trainer = open_trainer(
            config,
            backend,
            client,
            make_publisher,
            keys=keys,
            stop=stop,
            heldout=heldout,
            status=status,
            turn=turn,
        )
        trainer.run()
    except StoppedError as stopped:
        if backend.world == 1 and not interrupts:
            raise
        log.info("%s", stopped)
        if interrupts:
            raise KeyboardInterrupt from None
        code = stopped.exit_code
    finally:
        client.close()
        backend.close()
    if backend.world > 1:
        end_rank(code)


def rank_lock(config: Config) -> DeviceLock | None:
    """The lock of this rank's device; None unless the learner takes turns with generators."""
    if not config.placement.colocate:
        return None
    rank, world = rank_and_world()
    here = devices_here()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    devices = [here[local % len(here)]] if here else dealt(rank, world, config.generator.count)
    return DeviceLock(run_locks(config.run.dir, config.run.name), devices, f"learner rank {rank}")


def open_rank(config: Config) -> Backend:
    """Set up this process for the learner's section, and load its part of the models."""
    if config.learner.threads:
        torch.set_num_threads(config.learner.threads)
    decisions.note("threads", torch.get_num_threads())
    torch.manual_seed(config.run.seed)
    accelerator.limit_memory(process_group.own_device(), config.learner.gpu_memory_share)
    check_flash(config, process_group.own_device())
    return open_backend(config)


def _publisher(config: Config, backend: Backend, keys: ClientKeys | None, lineage: int) -> RankPublisher:
    sync, live = config.sync, _live(config, backend)
    if sync.host is None:  # then the one by which the queue's machine reaches this one
        sync = dataclasses.replace(sync, host=own_host(config.queue.address))
    publisher = open_publisher(config.run.name, backend.rank, backend.world, live, sync, lineage, keys)
    if isinstance(publisher, BroadcastPublisher):
        whole = whole_layout(checkpoint_shapes(config.model)[0])
        publisher.meet(backend.exchange(publisher.endpoint), whole)
    return publisher


def _live(config: Config, backend: Backend) -> LiveShards:
    """This rank's part of what generators take."""
    live = Shards(backend.layout(), backend.local_tensors())
    quantization = config.generator.quantization
    return live if quantization is None else QuantizedShards(live, quantization, process_group)


def stop_on_interrupt(stop: threading.Event, interrupts: list[int]) -> None:
    """The first Ctrl-C requests a stop, the second one ends the process at once. Each is appended to `interrupts`."""

    def on_interrupt(number: int, _frame: FrameType | None) -> None:
        interrupts.append(number)
        if len(interrupts) > 1:
            raise KeyboardInterrupt
        stop.set()
        text = "stopping: the learner writes a checkpoint and ends; Ctrl-C again ends it at once"
        # On a thread: the signal may have interrupted a log line.
        threading.Thread(target=log.warning, args=(text,)).start()

    signal.signal(signal.SIGINT, on_interrupt)
