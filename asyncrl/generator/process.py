"""A generator process: the parts of a worker, made from the config."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from transformers import PreTrainedTokenizerBase

from asyncrl.config.config_consistency import Registry, check_with_learner
from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.schema import Config
from asyncrl.device.turns import TURN
from asyncrl.generator.engines.device_turn import TurnTakingEngine, engine_lock
from asyncrl.generator.engines.engine import Engine, RetryingSampler, Sampler
from asyncrl.generator.engines.http.http_engine import HttpEngine
from asyncrl.generator.engines.http.http_link import HttpLink, key_from, url_of
from asyncrl.generator.engines.http.server import Server
from asyncrl.generator.engines.http.sglang_server import SglangServer
from asyncrl.generator.engines.http.vllm_adapter_server import VllmAdapterServer
from asyncrl.generator.engines.http.vllm_server import VllmServer
from asyncrl.generator.engines.receiver import WeightReader
from asyncrl.generator.engines.scripted_engine import ScriptedEngine, hashed_script
from asyncrl.generator.engines.transformers.transformers_engine import load_end_ids, load_transformers_engine
from asyncrl.generator.engines.vllm.vllm_engine import VllmEngine
from asyncrl.generator.prober import Prober
from asyncrl.generator.rollouts import Rollouts
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.generator.weights import POLL_S, WeightFollower
from asyncrl.generator.worker import Worker
from asyncrl.models.adapters import adapt, check_base, live_tensors
from asyncrl.models.loading import load_causal_lm, load_model_config
from asyncrl.models.prompts import policy_tokenizer
from asyncrl.probes import prompts
from asyncrl.queue.client.client import QueueClient
from asyncrl.telemetry import decisions
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import Task


async def run_generator(
    config: Config,
    *,
    name: str,
    held_out: Mapping[str, Sequence[Task]] | None = None,
    status: ProcessStatus | None = None,
    leaving: asyncio.Event | None = None,
) -> None:
    """Generate until the run is closed. held_out: the tasks of each set of `evaluation`, in their order · leaving: once
    it is set, no task is taken any more, and the generator ends with its last lease.

    Raises:
        ConfigError: The config cannot work here, or differs from the learner's.
        DeadlineError: The queue does not answer.
        WeightSyncError: The engine has other weights than the learner's after a flip.
    """
    status = status or ProcessStatus()
    if config.generator.threads is not None:
        torch.set_num_threads(config.generator.threads)
    decisions.note("threads", torch.get_num_threads())
    mine = config.rewards_of("generator")
    scorer = Scorer({}, config.reward) if mine is None else Scorer.from_config(mine)
    scorer.start(status)
    tokenizer = policy_tokenizer(config)
    engine = await _load_in_turn(config, tokenizer, name, status)
    client = QueueClient.of(config, name, status)
    rollouts: Rollouts | None = None
    try:
        await engine.start()  # it may start processes: before the client has threads
        status.loaded.set()
        await client.connect()
        sampler = RetryingSampler(engine, config.generator.on_failure)
        vocabulary = load_model_config(config.model).get_text_config().vocab_size
        rollouts = Rollouts(sampler, tokenizer, scorer, config, vocabulary)
        agree = partial(_agree, client, config)
        receiver = engine.receiver(WeightReader.of(name, config))
        follower = WeightFollower(name, receiver, client, agree, status)
        worker = Worker(
            name,
            config,
            client=client,
            engine=engine,
            follower=follower,
            rollouts=rollouts,
            held_out=held_out,
            prober=_prober(config, sampler, follower, rollouts),
            status=status,
            leaving=leaving,
        )
        await worker.run()
    finally:
        if rollouts is not None:
            await rollouts.close()
        await engine.close()
        await client.close()
        scorer.close()


async def _load_in_turn(
    config: Config, tokenizer: PreTrainedTokenizerBase, name: str, status: ProcessStatus
) -> Engine:
    """The engine, loaded once it has its turn on the device, if it takes turns. Raises DeadlineError."""
    lock, deadline_s = engine_lock(config, name), config.placement.turn_deadline_s
    if lock is None:
        return load_engine(config, tokenizer, name)
    with status.waiting(TURN, deadline_s):
        await asyncio.to_thread(lock.take, deadline_s)
    return TurnTakingEngine(load_engine(config, tokenizer, name), lock, status, deadline_s)


def load_engine(
    config: Config, tokenizer: PreTrainedTokenizerBase, name: str, load_weights: bool = False
) -> Engine:
    """The engine that the config names. name: of this generator, for errors.

    load_weights: those of model.path into vLLM too, whose ranks otherwise wait for the learner's. Own engines and
    servers ignore it.
    """
    if config.generator.own_engine is not None:
        make = load_function(config.generator.own_engine, "generator.own_engine")
        return cast(Engine, make(config, tokenizer, name))
    if config.generator.engine == "transformers":
        return load_transformers_engine(config, tokenizer)
    if config.generator.engine == "vllm":
        return VllmEngine(config, name, load_end_ids(config.model, tokenizer), load_weights)
    if config.generator.behind_http:
        server = load_server(config, name, load_end_ids(config.model, tokenizer))
        vocabulary = load_model_config(config.model).get_text_config().vocab_size
        return HttpEngine(server, config.generator, vocabulary=vocabulary)
    model = load_causal_lm(config.model, config.run.seed)
    if config.model.lora.travels:
        adapt(model, config.model.lora, config.run.seed)
    return ScriptedEngine(
        hashed_script(model.config.get_text_config().vocab_size, config.generator.max_tokens),
        slots=config.generator.slots,
        max_length=config.generator.max_length,
        targets=live_tensors(model),
    )


def load_server(config: Config, name: str, end_ids: list[int]) -> Server:
    """The generator's server by `generator.server`. end_ids: tokens that end an answer. Raises ConfigError."""
    ours = config.generator.server
    link = HttpLink(name, url_of(ours.urls, name), ours.deadline_s, key_from(ours.key_variable))
    if ours.folder is not None:
        folder = Path(ours.folder) / config.run.name / name
        make = SglangServer if config.generator.engine == "sglang" else VllmAdapterServer
        return make(link, config, end_ids, folder)
    return VllmServer(link, config, end_ids)


async def _agree(registry: Registry, config: Config) -> None:
    await check_with_learner(registry, config, POLL_S)
    await check_base(registry, config.model, POLL_S)


def _prober(config: Config, sampler: Sampler, follower: WeightFollower, rollouts: Rollouts) -> Prober | None:
    if not config.probing:
        return None
    vocabulary = load_model_config(config.model).get_text_config().vocab_size
    return Prober(sampler, follower, prompts(vocabulary, config.generator.max_length), rollouts.training)
