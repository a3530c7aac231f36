"""What the processes of a run would stumble over one by one is told here, before any of them is started."""

from __future__ import annotations

from asyncrl.config.dotted import load_function
from asyncrl.config.schema import Config
from asyncrl.generator import http_link
from asyncrl.generator.rewards import Scorer
from asyncrl.learner import requirements
from asyncrl.learner.megatron.grid import check_model, grid
from asyncrl.learner.mesh import ModelShape, axis_sizes
from asyncrl.tasks.source import held_out, train_stream
from asyncrl.telemetry import trackers


def preflight(config: Config) -> None:
    """Load the tasks and the user's functions, and see whether the models beside the policy are there and speak its
    tokens, and the learner's processes go up in its axes. Raises ConfigError."""
    requirements.check(config)
    _check_axes(config)
    _check_prompts(config)
    Scorer.from_config(config.reward).close()
    if config.generator.own_engine is not None:
        load_function(config.generator.own_engine, "generator.own_engine")
    for name in config.telemetry.sinks:
        trackers.check_installed(name)
    if config.generator.server.urls:
        http_link.check_installed()
        http_link.key_from(config.generator.server.key_variable)
    if config.agent.several_turns:
        from asyncrl.generator import agent  # takes seconds, for transformers
        from asyncrl.models import policy_tokenizer

        agent.check(policy_tokenizer(config), config.agent)
    if models := requirements.models(config):
        from asyncrl.learner.networks import check_vocabularies  # takes seconds, for transformers

        check_vocabularies(models, config)


def _check_prompts(config: Config) -> None:
    """That there are tasks, and a chat template if the first ones of a source are messages."""
    first = [train_stream(config).task_at(0), *(tasks[0] for tasks in held_out(config).values() if tasks)]
    if config.tasks.chat_template is None and all(isinstance(task.prompt, str) for task in first):
        return
    from asyncrl.models import encode_prompt, policy_tokenizer  # takes seconds, for transformers

    tokenizer = policy_tokenizer(config)
    for task in first:
        encode_prompt(tokenizer, task)


def _check_axes(config: Config) -> None:
    parallel, shape = config.learner.parallel, None
    if config.learner.backend == "megatron":
        from asyncrl.learner.megatron.architecture import architecture
        from asyncrl.models import load_config  # takes seconds, for transformers

        gpt = architecture(load_config(config.model), "model.path", config.model.path).gpt
        check_model(grid(parallel, 0, config.learner.processes), gpt)
        return
    if parallel.processes > 1 or parallel.expert > 1:
        from asyncrl.models import load_config  # takes seconds, for transformers

        shape = ModelShape.of(load_config(config.model))
    axis_sizes(parallel, config.learner.processes, shape)
