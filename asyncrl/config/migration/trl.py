"""The keys of TRL that count together; `trl.yaml` has the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.config.migration.translation import VERSIONS, Translation

PROMPT_TOKENS = 1024
"""Room for a prompt where the file gives no limit."""

SOFT_OVERLONG = {"max_completion_len": 1280, "soft_punish_cache": 256}
"""What `trl grpo` gives to get_soft_overlong_punishment."""


def together(old: Translation) -> None:
    _tasks(old)
    steps = _batches(old)
    _versions(old, steps)
    _algorithm(old)
    _rewards(old)
    if folder := old["output_dir"]:
        old.set("run.dir", str(Path(folder).expanduser().parent), "output_dir")
        old.set("run.name", Path(folder).name, "output_dir")
    old.set_trackers("report_to")


def _tasks(old: Translation) -> None:
    name, subset = "dataset_name", "dataset_config"
    sections = {"tasks": "dataset_train_split"}
    if old["eval_strategy"] not in ("no", False):  # YAML reads no as false
        sections["evaluation"], samples = "dataset_test_split", "num_generations_eval"
        old.set("evaluation.samples", old[samples] or old["num_generations"], samples)
        old.set("evaluation.temperature", old["temperature"], "temperature")
    for section, split in sections.items():
        if source := old[name]:
            old.set(f"{section}.source", source if Path(source).exists() else f"hf:{source}", name)
            old.set_some(f"{section}.options", {"split": old[split], "subset": old[subset]}, split, subset)
    most, prompt, answer = "vllm_max_model_length", "max_prompt_length", "max_completion_length"
    length = old[most] or old[answer] + (old[prompt] or PROMPT_TOKENS)
    old.set("generator.max_length", length, most, prompt, answer)


def _batches(old: Translation) -> int:
    """Set the sizes of a batch. Returns the optimizer steps of a version."""
    device, processes = "per_device_train_batch_size", "num_processes"
    counts = whole, generations, accumulated = (
        "generation_batch_size",
        "steps_per_generation",
        "gradient_accumulation_steps",
    )
    one = old[device] * old[processes]
    batch = old[whole] or one * (old[generations] or old[accumulated])
    old.set("batch.groups", max(1, batch // old["num_generations"]), *counts, device, processes)
    mini_batches = max(1, batch // (one * old[accumulated]))
    old.set("learner.mini_batches", mini_batches, *counts)
    if not old[whole] and processes not in old.given:
        why = "batch.groups is that of one process: give num_processes=N after the file"
        old.leave(why, processes, default_too=True)
    return mini_batches * int(old["num_iterations"])


def _versions(old: Translation, steps: int) -> None:
    """Convert TRL's counts of optimizer steps into versions. steps: optimizer steps of one version"""
    if old["max_steps"] > 0:
        old.set("run.versions", -(-old["max_steps"] // steps), "max_steps")
    else:
        old.leave(f"{VERSIONS} {old['num_train_epochs']:g}", "num_train_epochs", default_too=True)
    counted = {
        "checkpoint.every": ("save_steps", old["save_strategy"] == "steps"),
        "evaluation.every": ("eval_steps", old["eval_strategy"] == "steps"),
        "reference.update_every": ("ref_model_sync_steps", old["sync_ref_model"]),
    }
    for ours, (key, counts) in counted.items():
        if counts and old[key]:
            old.set(ours, max(1, int(old[key]) // steps), key)


def _algorithm(old: Translation) -> None:
    high = old["epsilon"] if old["epsilon_high"] is None else old["epsilon_high"]
    if old["loss_type"] == "cispo":  # TRL bounds the ratio itself there, and only from above
        high -= 1
    old.set("algorithm.clip_high", high, "epsilon_high", "epsilon")
    old.set("algorithm.proximal", "frozen", "num_iterations")
    if old["beta"] and old["use_bias_correction_kl"]:
        old.leave("the term is plain k3, without the weight π/μ", "use_bias_correction_kl", default_too=True)
    if old["top_p"] < 1 or old["top_k"] > 0 or old["min_p"]:
        old.set("algorithm.truncated", "weigh", "top_p", "top_k", "min_p")
    base, host, port = "vllm_server_base_url", "vllm_server_host", "vllm_server_port"
    if old["use_vllm"] and old["vllm_mode"] == "server":
        url = old[base] or f"http://{str(old[host]).replace('0.0.0.0', '127.0.0.1')}:{old[port]}"
        old.set("generator.server.urls", [url], base, host, port)
        if old["use_peft"]:  # TRL too sends its server merged weights
            old.set("model.lora.publish", "merged", "use_peft")


def _rewards(old: Translation) -> None:
    names, weights, model = "reward_funcs", "reward_weights", "reward_model_name_or_path"
    functions: dict[str, Any] = {}
    if old[model]:
        classifier, options = "asyncrl.rewards.classifier:Classifier", {"path": old[model]}
        functions["model"] = {"function": classifier, "per": "group", "options": options}
    for name in old[names] or []:
        module, _, last = name.rpartition(".")
        made: dict[str, Any] = {"function": f"{module or 'trl.rewards'}:{last}"}
        if name == "get_soft_overlong_punishment":
            made["arguments"] = SOFT_OVERLONG
        functions[last] = {"function": "asyncrl.rewards:Trl", "per": "group", "options": made}
    if functions:
        old.set("reward.functions", functions, model, names)
        old.set("reward.weights", dict(zip(functions, old[weights] or [], strict=False)), weights)
