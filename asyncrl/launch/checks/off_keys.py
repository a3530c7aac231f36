"""Keys that were set and do nothing, because what they belong to is off."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from asyncrl.config.config_consistency import as_texts
from asyncrl.config.schema import Config
from asyncrl.learner.algorithms.catalogue import KINDS, algorithm_rows
from asyncrl.learner.training import requirements

Reason = Callable[[Config], str | None]
"""Why keys do nothing in a configuration; None where they count."""


def off_keys(config: Config) -> list[str]:
    """A line for each key that differs from its default and is read by nothing: the key, its value, and why."""
    plain = as_texts(Config())
    lines = []
    for key, text in as_texts(config).items():
        if text != plain[key] and (why := _why_off(key, config)):
            lines.append(f"{key}={text} does nothing: {why}")
    return lines


def _why_off(key: str, config: Config) -> str | None:
    reasons = (reason(config) for prefixes, reason in REASONS if key.startswith(prefixes))
    return next(filter(None, reasons), None) or _of_another_algorithm(key, config)


def _unless(counts: bool, why: str) -> str | None:
    return None if counts else why


def _engine(*names: str) -> Reason:
    def reason(config: Config) -> str | None:
        own, engine = config.generator.own_engine, config.generator.engine
        return _unless(own is not None or engine in names, f"generator.engine={engine}")

    return reason


def _model(name: str, *others: str) -> Reason:
    def reason(config: Config) -> str | None:
        needed = requirements.models(config) & {name, *others}
        return _unless(bool(needed), f"the algorithm has no {name}")

    return reason


def _of_another_algorithm(key: str, config: Config) -> str | None:
    """For keys of `algorithm:` that some advantages, losses or corrections read, and not those that are chosen."""
    readers = _readers().get(key)
    if readers is None:
        return None
    algorithm = config.algorithm
    chosen = {
        ("advantage", algorithm.advantage),
        ("loss", algorithm.loss),
        ("correction.kind", algorithm.correction.kind),
        ("correction.reject", algorithm.correction.reject),
    }
    own = {kind for kind in ("advantage", "loss") if getattr(algorithm, f"own_{kind}") is not None}
    if readers & chosen or own & {kind for kind, _ in readers}:
        return None
    return "it is of " + ", ".join(sorted(f"{kind}={name}" for kind, name in readers))


@functools.cache
def _readers() -> dict[str, set[tuple[str, str]]]:
    """Key → the (kind, literal) that read it, of keys that not every literal of a kind reads."""
    found: dict[str, set[tuple[str, str]]] = {}
    for kind in KINDS:
        for row in algorithm_rows(kind):
            for key in row.keys:
                found.setdefault(key, set()).add((kind, row.name))
    return found


def _entries() -> Iterator[tuple[tuple[str, ...], Reason]]:
    yield ("generator.vllm.",), _engine("vllm")
    yield ("generator.server.",), _engine("vllm_server", "sglang")
    for name, *others in (("critic", "cost_critic"), ("reference",), ("reward_model",), ("teacher",)):
        yield (f"{name}.",), _model(name, *others)
    yield (
        ("sync.fanout", "sync.network_gb_s", "sync.local_gb_s", "sync.hop_ms"),
        lambda c: _unless(not c.sync.stored, f"sync.backend={c.sync.backend} sends weights through a store"),
    )
    yield (
        ("sync.keep",),
        lambda c: _unless(c.sync.backend in ("file", "redis"), f"sync.backend={c.sync.backend}"),
    )
    yield ("sync.fsync",), lambda c: _unless(c.sync.backend == "file", f"sync.backend={c.sync.backend}")
    yield (
        ("evaluation.",),
        lambda c: _unless(
            bool(c.evaluation.named_sets), "evaluation.source is not set, so nothing is evaluated"
        ),
    )
    yield (
        ("agent.",),
        lambda c: _unless(c.agent.several_turns, "neither agent.tools nor agent.environment is set"),
    )
    yield ("model.lora.",), lambda c: _unless(c.model.lora.rank > 0, "model.lora.rank=0")
    yield (
        ("learner.parallel.pipeline_",),
        lambda c: _unless(c.learner.parallel.pipeline > 1, "learner.parallel.pipeline=1"),
    )
    yield (
        ("learner.optimizer.min_lr_ratio",),
        lambda c: _unless(c.learner.optimizer.schedule != "constant", "learner.optimizer.schedule=constant"),
    )
    yield (
        ("algorithm.shaping.kl_",),
        lambda c: _unless(c.algorithm.shaping.kl_coef > 0, "algorithm.shaping.kl_coef=0"),
    )
    yield (
        ("algorithm.shaping.overlong_penalty",),
        lambda c: _unless(c.algorithm.shaping.overlong_buffer > 0, "algorithm.shaping.overlong_buffer=0"),
    )
    yield (
        ("algorithm.shaping.resample_power",),
        lambda c: _unless(c.algorithm.shaping.resample != "none", "algorithm.shaping.resample=none"),
    )
    yield (
        ("algorithm.kl_loss.form",),
        lambda c: _unless(c.algorithm.kl_loss.coef > 0, "algorithm.kl_loss.coef=0"),
    )


REASONS = tuple(_entries())
