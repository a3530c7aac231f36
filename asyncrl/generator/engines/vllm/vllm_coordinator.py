"""The process that balances vLLM's replicas ends with its generator, as their ranks do by themselves."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.coordinator import DPCoordinatorProc

from asyncrl.system.signals import die_with_parent

BALANCE = DPCoordinatorProc.run_coordinator
"""vLLM's own work of that process."""


def end_with_generator() -> None:
    """Let the next coordinator be started by `run`."""
    DPCoordinatorProc.run_coordinator = staticmethod(run)


def run(*args: Any, **kwargs: Any) -> None:
    die_with_parent()
    BALANCE(*args, **kwargs)
