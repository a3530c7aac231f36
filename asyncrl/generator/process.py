"""A generator process: the parts of a worker, made from the config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from asyncrl.config.schema import Config
from asyncrl.generator.engine import Engine
from asyncrl.generator.rewards import Scorer
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.scripted_engine import ScriptedEngine, hashed_script
from asyncrl.generator.transformers_engine import load_transformers_engine
from asyncrl.generator.weights import Learner, WeightFollower, WeightStream
from asyncrl.generator.worker import Worker
from asyncrl.models import checkpoint_tensors, load_causal_lm, load_tokenizer
from asyncrl.queue.client import QueueClient
from asyncrl.queue.keys import client_keys
from asyncrl.sync.bucket import dtype_name
from asyncrl.sync.digest import digest_layout
from asyncrl.sync.ends import open_stream
from asyncrl.sync.layout import Layout, whole_layout
from asyncrl.types import Task


async def run_generator(config: Config, *, name: str, held_out: Sequence[Task] = ()) -> None:
    """Generate until the run is closed. held_out: the tasks of `evaluation`, in their order.

    Raises ConfigError for what the config asks in vain, DeadlineError if the queue does not answer, and
    WeightSyncError if the engine ends up with other weights than the learner's.
    """
    if config.generator.threads is not None:
        torch.set_num_threads(config.generator.threads)
    scorer = Scorer.from_config(config.reward)
    tokenizer = load_tokenizer(config.model)
    engine = load_engine(config, tokenizer)
    client = QueueClient(
        config.queue.address,
        run=config.run.name,
        who=name,
        deadline_s=config.queue.deadline_s,
        keys=client_keys(config.queue.keys),
    )
    try:
        await client.connect()
        await engine.start()
        worker = Worker(
            name,
            config,
            client=client,
            engine=engine,
            follower=_follower(name, config, engine, client),
            rollouts=Rollouts(engine, tokenizer, scorer, config),
            held_out=held_out,
        )
        await worker.run()
    finally:
        await engine.close()
        await client.close()
        scorer.close()


def load_engine(config: Config, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """The engine that generator.engine names."""
    if config.generator.engine == "transformers":
        return load_transformers_engine(config, tokenizer)
    model = load_causal_lm(config.model, config.run.seed)
    return ScriptedEngine(
        hashed_script(model.config.get_text_config().vocab_size, config.generator.max_tokens),
        slots=config.generator.slots,
        max_length=config.generator.max_length,
        parameters=checkpoint_tensors(model),
    )


def _follower(name: str, config: Config, engine: Engine, client: QueueClient) -> WeightFollower:
    layout = layout_of(engine.weight_targets())

    def open_to(learner: Learner, staging: Mapping[str, Tensor]) -> WeightStream:
        return open_stream(
            config.run.name,
            name,
            learner.endpoints,
            layout,
            config.sync,
            staging,
            learner.lineage,
            client_keys(config.queue.keys),
        )

    return WeightFollower(name, engine, client, open_to, partial(digest_layout, layout), config.sync)


def layout_of(targets: Mapping[str, Tensor]) -> Layout:
    """Every parameter whole: this engine is one rank."""
    return whole_layout({name: (target.shape, dtype_name(target.dtype)) for name, target in targets.items()})
