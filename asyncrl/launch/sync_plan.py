"""`asyncrl sync plan`: what one weight update of all generators will cost, as a small table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.models import checkpoint_shapes
from asyncrl.sync.plan.cost_model import (
    CostEstimate,
    ModelCost,
    PoolShape,
    Speeds,
    Spread,
    forecast,
    parse_generators,
    parse_learner,
)

Row = tuple[str, str]


def print_plan(config: Config, model: str | None, learner: str | None, generators: str | None) -> None:
    """Print the table. model: a folder with config.json, in place of model.path · learner, generators: the pools in
    words; None: as the configuration has them.

    Raises ConfigError for words that mean nothing, for pools that cannot hold the model, for a model that is not there.
    """
    if model is not None:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=model))
    sync = config.sync
    try:
        pools = (
            parse_learner(learner) if learner else learner_pool(config),
            parse_generators(generators) if generators else PoolShape(count=config.generator.count),
        )
        speeds = Speeds(sync.network_gb_s * 1e9, sync.local_gb_s * 1e9, sync.hop_ms / 1e3)
        shapes, heads = checkpoint_shapes(config.model)
        made = forecast(ModelCost(shapes, heads), *pools, sync.bucket_bytes, speeds, sync.fanout)
    except ValueError as error:
        raise ConfigError(
            "--learner or --generators",
            f"{learner!r}, {generators!r}",
            str(error),
            "give pairs of a word and a number, e.g. --learner 'fsdp 64 tp 8' --generators '64 tp 8'",
        ) from error
    rows = list(_rows(made, config))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")


def learner_pool(config: Config) -> PoolShape:
    """`learner.processes` on the axes of `learner.parallel`. Contexts and stages count as shards: their processes hold
    as much, if not the same."""
    parallel = config.learner.parallel
    shards = max(1, config.learner.processes // (parallel.replicate * parallel.tensor))
    return PoolShape(replicate=parallel.replicate, fsdp=shards, tp=parallel.tensor, ep=parallel.expert)


def _rows(made: CostEstimate, config: Config) -> Iterator[Row]:
    sync = config.sync
    yield "model", f"{made.parameters} parameters, {_bytes(made.bytes)} in {config.model.dtype}"
    yield "learner", f"{made.learner_ranks} ranks, each holds {_spread(made.held)}"
    yield "generators", f"{made.generators} of {made.generator_ranks} ranks"
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
    two = 2 * sync.bucket_bytes
    yield (
        "extra memory, learner",
        f"{_bytes(made.held.most * sync.snapshots + two)} a rank: {sync.snapshots} snapshots",
    )
    yield (
        "extra memory, generator",
        f"{_bytes(made.received.most + two)} a rank: staging; each with two buckets",
    )


def _spread(spread: Spread) -> str:
    least, most = _bytes(spread.least), _bytes(spread.most)
    return most if least == most else f"{least} to {most}, mean {_bytes(spread.mean)}"


def _bytes(count: float) -> str:
    """In powers of 1000, with three digits.

    >>> [_bytes(count) for count in (0, 999, 12_340, 1.5e12)]
    ['0 B', '999 B', '12.3 kB', '1.5 TB']
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
