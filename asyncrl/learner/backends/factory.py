"""Makes the backend that `learner.backend` names, and imports no other."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec

from asyncrl.config.schema import Config
from asyncrl.config.sections.rules import require
from asyncrl.learner.backends.backend import Backend


def make_backend(config: Config, models: Collection[str] = ()) -> Backend:
    """
    Args:
        models: the models beside the policy.

    Raises:
        ConfigError: The backend's package is missing, or the backend raised it.
    """
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
