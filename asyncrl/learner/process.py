"""The learner's process: one rank as torchrun's RANK and WORLD_SIZE say, or the only one."""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import torch

from asyncrl.config.schema import Config, SyncConfig
from asyncrl.errors import StoppedError
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.backends.factory import make_backend
from asyncrl.learner.backends.fsdp.fsdp import end_rank
from asyncrl.learner.remote.remote_model import RemoteModel
from asyncrl.learner.startup import open_trainer
from asyncrl.learner.training import requirements
from asyncrl.queue.client.client import BlockingClient, QueueClient
from asyncrl.rpc.keys import ClientKeys, client_keys
from asyncrl.sync.channels.torch_transport import own_host
from asyncrl.sync.factory import open_publisher
from asyncrl.sync.stream.publisher import RankPublisher
from asyncrl.sync.tensors.shards import Shards
from asyncrl.system.signals import stop_signals
from asyncrl.telemetry.status import ProcessStatus

log = logging.getLogger(__name__)


def run_learner(
    config: Config, heldout: Mapping[str, int] | None = None, status: ProcessStatus | None = None
) -> None:
    """Run this rank until the run ends.

    SIGINT and `stop_signals` request a clean end of all ranks, whichever gets them. A rank of several leaves the
    process here when all went well.

    Args:
        heldout: Number of tasks of each evaluation set, by its name.
        status: Shows what this rank waits for.

    Raises:
        StoppedError: After a requested stop.
        KeyboardInterrupt: Instead, after SIGINT.
    """
    status = status or ProcessStatus()
    if config.learner.threads:
        torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    backend = make_backend(config, requirements.colocated(config))
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
        _stop_on_interrupt(stop, interrupts)  # before this there is nothing to save
        _train(config, backend, client, keys, stop, heldout, status)
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


def _train(
    config: Config,
    backend: Backend,
    client: BlockingClient,
    keys: ClientKeys | None,
    stop: threading.Event,
    heldout: Mapping[str, int] | None,
    status: ProcessStatus,
) -> None:
    rank, world = backend.rank, backend.world
    sync = _sync_config(config)

    def make_publisher(lineage: int) -> RankPublisher:
        live = Shards(backend.layout(), backend.local_tensors())
        return open_publisher(config.run.name, rank, world, live, sync, lineage, keys)

    remote_models = {
        name: RemoteModel(name, config, rank, world, client, keys, backend.is_data_leader)
        for name in requirements.models_trained_in_pools(config)
    }
    trainer = open_trainer(
        config,
        backend,
        client,
        make_publisher,
        Path(config.run.dir) / config.run.name,
        stop=stop,
        heldout=heldout,
        remote_models=remote_models,
        status=status,
    )
    trainer.run()


def _sync_config(config: Config) -> SyncConfig:
    """With the host that the queue's machine reaches this one by, unless `sync.host` names it."""
    if config.sync.host is not None:
        return config.sync
    return dataclasses.replace(config.sync, host=own_host(config.queue.address))


def _stop_on_interrupt(stop: threading.Event, interrupts: list[int]) -> None:
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
