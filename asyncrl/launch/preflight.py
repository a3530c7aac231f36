"""What the processes of a run would stumble over one by one is told here, before any of them is started."""

from __future__ import annotations

from asyncrl.config.schema import Config
from asyncrl.generator.rewards import Scorer
from asyncrl.learner import requirements
from asyncrl.tasks.source import held_out, train_stream


def preflight(config: Config) -> None:
    """Load the tasks and the user's functions, and see whether the models beside the policy are there and speak its
    tokens. Raises ConfigError."""
    requirements.check(config)
    train_stream(config)
    held_out(config)
    Scorer.from_config(config.reward).close()
    if config.agent.several_turns:
        from asyncrl.generator import agent  # takes seconds, for transformers
        from asyncrl.models import load_tokenizer

        agent.check(load_tokenizer(config.model), config.agent)
    if models := requirements.models(config):
        from asyncrl.learner.networks import check_vocabularies  # takes seconds, for transformers

        check_vocabularies(models, config)
