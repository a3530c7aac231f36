"""`asyncrl sync plan`: what one weight update of all generators will cost, as a small table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from asyncrl.config.schema import Config
from asyncrl.config.sections.generator import key_of_pool, text_of_pool
from asyncrl.device import accelerator
from asyncrl.errors import ConfigError
from asyncrl.generator.engines.vllm.vllm_memory import granted_bytes
from asyncrl.launch.memory import (
    generator_memory,
    generator_pool,
    learner_memory,
    learner_pool,
    of_bytes,
    sent_cost,
)
from asyncrl.models.loading import checkpoint_shapes
from asyncrl.sync.plan.cost_model import (
    CostEstimate,
    ModelCost,
    Speeds,
    Spread,
    forecast,
    parse_generators,
    parse_learner,
)
from asyncrl.sync.tensors.budget import MemoryPart, total

TableRow = tuple[str, str]


def print_plan(
    config: Config,
    model: str | None,
    learner: str | None,
    generators: str | None,
    device_gb: float | None = None,
) -> None:
    """Print the table, for each pool of generators one as if it were alone. model: a folder with config.json, in place
    of model.path · learner, generators: the pools in words; None: as the configuration has them · device_gb: memory of
    a device; None: of the one that torch sees here.

    Raises ConfigError for words that mean nothing, for pools that cannot hold the model, for a model that is not there.
    """
    if model is not None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=model))
    names = [""] if generators else [*config.generator_pools]
    for index, name in enumerate(names):
        if index:
            print()
        if len(names) > 1:
            print(f"pool {key_of_pool(name)}, as if it were alone")
        for line in _plan_lines(config.of_pool(name), learner, generators, device_gb):
            print(text_of_pool(name, line))


def _plan_lines(
    config: Config, learner: str | None, generators: str | None, device_gb: float | None
) -> Iterator[str]:
    sync = config.sync
    try:
        pools = (
            parse_learner(learner) if learner else learner_pool(config),
            parse_generators(generators) if generators else generator_pool(config),
        )
        speeds = Speeds(sync.network_gb_s * 1e9, sync.local_gb_s * 1e9, sync.hop_ms / 1e3)
        cost = ModelCost(*checkpoint_shapes(config.model))
        made = forecast(sent_cost(config, cost), *pools, sync.bucket_bytes, speeds, sync.fanout)
    except ValueError as error:
        raise ConfigError(
            "--learner or --generators",
            f"{learner!r}, {generators!r}",
            str(error),
            "give pairs of a word and a number, e.g. --learner 'fsdp 64 tp 8' --generators '64 tp 8'",
        ) from error
    device_bytes = _device_bytes() if device_gb is None else int(device_gb * 1e9)
    streams = math.ceil(made.direct * made.streams / made.learner_ranks)
    of_learner = learner_memory(config, cost, pools[0], streams)
    of_generator = generator_memory(config, cost, pools[1], made.learner_ranks, device_bytes)
    rows = [
        *_rows(made, config),
        *_memory_rows("learner", of_learner, device_bytes),
        *_memory_rows("generator", of_generator, device_bytes),
        *_cache_rows(config, of_generator, device_bytes),
    ]
    width = max(len(name) for name, _ in rows)
    yield from (f"{name:{width}}  {value}" for name, value in rows)


def _rows(made: CostEstimate, config: Config) -> Iterator[TableRow]:
    sync = config.sync
    what = "adapters" if config.model.lora.travels else "model"
    yield what, f"{made.parameters} parameters, {of_bytes(made.bytes)} in {config.model.dtype}"
    yield "learner", f"{made.learner_ranks} ranks, each holds {_spread(made.held)}"
    yield "generators", f"{made.generators} of {made.generator_ranks} ranks"
    if sync.backend == "vllm":
        yield from _broadcast_rows(made, sync.network_gb_s)
        return
    yield (
        "a learner rank sends",
        f"{_spread(made.sent)} for one generator; most / mean {made.sent.unevenness:.2f}",
    )
    yield "a generator rank takes", _spread(made.received)
    yield (
        "streams into a generator",
        f"{made.streams}, with {made.buckets} buckets of at most {sync.bucket_mb:g} MiB",
    )
    yield "the tree", f"{made.direct} generators take from the learner, the last one after {made.hops} hops"
    yield "predicted time", f"{made.first_s:.2f} s the first, {made.last_s:.2f} s the last"
    yield (
        "  over links of",
        f"{sync.network_gb_s:g} GB/s a rank (sync.network_gb_s), {sync.local_gb_s:g} on its machine "
        f"(sync.local_gb_s), {sync.hop_ms:g} ms a hop (sync.hop_ms)",
    )


def _broadcast_rows(made: CostEstimate, gb_s: float) -> Iterator[TableRow]:
    """The rows of a run with sync.backend=vllm."""
    one_s = made.bytes / (1e9 * gb_s)
    yield "a generator rank takes", f"{of_bytes(made.bytes)}, all of the model"
    yield "whole copy", f"{of_bytes(made.bytes)} in the memory of learner rank 0's host"
    yield "predicted time", f"{2 * one_s:.2f} s the first, {(1 + made.generators) * one_s:.2f} s the last"
    yield "  a pause", f"{one_s:.2f} s, at {gb_s:g} GB/s a rank (sync.network_gb_s)"


def _memory_rows(whose: str, parts: Sequence[MemoryPart], device_bytes: int | None) -> Iterator[TableRow]:
    of_device = "" if device_bytes is None else f" of {of_bytes(device_bytes)}"
    fits = device_bytes is None or total(parts) < device_bytes
    yield (
        f"memory of a {whose} rank",
        f"{of_bytes(total(parts))}{of_device}, without activations{'' if fits else ': does not fit'}",
    )
    for part in parts:
        yield f"  {part.name}", f"{of_bytes(part.bytes)}{f' ({part.frees})' if part.frees else ''}"


def _cache_rows(config: Config, parts: Sequence[MemoryPart], device_bytes: int | None) -> Iterator[TableRow]:
    ours = config.generator.vllm
    if ours.kv_cache_mb is not None:
        yield "  KV cache", f"{of_bytes(ours.kv_cache_mb << 20)} (generator.vllm.kv_cache_mb)"
    elif device_bytes is not None:
        left = granted_bytes(config, device_bytes) - total(parts)
        share = "generator.vllm.gpu_memory_share"
        yield (
            "  KV cache, activations",
            f"{of_bytes(left)}: the rest of {share}" if left > 0 else f"0 B: {share} leaves no KV cache",
        )


def _device_bytes() -> int | None:
    return accelerator.memory_bytes(accelerator.current_device())[1] if accelerator.count() else None


def _spread(spread: Spread) -> str:
    least, most = of_bytes(spread.least), of_bytes(spread.most)
    return most if least == most else f"{least} to {most}, mean {of_bytes(spread.mean)}"
