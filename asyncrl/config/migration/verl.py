"""The keys of verl that count together; `verl.yaml` has the others."""

from __future__ import annotations

import math
import os

from asyncrl.config.migration.translation import VERSIONS, Translation

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
FUNCTION, MODEL = "reward.custom_reward_function", "reward.reward_model"
DEFAULT_SCORE = ("verl.utils.reward_score", "default_compute_score")
"""verl's reward where the file names none."""


def together(old: Translation) -> None:
    _tasks(old)
    _batches(old)
    _staleness(old)
    _algorithm(old)
    _correction(old)
    _reward(old)
    old.set("run.name", str(old["trainer.experiment_name"]).replace("/", "-"), "trainer.experiment_name")
    old.set_trackers("trainer.logger")


def _tasks(old: Translation) -> None:
    for key, section in (("data.train_files", "tasks"), ("data.val_files", "evaluation")):
        files = [old[key]] if isinstance(old[key], str) else old[key] or []
        if len(files) == 1:
            old.set(f"{section}.source", os.path.expanduser(files[0]), key)
        elif files:
            old.leave(f"put the files into one folder, and name it in {section}.source", key)
    length, prompt, answer = f"{ROLLOUT}.max_model_len", "data.max_prompt_length", "data.max_response_length"
    old.set("generator.max_length", old[length] or old[prompt] + old[answer], length, prompt, answer)


def _batches(old: Translation) -> None:
    groups, mini, samples = "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n"
    old.set("batch.group_size", old[samples], samples)
    if old["trainer.total_training_steps"] is None:
        old.leave(f"{VERSIONS} {old['trainer.total_epochs']}", "trainer.total_epochs", default_too=True)
    steps = "async_training.trigger_parameter_sync_step", "async_training.require_batches"
    if old["async_training.staleness_threshold"] is None:
        old.set("batch.groups", old[groups], groups)
        old.set("learner.mini_batches", math.ceil(old[groups] / old[mini]), groups, mini)
    else:  # a version is published after so many optimizer steps of a mini-batch each
        count = old[steps[0]] * old[steps[1]]
        old.set("batch.groups", count * old[mini], *steps, mini)
        old.set("learner.mini_batches", count, *steps)


def _staleness(old: Translation) -> None:
    share, mode = "async_training.staleness_threshold", "trainer.v1.trainer_mode"
    most = "trainer.v1.sampler.max_off_policy_threshold"
    if old[share] is not None:
        old.set("queue.max_staleness", math.ceil(old[share]), share)
    else:
        old.set("queue.max_staleness", 0 if old[mode] == "sync" else old[most], mode, most)


def _algorithm(old: Translation) -> None:
    by_std, estimator = "algorithm.norm_adv_by_std_in_grpo", "algorithm.adv_estimator"
    if not old[by_std] and str(old[estimator]).startswith("grpo"):
        old.set("algorithm.advantage", "dr_grpo", by_std, estimator)
    cut = f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k"
    if old[cut[0]] < 1 or old[cut[1]] > 0:
        old.set("algorithm.truncated", "weigh", *cut)


def _correction(old: Translation) -> None:
    kind, bounds = f"{CORRECTION}.rollout_is", f"{CORRECTION}.rollout_is_threshold"
    reject, most = f"{CORRECTION}.rollout_rs", f"{CORRECTION}.rollout_rs_threshold"
    if old[f"{CORRECTION}.bypass_mode"]:
        old.leave("with bypass_mode there is no third policy to correct for", kind, bounds, reject, most)
        return
    if old[kind] is not None:
        low, high = _bounds(old[bounds])
        old.set("algorithm.correction.kind", "icepop" if low else "tis", kind, bounds)
        old.set("algorithm.correction.level", old[kind], kind)
        old.set("algorithm.correction.high", high, bounds)
        if low:
            old.set("algorithm.correction.low", low, bounds)
    if old[reject] is not None and old[most] is not None:
        _rejections(old, reject, most)


def _rejections(old: Translation, reject: str, most: str) -> None:
    """verl takes one threshold for all criteria, or one for each; those of k1 bound μ/π_p."""
    criteria, thresholds = str(old[reject]).split(","), str(old[most]).split(",")
    if len(thresholds) not in (1, len(criteria)):
        old.leave("there are not as many thresholds as criteria", reject, most)
        return
    bounds = [_bounds(text) for text in thresholds] * (len(criteria) // len(thresholds))
    ours = [
        (name.strip(), 1 / high if low else None, 1 / low if low else high)
        for name, (low, high) in zip(criteria, bounds, strict=True)
    ]
    uneven = [(name, low, high) for name, low, high in ours if low and not math.isclose(low * high, 1)]
    if len(uneven) > 1:
        old.leave(
            "algorithm.correction.also_reject has the upper bound alone, and the lower is its inverse",
            reject,
            most,
        )
        return
    (first, low, high), *rest = sorted(ours, key=lambda one: one not in uneven)
    old.set("algorithm.correction.reject", first, reject)
    if low:
        old.set("algorithm.correction.reject_low", low, most)
    old.set("algorithm.correction.reject_high", high, most)
    if rest:
        old.set("algorithm.correction.also_reject", {name: high for name, _, high in rest}, reject, most)


def _bounds(threshold: object) -> tuple[float | None, float]:
    """
    >>> _bounds("0.5_2.0"), _bounds(3)
    ((0.5, 2.0), (None, 3.0))
    """
    *low, high = (float(bound) for bound in str(threshold).split("_"))
    return low[0] if low else None, high


def _reward(old: Translation) -> None:
    path, name, options = f"{FUNCTION}.path", f"{FUNCTION}.name", f"{FUNCTION}.reward_kwargs"
    source, enabled, model = "data.reward_fn_key", f"{MODEL}.enable", f"{MODEL}.model_path"
    if old[enabled]:
        old.set("reward.function", "asyncrl.rewards.classifier:Classifier", enabled)
        old.set("reward.options", {"path": old[model]}, model)
        old.set("reward.per", "group", enabled)
        old.leave("verl uses the scores of the reward model alone", path, name, options)
        return
    module, function = (old[path], old[name] or "compute_score") if old[path] else DEFAULT_SCORE
    made = {"path": module, "name": function, "options": old[options], "data_source": old[source]}
    old.set("reward.function", "asyncrl.rewards:Verl", path)
    old.set_some("reward.options", made, path, name, options, source)
