"""A pool process: makes the parts of a worker from the config, and runs it."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.config.sections.placement import REWARDS
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.generator.threads import in_thread
from asyncrl.learner.remote.remote_protocol import registry_key
from asyncrl.learner.training.requirements import models, models_trained_in_pools
from asyncrl.models.loading import load_tokenizer
from asyncrl.pool.model import InferenceModel
from asyncrl.pool.scoring import Scoring
from asyncrl.pool.trained_model import TrainedModel
from asyncrl.pool.training_server import TrainingServer
from asyncrl.pool.worker import PoolWork, PoolWorker
from asyncrl.queue.client.client import QueueClient
from asyncrl.rpc.keys import ClientKeys, client_keys
from asyncrl.sync.channels.addresses import own_host
from asyncrl.tasks.source import held_out
from asyncrl.telemetry.status import ProcessStatus


async def run_pool(config: Config, model: str, *, name: str, status: ProcessStatus) -> None:
    """Work on groups until the run is closed. model: one of those that `placement` has on a pool.

    Raises:
        ConfigError: there is no pool of this model, or it cannot be loaded
        DeadlineError: the queue does not answer, the learner does not open the stream, or the work on a group takes
            too long
    """
    pools = config.placement.pools
    require(
        model in pools,
        f"{config.placement.key_of(model)}.where" if model in config.placement.places else "MODEL",
        "colocated" if model in config.placement.places else model,
        f"there is no pool of the {model} in this run",
        f"name one of {', '.join(pools)}"
        if pools
        else "set placement.reference.where=pool, or whichever it is to be",
    )
    require(
        model == REWARDS or model in models(config),
        f"{config.placement.key_of(model)}.where",
        "pool",
        f"the algorithm of this configuration has no {model}",
        "start all processes of a run with the same configuration",
    )
    if (threads := pools[model].threads) is not None:
        torch.set_num_threads(threads)
    with ExitStack() as closing:
        keys = client_keys(config.queue.keys)
        work = await load_work(config, model, keys, closing, status)
        if work is None:
            return
        status.loaded.set()
        client = QueueClient.of(config, name, status)
        try:
            await client.connect()
            if isinstance(work, TrainingServer):
                await client.post(registry_key(model), work.where)
            await PoolWorker(name, model, work, client, config, status).run()
        finally:
            await client.close()


async def load_work(
    config: Config, model: str, keys: ClientKeys | None, closing: ExitStack, status: ProcessStatus
) -> PoolWork | None:
    """The work of the pool of `model`. On the ranks of a model above 0: follow rank 0 to the end, then None. closing:
    gets the parts that must be closed at the end."""
    if model == REWARDS:
        return _scoring(config, closing, status)
    loaded: InferenceModel | TrainedModel
    loaded = (TrainedModel if model in models_trained_in_pools(config) else InferenceModel)(model, config)
    closing.callback(loaded.close)
    if loaded.rank > 0:
        await in_thread(loaded.follow)
        return None
    if isinstance(loaded, InferenceModel):
        return loaded
    server = TrainingServer(loaded, own_host(config.queue.address), keys)
    closing.callback(server.close)
    return server


def _scoring(config: Config, closing: ExitStack, status: ProcessStatus) -> Scoring:
    functions = config.rewards_of("pool")
    assert functions is not None
    scorer = Scorer.from_config(functions)
    closing.callback(scorer.close)
    scorer.start(status)
    return Scoring(scorer, load_tokenizer(config.model), config, held_out(config))
