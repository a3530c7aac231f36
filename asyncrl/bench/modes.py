"""The ways to share devices between generation and training, as overrides of one config.

sync_split       each pool on its own devices, one phase at a time (max_staleness 0)
sync_colocated   every device given to each phase in turn: what a colocated trainer does, the fair rival
one_step         pools overlap, data is at most one version old
async            pools overlap, up to the config's own max_staleness (at least 2)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.config.schema import Config

LEAST_ASYNC_STALENESS = 2


@dataclass(frozen=True, slots=True)
class Mode:
    """overlaps: whether generation and training run at the same time, which decides the bound."""

    name: str
    overrides: tuple[str, ...]
    overlaps: bool


def modes(config: Config) -> list[Mode]:
    """All four, in the order of the table. Speed is compared, not bits: no fixed shapes at max_staleness 0."""
    freely = max(LEAST_ASYNC_STALENESS, config.queue.max_staleness)
    synchronous = (*_staleness(0), "generator.fixed_shape=false")
    return [
        Mode("sync_split", (*synchronous, *_own_threads(config)), overlaps=False),
        Mode("sync_colocated", (*synchronous, *_everything_to_both(config)), overlaps=False),
        Mode("one_step", (*_staleness(1), *_own_threads(config)), overlaps=True),
        Mode("async", (*_staleness(freely), *_own_threads(config)), overlaps=True),
    ]


def _staleness(bound: int) -> tuple[str, ...]:
    return (f"queue.max_staleness={bound}", "queue.window=null", "queue.depth=null")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _own_threads(config: Config) -> tuple[str, ...]:
    share = max(1, _cores() // (config.generator.count + config.learner.processes))
    return (
        f"generator.threads={config.generator.threads or share}",
        f"learner.threads={config.learner.threads or share}",
    )


def _everything_to_both(config: Config) -> tuple[str, ...]:
    """On GPUs both pools get the union of the devices and one process for each; on the CPU all cores."""
    devices = _union(config.generator.devices, config.learner.devices)
    if devices:
        return (
            f"generator.devices='{','.join(devices)}'",
            f"learner.devices='{','.join(devices)}'",
            f"generator.count={len(devices)}",
            f"learner.processes={len(devices)}",
        )
    return (
        f"generator.threads={max(1, _cores() // config.generator.count)}",
        f"learner.threads={max(1, _cores() // config.learner.processes)}",
    )


def _union(*lists: str | None) -> list[str]:
    named = [device.strip() for devices in lists if devices for device in devices.split(",")]
    return list(dict.fromkeys(named))


def spans_of(row: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Seconds per span of one pool in a row of metrics.jsonl, e.g. prefix 'time/' or 'generator/time/'."""
    return {key[len(prefix) :]: value for key, value in row.items() if key.startswith(prefix)}
