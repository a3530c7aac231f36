"""Checks of a whole configuration before any process is started, so that mistakes are reported at once."""

from __future__ import annotations

import sys
from pathlib import Path

from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.functions.signatures import check_arguments
from asyncrl.config.schema import Config
from asyncrl.generator.engines.http import http_link
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.launch.checks.off_keys import off_keys
from asyncrl.launch.checks.present import check_present
from asyncrl.learner.backends.megatron.grid import check_model, make_grid
from asyncrl.learner.parallel.mesh import ModelShape, axis_sizes
from asyncrl.learner.training import requirements
from asyncrl.tasks.source import held_out, train_stream
from asyncrl.telemetry import trackers


def preflight(config: Config) -> None:
    """Look at all that can be looked at: the tasks and the user's functions and how they are called, whether models,
    files and GPUs are here, whether the models beside the policy speak its tokens, and whether the learner's processes
    go up in its axes. Keys that do nothing are named on stderr.

    Raises:
        ConfigError: the first of these that cannot work.
        TaskError: tasks that are none.
    """
    check_present(config)
    if not Path(config.model.path).expanduser().is_dir():  # of the hub
        from asyncrl.models import load_model_config  # takes seconds, for transformers

        load_model_config(config.model)
    requirements.check(config)
    for line in off_keys(config):
        print(f"asyncrl: {line}", file=sys.stderr)
    _check_prompts(config)
    Scorer.from_config(config.reward).close()
    _check_axes(config)
    if (engine := config.generator.own_engine) is not None:
        made = load_function(engine, "generator.own_engine")
        check_arguments(made, engine, "generator.own_engine", "config", "tokenizer", "name")
    for name in config.telemetry.sinks:
        trackers.check_tracker(name)
    if config.generator.server.urls:
        http_link.check_installed()
        http_link.key_from(config.generator.server.key_variable)
    if config.agent.several_turns:
        from asyncrl.generator.agents import agent  # takes seconds, for transformers
        from asyncrl.models import policy_tokenizer

        agent.check_agent(policy_tokenizer(config), config.agent)
    if models := requirements.models(config):
        from asyncrl.learner.models.networks import check_vocabularies  # takes seconds, for transformers

        check_vocabularies(models, config)


def _check_prompts(config: Config) -> None:
    """Raise for sources without tasks, and for messages without a chat template."""
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
        from asyncrl.learner.backends.megatron.architecture import architecture
        from asyncrl.models import load_model_config  # takes seconds, for transformers

        gpt = architecture(load_model_config(config.model), "model.path", config.model.path).gpt
        check_model(make_grid(parallel, 0, config.learner.processes), gpt)
        return
    if parallel.processes > 1 or parallel.expert > 1:
        from asyncrl.models import load_model_config  # takes seconds, for transformers

        shape = ModelShape.of(load_model_config(config.model))
    axis_sizes(parallel, config.learner.processes, shape)
