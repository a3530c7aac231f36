"""Training before reinforcement learning: supervised, of a reward model, and from preferences."""

from __future__ import annotations

from asyncrl.cli.command import Arguments, Command, loading, read_config
from asyncrl.cli.workers import run_own_ranks, starts_ranks
from asyncrl.system.rank_process import is_rank, rank_and_world


def _train(arguments: Arguments) -> int:
    from asyncrl.launch.ranks import RankShare

    config = read_config(arguments, optional=["reward.function"])
    loading(arguments, f"torch and the model {config.model.path}")
    from asyncrl.launch.preflight import check_axes, check_present, check_telemetry
    from asyncrl.offline.jobs import DPO, REWARD_MODEL, SFT, planned

    jobs = {job.verb: job for job in (SFT, REWARD_MODEL, DPO)}
    plan = planned(jobs[arguments.command], config)
    if not is_rank():
        for check in (check_present, check_axes, check_telemetry):
            check(plan.config)
    share = RankShare(plan.config.run.name, config.learner.processes)
    if starts_ranks(share, "learner.processes"):
        return run_own_ranks(arguments, config, share)
    from asyncrl.offline.process import train

    done = train(plan, arguments.config)
    if rank_and_world()[0] == 0:
        about = ", ".join(f"{name} {value:.4g}" for name, value in done.items() if isinstance(value, float))
        print(
            f"{plan.config.run.name}: {done['steps']} steps, {about}; the model: {done['output']}", flush=True
        )
    return 0


COMMANDS: dict[str, Command] = {
    "sft": Command(
        _train,
        "supervised training",
        "Train on the 'target' texts of the tasks, or on conversations, until sft.until_accuracy, sft.steps or "
        "sft.epochs. The model is written to final/ of the run folder <run.name>-sft, or to sft.output. It starts "
        "learner.processes ranks. SIGTERM makes it write a checkpoint and end; run.resume=true goes on.",
        "asyncrl sft configs/recipes/sft_addition.yaml",
    ),
    "reward-model": Command(
        _train,
        "train a reward model",
        "Train a sequence classifier with one logit on the 'chosen' and 'rejected' answers of the tasks; the reward "
        "function asyncrl.rewards.classifier:Classifier reads it. All else as asyncrl sft, in <run.name>-reward-model.",
        "asyncrl reward-model configs/recipes/reward_model_addition.yaml",
    ),
    "dpo": Command(
        _train,
        "train on preferences",
        "Direct preference optimization of the policy on the 'chosen' and 'rejected' answers of the tasks. All else "
        "as asyncrl sft, in <run.name>-dpo.",
        "asyncrl dpo configs/recipes/dpo_addition.yaml",
    ),
}
