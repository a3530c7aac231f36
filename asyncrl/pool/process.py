"""A pool process: the parts of a worker, made from the config."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from asyncrl.config.placement import REWARDS
from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.generator.rewards import Scorer
from asyncrl.generator.threads import in_thread
from asyncrl.learner.requirements import taught_on_pools
from asyncrl.learner.teaching import board_key
from asyncrl.models import load_tokenizer
from asyncrl.pool.frozen import FrozenModel
from asyncrl.pool.lessons import Lessons
from asyncrl.pool.scoring import Scoring
from asyncrl.pool.taught import TaughtModel
from asyncrl.pool.worker import PoolWorker, Work
from asyncrl.queue.client import QueueClient
from asyncrl.queue.keys import ClientKeys, client_keys
from asyncrl.sync.torch_transport import own_host
from asyncrl.tasks.source import held_out


async def run_pool(config: Config, model: str, *, name: str) -> None:
    """Work on groups until the run is closed. model: one of those that `placement` has on a pool.

    Raises ConfigError for another one and for what cannot be loaded, DeadlineError if the queue does not answer, the
    learner does not open the stream, or the work on a group takes too long.
    """
    pools = config.placement.pools
    require(
        model in pools,
        f"placement.{model}.where" if model in config.placement.places else "MODEL",
        "colocated" if model in config.placement.places else model,
        f"there is no pool of the {model} in this run",
        f"name one of {', '.join(pools)}"
        if pools
        else "set placement.reference.where=pool, or whichever it is to be",
    )
    if (threads := pools[model].threads) is not None:
        torch.set_num_threads(threads)
    with ExitStack() as closing:
        keys = client_keys(config.queue.keys)
        work = await load_work(config, model, keys, closing)
        if work is None:
            return
        client = QueueClient(
            config.queue.address,
            run=config.run.name,
            who=name,
            deadline_s=config.queue.deadline_s,
            keys=keys,
        )
        try:
            await client.connect()
            if isinstance(work, Lessons):
                await client.post(board_key(model), work.where)
            await PoolWorker(name, model, work, client, config).run()
        finally:
            await client.close()


async def load_work(config: Config, model: str, keys: ClientKeys | None, closing: ExitStack) -> Work | None:
    """What the pool of `model` does. closing: gets what is to be closed at the end. None, at the end, on the ranks of a
    model that only follow the first one."""
    if model == REWARDS:
        return _scoring(config, closing)
    loaded: FrozenModel | TaughtModel
    loaded = (TaughtModel if model in taught_on_pools(config) else FrozenModel)(model, config)
    closing.callback(loaded.ranks.close)
    if loaded.ranks.rank > 0:
        await in_thread(loaded.follow)
        return None
    if isinstance(loaded, FrozenModel):
        return loaded
    lessons = Lessons(loaded, own_host(config.queue.address), keys)
    closing.callback(lessons.close)
    return lessons


def _scoring(config: Config, closing: ExitStack) -> Scoring:
    functions = config.rewards_of("pool")
    assert functions is not None
    scorer = Scorer.from_config(functions)
    closing.callback(scorer.close)
    scorer.start()
    return Scoring(scorer, load_tokenizer(config.model), config, held_out(config))
