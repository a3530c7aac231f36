"""The backend that `learner.backend` names. Only the one that is asked for is imported."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec

from asyncrl.config.schema import Config
from asyncrl.config.sections.rules import require
from asyncrl.learner.backends.backend import Backend


def make_backend(config: Config, models: Collection[str] = ()) -> Backend:
    """models: what stands beside the policy. Raises ConfigError as the backend does, and without its package."""
    if config.learner.backend == "fsdp":
        from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend

        return FsdpBackend(config, models)
    require(
        find_spec("megatron") is not None,
        "learner.backend",
        config.learner.backend,
        "needs the package megatron-core",
        "pip install 'asyncrl[megatron]'",
    )
    from asyncrl.learner.backends.megatron.backend import MegatronBackend

    return MegatronBackend(config, models)
