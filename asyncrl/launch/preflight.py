"""Checks of a whole configuration before any process is started, so that mistakes are reported at once."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path

from asyncrl.config.config_consistency import as_texts
from asyncrl.config.functions.function_spec import load_function
from asyncrl.config.functions.signatures import check_arguments
from asyncrl.config.rules import require
from asyncrl.config.schema import Config
from asyncrl.config.sections.generator import errors_of_pool, key_of_pool
from asyncrl.errors import ConfigError
from asyncrl.generator.engines.http import http_link
from asyncrl.generator.sample_limit import SampleLimit
from asyncrl.generator.scoring.rewards import Scorer
from asyncrl.launch.folder.run_folder import run_folder
from asyncrl.learner.algorithms.catalogue import KINDS, algorithm_rows
from asyncrl.learner.algorithms.roles import role_of
from asyncrl.learner.backends.megatron.grid import check_model, make_grid
from asyncrl.learner.parallel.mesh import ModelShape, axis_sizes
from asyncrl.learner.training import requirements
from asyncrl.sync.layout.quantized import check_projections, is_quantized
from asyncrl.system.packages import check_package
from asyncrl.tasks.source import held_out, tasks_of_run
from asyncrl.telemetry.trackers.open import check_tracker

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""A model of the Hugging Face hub: 'gpt2', 'Qwen/Qwen3-0.6B'."""


def preflight(config: Config) -> None:
    """Inspect the tasks, the user's functions and how they are called, whether models, files and GPUs are here, whether
    the models beside the policy have its tokens, and whether the axes divide the learner's processes. Keys that do
    nothing are named on stderr. Raises ConfigError or TaskError for the first of these that cannot work.
    """
    check_present(config)
    if not Path(config.model.path).is_dir():  # of the hub
        from asyncrl.models.loading import load_model_config  # takes seconds, for transformers

        load_model_config(config.model)
    requirements.check(config)
    for line in off_keys(config):
        print(f"asyncrl: {line}", file=sys.stderr)
    _check_prompts(config)
    Scorer.from_config(config.reward).close()
    check_axes(config)
    for pool in config.generator_pools:
        with errors_of_pool(pool):
            _check_generators(config.of_pool(pool))
    _check_quantization(config)
    _check_memory(config)
    if (backend := config.learner.own_backend) is not None:
        made = load_function(backend, "learner.own_backend")
        check_arguments(made, backend, "learner.own_backend", "config", "models")
    check_telemetry(config)
    if config.launch.dash:
        check_package("aiohttp", "server", "launch.dash", config.launch.dash)
    if config.agent.several_turns:
        from asyncrl.generator.gateway.harness import check_player  # takes seconds, for transformers
        from asyncrl.models.prompts import policy_tokenizer

        check_player(policy_tokenizer(config), config)
    if models := requirements.models(config):
        from asyncrl.learner.models import networks  # takes seconds, for transformers

        networks.check_vocabularies(models, config)
        if "teacher" in models:
            networks.likely_tokens("teacher", config)


def _check_generators(config: Config) -> None:
    """The engine of one pool of generators, and its slots."""
    SampleLimit.from_config(config)
    if (engine := config.generator.own_engine) is not None:
        made = load_function(engine, "generator.own_engine")
        check_arguments(made, engine, "generator.own_engine", "config", "tokenizer", "name")
    if config.generator.server.urls:
        http_link.check_aiohttp("generator.engine", config.generator.engine)
        http_link.key_from(config.generator.server.key_variable)


def check_telemetry(config: Config) -> None:
    """Raises ConfigError for a tracker whose package is missing, and for an endpoint without its package."""
    for name in config.telemetry.trackers:
        check_tracker(name)
    if (port := config.telemetry.prometheus_port) is not None:
        check_package("prometheus_client", "prometheus", "telemetry.prometheus_port", port)


def _check_prompts(config: Config) -> None:
    """Raise for sources without tasks, and for messages without a chat template."""
    tasks = tasks_of_run(config, run_folder(config))
    first = [tasks.task_at(0), *(tasks[0] for tasks in held_out(config).values() if tasks)]
    if config.tasks.chat_template is None and all(isinstance(task.prompt, str) for task in first):
        return
    from asyncrl.models.prompts import (  # takes seconds, for transformers
        ImageReader,
        encode_prompt,
        policy_tokenizer,
    )

    tokenizer, engines = policy_tokenizer(config), {each.engine for each in config.generator_pools.values()}
    readers = [ImageReader(config.model, engine) for engine in engines]
    for task in first:
        prompt = encode_prompt(tokenizer, task, config.tasks.chat_template_kwargs)
        for images in readers:
            images.prompt(task, prompt)


def check_axes(config: Config) -> None:
    """Raises ConfigError for axes that do not divide the learner's processes, or do not fit the model."""
    parallel, shape = config.learner.parallel, None
    if config.learner.backend == "megatron":
        from asyncrl.learner.backends.megatron.architecture import architecture
        from asyncrl.models.loading import load_model_config  # takes seconds, for transformers

        gpt = architecture(load_model_config(config.model), "model.path", config.model.path).gpt
        check_model(make_grid(parallel, 0, config.learner.processes), gpt, parallel)
        return
    if parallel.processes > 1 or parallel.expert > 1:
        from asyncrl.models.loading import load_model_config  # takes seconds, for transformers

        shape = ModelShape.of(load_model_config(config.model))
    axis_sizes(parallel, config.learner.processes, shape)


def _check_quantization(config: Config) -> None:
    """generator.quantization against the names in the model."""
    if config.generator.quantization is None:
        return
    from asyncrl.models.loading import checkpoint_shapes  # takes seconds, for transformers

    shapes, _ = checkpoint_shapes(config.model)
    projections = [name for name, (shape, _) in shapes.items() if is_quantized(name, shape)]
    check_projections(projections, config.generator.quantization)


def _check_memory(config: Config) -> None:
    """Weights and copies of them against a device's memory, where all pools have devices of their own."""
    pools = config.generator_pools.values()
    if config.learner.devices is None or not any(generators.devices for generators in pools):
        return
    from asyncrl.device import accelerator  # takes seconds, for torch

    if (device_bytes := accelerator.total_bytes()) is None:
        return
    from asyncrl.launch.memory import check_memory, learner_pool
    from asyncrl.models.loading import checkpoint_shapes
    from asyncrl.sync.plan.cost_model import ModelCost

    cost = ModelCost(*checkpoint_shapes(config.model))
    check_memory(config, cost, learner_pool(config), device_bytes)


# ---------------------------------------------------------------------- files, models and GPUs


def check_present(config: Config) -> None:
    """Raise ConfigError for a model folder, a chat template or a GPU that is not here, and for a run folder that cannot
    be made. A model of the hub is not looked for."""
    for name in ("model", "critic", "reference", "reward_model", "teacher"):
        if (path := getattr(config, name).path) is not None:
            _check_model(f"{name}.path", path)
    for name in requirements.models(config):
        if (own := role_of(name, config.algorithm).path) is not None:
            _check_model(f"frozen({name!r}).path", own)
    template = config.tasks.chat_template
    rule = f"is no file (in {Path.cwd()})"
    remedy = "give the path of a Jinja template, or leave it out for the tokenizer's own"
    require(template is None or Path(template).is_file(), "tasks.chat_template", template, rule, remedy)
    _check_writable("run.dir", Path(config.run.dir))
    _check_gpus(config)


def _check_model(key: str, path: str) -> None:
    folder = Path(path)
    try:
        there = folder.is_dir()
    except OSError as error:  # a name that is too long
        rule = f"cannot be the path of a folder ({error.strerror})"
        raise ConfigError(key, path, rule, "give the path of a folder, or a name of the hub") from None
    if not there:
        # 'runs/warm' looks like a name of the hub, but for the folder runs.
        named = HUB_NAME.fullmatch(path) and not path.startswith((".", "~")) and not _folder_part(path)
        remedy = "make it first (`asyncrl sft` writes one), or give another folder or a name of the Hugging Face hub"
        require(bool(named), key, path, f"is no folder (in {Path.cwd()})", remedy)
        return
    described = folder / "config.json"
    remedy = f"set {key} to the folder that has config.json, e.g. the final/ of a run"
    require(described.is_file(), key, path, "has no config.json, so it is no model", remedy)
    try:
        json.loads(described.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(
            key, path, f"its config.json cannot be read ({error})", "fetch or write the model again"
        ) from None


def _folder_part(path: str) -> bool:
    return "/" in path and Path(path).parts[0] != path and Path(path).parent.is_dir()


def _check_writable(key: str, folder: Path) -> None:
    """The folder, or the nearest one above it that is there, takes new files."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(one))
    ok = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    rule = f"cannot be made: {there} is {'not yours to write to' if there.is_dir() else 'no folder'}"
    require(ok, key, str(folder), rule, f"set {key} to a folder that you may write to")


def _check_gpus(config: Config) -> None:
    """torch is imported only where GPUs are named."""
    pools = {key_of_pool(name): generators.devices for name, generators in config.generator_pools.items()}
    pools["learner"] = config.learner.devices
    pools |= {config.placement.key_of(name): place.devices for name, place in config.placement.pools.items()}
    named = {f"{pool}.devices": devices for pool, devices in pools.items() if devices}
    by_nccl = config.sync.backend == "nccl"
    if not named and not by_nccl:
        return
    from asyncrl.device import accelerator

    count = accelerator.count()
    rule = "sends from GPU to GPU, and torch sees none here"
    require(
        count > 0 or not by_nccl, "sync.backend", "nccl", rule, "leave it out: auto takes nccl between GPUs"
    )
    for key, devices in named.items():
        numbers = [int(name) for name in devices.split(",") if name.strip().isdecimal()]
        sees = f"torch sees {count} here" if count else "torch sees none here, or is a build for the CPU"
        require(
            count > 0 and max(numbers, default=0) < count,
            key,
            devices,
            f"names a GPU that is not there: {sees}",
            "leave it out to run on the CPU" if count == 0 else f"name some of 0 to {count - 1}",
        )


# ---------------------------------------------------------------------- keys that do nothing

SWITCHES: Mapping[str, tuple[str, object]] = {
    "model.lora.": ("model.lora.rank", 0),
    "tasks.curriculum.": ("tasks.curriculum.solved", None),
    "learner.parallel.pipeline_": ("learner.parallel.pipeline", 1),
    "learner.optimizer.min_lr_ratio": ("learner.optimizer.schedule", "constant"),
    "algorithm.shaping.kl_": ("algorithm.shaping.kl_coef", 0),
    "algorithm.shaping.overlong_penalty": ("algorithm.shaping.overlong_buffer", 0),
    "algorithm.shaping.resample_power": ("algorithm.shaping.resample", "none"),
    "algorithm.kl_loss.form": ("algorithm.kl_loss.coef", 0),
    "algorithm.teacher_loss.": ("algorithm.teacher_loss.coef", 0),
}
"""Beginning of keys → the key that turns them off, and the value by which it does."""


def off_keys(config: Config) -> list[str]:
    """A line for each key that differs from its default and is read by nothing: the key, its value, and why."""
    plain = as_texts(Config())
    off = [(prefix, why) for prefix, counts, why in _switches(config) if not counts]
    lines = []
    for key, text in as_texts(config).items():
        if text == plain.get(key):
            continue
        reasons = (why for prefix, why in off if key.startswith(prefix))
        if why := next(reasons, None) or _of_another_algorithm(key, config):
            lines.append(f"{key}={text} does nothing: {why}")
    return [*lines, *_of_pools(config)]


def _of_pools(config: Config) -> Iterator[str]:
    """A line for each section of a pool of generators that its engine does not read."""
    for name, entry in config.placement.generators.items():
        pool, at = config.generator_pools[name], key_of_pool(name)
        reads = {"vllm": pool.engine == "vllm", "server": pool.behind_http}
        for section, read in reads.items():
            if section in entry and not read and not pool.own_engine:
                yield f"{at}.{section} does nothing: {at}.engine={pool.engine}"


def _switches(config: Config) -> Iterator[tuple[str, bool, str]]:
    """(beginning of keys, whether they count, why they do not)."""
    pools, sync, models = config.generator_pools.values(), config.sync, requirements.models(config)
    own, engine = any(each.own_engine for each in pools), f"generator.engine={config.generator.engine}"
    yield "generator.vllm.", own or any(each.engine == "vllm" for each in pools), engine
    yield "generator.server.", own or config.generator.behind_http, engine
    yield "critic.", bool(requirements.critics(config)), "the algorithm has no critic"
    for name in ("reference", "reward_model", "teacher"):
        yield f"{name}.", name in models, f"the algorithm has no {name}"
    for name in ("fanout", "network_gb_s", "local_gb_s", "hop_ms"):
        yield f"sync.{name}", not sync.stored, f"sync.backend={sync.backend} sends weights through a store"
    yield "sync.keep", sync.stored, f"sync.backend={sync.backend}"
    yield "sync.fsync", sync.backend == "file", f"sync.backend={sync.backend}"
    evaluated, several = bool(config.evaluation.named_sets), config.agent.several_turns
    yield "evaluation.", evaluated, "evaluation.source is not set, so nothing is evaluated"
    yield "agent.", several, "none of agent.tools, environment, program and function is set"
    harness = config.agent.harness is not None
    yield "agent.gateway.", harness, "neither agent.program nor agent.function is set"
    for prefix, (key, value) in SWITCHES.items():
        yield prefix, attrgetter(key)(config) != value, f"{key}={value}"


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
        *(
            ("correction.reject", name)
            for name in (algorithm.correction.reject, *algorithm.correction.also_reject)
        ),
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
