"""The two ways through a version, on bigram models in float64: what they compute, and that nobody can tell how the
groups came in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import rollout, small_config
from learner_fakes import VOCABULARY, FakeBackend, ranks
from torch import Tensor

from asyncrl.config.schema import (
    BatchConfig,
    Config,
    CriticConfig,
    GeneratorConfig,
    LearnerConfig,
    ReferenceConfig,
    RewardConfig,
    RunConfig,
    TeacherConfig,
)
from asyncrl.config.sections.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    KlLossConfig,
    ShapingConfig,
    TeacherLossConfig,
)
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.config.sections.placement import PlaceConfig, PlacementConfig
from asyncrl.errors import TrainingError
from asyncrl.learner.algorithms.advantages import advantages
from asyncrl.learner.algorithms.advantages.return_advantages import value_targets
from asyncrl.learner.algorithms.losses.covariance_losses import select_covariance
from asyncrl.learner.algorithms.losses.policy_loss import PolicyTerms, TokenLoss, loglinear_proximal
from asyncrl.learner.algorithms.registry import LOSSES, AlgorithmContext
from asyncrl.learner.algorithms.roles import ROLES
from asyncrl.learner.checks.finite_check import NonFiniteGroups
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.training import objectives, passes, requirements
from asyncrl.learner.training.experience import AdaptiveCoefficients, Experience
from asyncrl.learner.training.objectives import PolicyObjective, unrejected
from asyncrl.learner.training.version_step import (
    PreparedClaim,
    Streaming,
    VersionReport,
    VersionStep,
    WholeBatch,
    mini_batches,
    version_step,
)
from asyncrl.telemetry.spans import Spans
from asyncrl.types import Group, Sampling, Task

GROUPS, SIZE = 6, 4
Claims = Sequence[Sequence[int]]
"""Of one rank: the ordinals of each claim."""


def group(ordinal: int, flat: bool = False) -> Group:
    """Random tokens, versions 0 and 1, a reward with spread unless `flat`, a cost, steps of two tokens, and a greedy
    reward."""
    random = np.random.default_rng([7, ordinal])
    made = []
    for i in range(SIZE):
        length = 3 + int(random.integers(1, 9))
        one = rollout(random.integers(1, 32, length).tolist(), prompt=3, version=0)
        place = np.arange(length) - 3
        mask = one.loss_mask != 0
        made.append(
            dataclasses.replace(
                one,
                logprobs=np.where(mask, random.normal(-2, 0.5, length), 0).astype(np.float32),
                versions=np.where(mask, random.integers(0, 2, length), -1).astype(np.int32),
                reward=1.0 if flat else float((i + ordinal) % 3),
                reward_parts={"right": float(i % 2), "cost": float(random.normal())},
                columns={
                    "step": np.where(mask, place // 2, -1).astype(np.int32),
                    "anchor": np.where(mask, place // 2 % 2, 0).astype(np.int64),
                    "step_rewards": np.zeros(length, np.float32),
                },
            )
        )
    return Group.from_rollouts(Task(ordinal, "", {}), Sampling(), made, greedy_reward=0.5)


def config_of(
    algorithm: AlgorithmConfig, mini_batches: int = 1, epochs: int = 1, tokens: int = 64, **sections: Any
) -> Config:
    learner = LearnerConfig(
        micro_batch_tokens=tokens,
        mini_batches=mini_batches,
        epochs=epochs,
        optimizer=OptimizerConfig(lr=0.1, warmup_steps=0),
    )
    critic = CriticConfig(optimizer=OptimizerConfig(lr=0.1, warmup_steps=0))
    given = {"learner": learner, "critic": critic, "batch": BatchConfig(groups=GROUPS, group_size=SIZE)}
    others = {"reward": RewardConfig(weights={"cost": 0.0}), "teacher": TeacherConfig(path="nowhere")}
    return small_config(Path("nowhere"), algorithm=algorithm, **(given | others | sections))


def several(algorithm: AlgorithmConfig, **sections: Any) -> Config:
    return config_of(algorithm, mini_batches=2, epochs=2, **sections)


FROZEN = {"proximal": "frozen"}
CASES: dict[str, Config] = {
    "grpo with KL loss": config_of(AlgorithmConfig(kl_loss=KlLossConfig(coef=0.1, form="k3+"))),
    "rloo with tis": config_of(
        AlgorithmConfig(advantage="rloo", loss="reinforce", correction=CorrectionConfig(kind="tis"), **FROZEN)
    ),
    "loglinear": config_of(AlgorithmConfig(loss="decoupled_ppo", proximal="loglinear")),
    "safe_rlhf": config_of(AlgorithmConfig(advantage="safe_rlhf", cost_multiplier=0.5)),
    "prime": config_of(AlgorithmConfig(advantage="prime")),
    "remax": config_of(AlgorithmConfig(advantage="remax", loss="reinforce")),
    "gigpo": config_of(AlgorithmConfig(advantage="gigpo")),
    "distill": config_of(AlgorithmConfig(advantage="distill", loss="reinforce")),
    "distill by a term of the loss": config_of(
        AlgorithmConfig(advantage="distill", loss="none", teacher_loss=TeacherLossConfig(coef=0.5, form="k2"))
    ),
    "gae, several steps": several(
        AlgorithmConfig(advantage="gae", lam=0.9, correction=CorrectionConfig(kind="tis"), **FROZEN)
    ),
    "vapo": several(AlgorithmConfig(advantage="vapo", lm_coef=0.1, **FROZEN)),
    "sppo": several(
        AlgorithmConfig(advantage="sppo", loss="sppo", aggregation="seq-mean-token-sum", **FROZEN)
    ),
    "optimal_token_baseline": config_of(AlgorithmConfig(advantage="optimal_token_baseline")),
    "asymre": config_of(AlgorithmConfig(advantage="asymre", dual_clip=2.0)),
    "off_policy_baseline": config_of(AlgorithmConfig(advantage="off_policy_baseline", dual_clip=2.0)),
    "off_policy_step_baseline": several(
        AlgorithmConfig(advantage="off_policy_step_baseline", loss="decoupled_ppo", **FROZEN)
    ),
    "clip_cov": several(AlgorithmConfig(loss="clip_cov", cov_share=0.1, cov_range=(-1.0, 1.0), **FROZEN)),
    "kl_cov": several(AlgorithmConfig(loss="kl_cov", cov_share=0.1)),
    "m2po": config_of(AlgorithmConfig(correction=CorrectionConfig(reject="m2po", reject_high=0.5), **FROZEN)),
    "several rejections": config_of(
        AlgorithmConfig(
            correction=CorrectionConfig(
                reject="token_k1", reject_low=0.15, reject_high=0.3, also_reject={"m2po": 2.0}
            ),
            **FROZEN,
        )
    ),
    "rejections": config_of(
        AlgorithmConfig(
            correction=CorrectionConfig("tis", reject="token_k1", reject_low=0.15, reject_high=0.3), **FROZEN
        )
    ),
    "normalised icepop": several(
        AlgorithmConfig(correction=CorrectionConfig(kind="icepop", low=0.1, high=5, normalise=True), **FROZEN)
    ),
    "gdpo": several(AlgorithmConfig(advantage="gdpo")),
    "gpg": config_of(AlgorithmConfig(advantage="gpg", loss="reinforce")),
    "pf_ppo, KL in the reward": config_of(
        AlgorithmConfig(
            advantage="reinforce_pp",
            aggregation="seq-mean-token-mean",
            shaping=ShapingConfig(kl_coef=0.1, kl_target=0.5, resample="pow"),
        )
    ),
}
every_case = pytest.mark.parametrize("name", CASES)


def run(
    config: Config,
    shares: Sequence[Claims],
    make: Callable[[int], Group] = group,
    way: type[VersionStep] | None = None,
    sharing: int = 1,
    beforehand: bool = False,
) -> tuple[dict[str, list[Tensor]], VersionReport]:
    """Version 2, trained with these claims of each data rank, which is `sharing` ranks: the gradient of each optimizer
    step of each model, and the report, both of which must be the same on every rank. beforehand: another thread
    prepares all claims."""

    def work(backend: FakeBackend) -> tuple[dict[str, list[Tensor]], VersionReport]:
        step = way(backend, config) if way else version_step(backend, config)
        claims = [[make(ordinal) for ordinal in claim] for claim in shares[backend.data_rank]]
        prepared: list[PreparedClaim | None] = [None] * len(claims)
        if beforehand:
            with ThreadPoolExecutor(1) as claims_thread:
                prepared = list(
                    claims_thread.map(lambda claim: step.prepare(claim, 2) if claim else None, claims)
                )
        for claim, its in zip(claims, prepared, strict=True):
            step.add(claim, 2, its)
        report = step.step(2)
        models = {"policy": backend.policy, **backend.models}
        return {name: model.gradients for name, model in models.items()}, report

    world = len(shares) * sharing
    (gradients, report), *others = ranks(world, work, requirements.models(config), sharing)
    for theirs, their_report in others:
        close(theirs, gradients, atol=0)
        assert their_report.refused == report.refused
        assert their_report.values == pytest.approx(report.values, nan_ok=True)
    return gradients, report


def close(found: dict[str, list[Tensor]], expected: dict[str, list[Tensor]], atol: float = 2e-6) -> None:
    assert found.keys() == expected.keys()
    for name, steps in expected.items():
        assert len(found[name]) == len(steps), name
        for mine, theirs in zip(found[name], steps, strict=True):
            torch.testing.assert_close(mine, theirs, atol=atol, rtol=0, msg=lambda text: f"{name}: {text}")  # noqa: B023


ONE_CLAIM = [[list(range(GROUPS))]]


def old_group(ordinal: int) -> Group:
    """All of version 0."""
    made = group(ordinal)
    return dataclasses.replace(made, versions=np.where(made.loss_mask != 0, 0, -1).astype(np.int32))


@every_case
def test_claims_micro_batches_and_ranks_change_no_gradient(name: str) -> None:
    config = CASES[name]
    expected, report = run(config, ONE_CLAIM)
    assert not report.refused
    assert all(gradient.abs().sum() > 0 for gradient in expected["policy"])
    tight = dataclasses.replace(config, learner=dataclasses.replace(config.learner, micro_batch_tokens=1))
    ways = [
        (tight, ONE_CLAIM),
        (config, [[[5], [0, 3], [], [4, 1, 2]]]),
        (config, [[[0, 4], [2]], [[5, 1], [3]]]),
        (config, [[[0, 1, 2, 3, 4, 5], []], [[], []]]),
        (tight, [[[5, 2], [], [1]], [[], [], []], [[0], [3], [4]]]),
    ]
    for another, shares in ways:
        found, same = run(another, shares)
        close(found, expected)
        assert same.values == pytest.approx(report.values, rel=1e-4, abs=1e-5)


@every_case
def test_ranks_with_the_same_rows_count_once(name: str) -> None:
    shares = [[[0, 4], [2]], [[5, 1], [3]]]
    expected, report = run(CASES[name], shares)
    found, same = run(CASES[name], shares, sharing=2)
    close(found, expected, atol=1e-12)
    assert same.values == pytest.approx(report.values, rel=1e-9)


@every_case
def test_claims_that_another_thread_has_prepared_change_nothing(name: str) -> None:
    shares = [[[0, 4], [2], []], [[5, 1], [], [3]]]
    expected, report = run(CASES[name], shares)
    found, same = run(CASES[name], shares, beforehand=True)
    close(found, expected, atol=0)
    assert same.values == pytest.approx(report.values, rel=1e-12, abs=0)


POOL = {
    "placement": PlacementConfig(**dict.fromkeys(("reference", "critic", "cost_critic"), PlaceConfig("pool")))
}
READY = {
    "plain": (config_of(AlgorithmConfig()), True),
    "several steps": (several(AlgorithmConfig()), False),
    "a pass of another model": (CASES["grpo with KL loss"], False),
    "statistics of all ranks": (config_of(AlgorithmConfig(advantage="reinforce_pp_baseline")), False),
    "a column of a pool": (config_of(AlgorithmConfig(shaping=ShapingConfig(kl_coef=0.1)), **POOL), True),
    "coefficients of the version before": (
        config_of(AlgorithmConfig(advantage="safe_rlhf", cost_multiplier=0.5), **POOL),
        False,
    ),
    "code of the user": (config_of(AlgorithmConfig(own_advantage=f"{__file__}:own")), False),
    "a loss of the user": (config_of(AlgorithmConfig(own_loss=f"{__file__}:own_loss")), True),
}


def own(batch: MicroBatch, config: AlgorithmConfig, context: AlgorithmContext) -> Tensor:
    return batch.rewards_R[batch.seq_N]


def own_loss(terms: PolicyTerms, config: AlgorithmConfig) -> TokenLoss:
    return TokenLoss(-terms.logp_N, torch.zeros_like(terms.logp_N, dtype=torch.bool))


@pytest.mark.parametrize("name", READY)
def test_a_claim_gets_its_advantages_beforehand_where_nothing_else_is_needed(name: str) -> None:
    config, ready = READY[name]
    prepared = prepared_of(config)
    assert bool(prepared.batch.advantages_N.any()) == prepared.ready == ready
    assert prepared.batch.loss_mask_N.any()


def test_targets_of_a_critic_of_the_user_are_computed_in_the_trainers_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own_critic = dataclasses.replace(
        ROLES["critic"], targets=lambda batch, config: batch.rewards_R[batch.seq_N]
    )
    monkeypatch.setitem(ROLES, "critic", own_critic)
    monkeypatch.setitem(LOSSES, "ppo", dataclasses.replace(LOSSES["ppo"], needs=frozenset({"critic"})))
    assert not prepared_of(config_of(AlgorithmConfig(), **POOL)).ready


def prepared_of(config: Config) -> PreparedClaim:
    """A claim with the columns of pools."""
    made = group(0)
    of_pools = dict.fromkeys(("reference", "values", "cost_values"), made.logprobs)
    made = dataclasses.replace(made, columns={**made.columns, **of_pools})

    def work(backend: FakeBackend) -> PreparedClaim:
        return version_step(backend, config).prepare([made], 2)

    (prepared,) = ranks(1, work, requirements.colocated(config))
    return prepared


def test_the_optimizer_step_does_not_wait_for_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of passes that a device has just ended."""

    class OnDevice(passes.Mark):
        reached = False

    seen: list[str] = []
    monkeypatch.setattr(passes, "Mark", OnDevice)
    measure = objectives.token_metrics
    monkeypatch.setattr(
        objectives, "token_metrics", lambda *values: (seen.append("metrics"), measure(*values))[1]
    )

    def work(backend: FakeBackend) -> VersionReport:
        make_step = backend.policy.optimizer_step
        backend.policy.optimizer_step = lambda *values: (seen.append("step"), make_step(*values))[1]  # type: ignore
        training = version_step(backend, config_of(AlgorithmConfig()))  # type: ignore[arg-type]
        training.add([group(0)], 2)
        return training.step(2)

    (report,) = ranks(1, work)
    assert seen == ["step", "metrics"]
    assert report.values["train/entropy"] > 0


STREAMING = [name for name, config in CASES.items() if not requirements.whole_batch(config)]


@pytest.mark.parametrize("name", STREAMING)
def test_what_streams_gives_the_same_as_a_whole_batch(name: str) -> None:
    shares = [[[0, 4], [2]], [[5, 1], [3]]]
    streamed, report = run(CASES[name], shares, way=Streaming)
    whole, same = run(CASES[name], shares, way=WholeBatch)
    close(whole, streamed)
    assert same.values == pytest.approx(report.values, rel=1e-4, abs=1e-5)


def test_each_way_is_taken_where_it_is_needed() -> None:
    assert {"grpo with KL loss", "rloo with tis", "safe_rlhf", "prime", "loglinear"} <= set(STREAMING)
    assert isinstance(version_step(FakeBackend(), config_of(AlgorithmConfig())), Streaming)
    assert isinstance(version_step(FakeBackend(), several(AlgorithmConfig())), WholeBatch)
    assert isinstance(version_step(FakeBackend(), CASES["m2po"]), WholeBatch)
    assert requirements.models(CASES["safe_rlhf"]) == {"critic", "cost_critic"}
    assert requirements.models(CASES["prime"]) == {"reference", "reward_model"}
    assert requirements.models(CASES["distill"]) == {"teacher"}
    assert requirements.proximal_pass(CASES["distill"])
    assert requirements.models(CASES["rloo with tis"]) == set()


@pytest.mark.parametrize("name", ["gigpo", "rejections", "rloo with tis"])
def test_passes_of_a_claim_are_announced_before_the_first_one(name: str) -> None:
    """Of whichever model: the next claim is on its way meanwhile."""
    seen: list[str] = []

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values, **more: (seen.append("pass"), call(*values, **more))[1]

    def work(backend: FakeBackend) -> None:
        for model in (backend.policy, *backend.models.values()):
            model.predict, model.accumulate = noted(model.predict), noted(model.accumulate)  # type: ignore
        way = version_step(backend, CASES[name])  # type: ignore[arg-type]
        way.add([group(0)], 2, begun=lambda: seen.append("begun"))

    ranks(1, work)
    assert seen[0] == "begun"


def test_what_is_rejected_leaves_what_the_policy_counts() -> None:
    config = CASES["rejections"]

    def work(backend: FakeBackend) -> tuple[MicroBatch | None, MicroBatch | None]:
        experience = Experience(backend, config, Spans())
        scored = experience.score(MicroBatch.of([group(0)]))
        assert scored is not None
        return scored, experience.ready(scored, 2, AdaptiveCoefficients.start(config.algorithm))[0]

    ((scored, ready),) = ranks(1, work)
    assert scored is not None
    assert ready is not None
    log_w_N = scored.columns["proximal"] - scored.behaviour_N
    kept_N = scored.loss_mask_N & (log_w_N >= math.log(0.15)) & (log_w_N <= math.log(0.3))
    assert 0 < kept_N.sum() < scored.loss_mask_N.sum()
    assert torch.equal(unrejected(ready).loss_mask_N, kept_N)
    assert PolicyObjective(config.algorithm, 1).counts(ready).tokens == kept_N.sum()
    assert torch.equal(ready.loss_mask_N, scored.loss_mask_N)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_squares_of_all_probabilities_are_summed_at_the_temperature_of_the_rollout(
    temperature: float,
) -> None:
    config = config_of(AlgorithmConfig(advantage="optimal_token_baseline"))
    asked = group(0)
    asked = dataclasses.replace(asked, sampling=dataclasses.replace(asked.sampling, temperature=temperature))

    def work(backend: FakeBackend) -> tuple[MicroBatch | None, Tensor]:
        return Experience(backend, config, Spans()).score(
            MicroBatch.of([asked])
        ), backend.policy.table.detach()

    ((scored, table),) = ranks(1, work)
    assert scored is not None
    before_N = torch.cat([scored.token_ids_N[:1], scored.token_ids_N[:-1]])
    expected_N = (table[before_N] / temperature).softmax(-1).square().sum(-1)
    mask_N = scored.loss_mask_N
    torch.testing.assert_close(
        scored.columns["squares"][mask_N].double(), expected_N[mask_N], atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("first", [False, True])
def test_advantages_are_whitened_over_what_is_kept_if_it_is_rejected_first(first: bool) -> None:
    reject = CorrectionConfig(reject="token_k1", reject_low=0.15, reject_high=0.3, reject_first=first)
    config = config_of(AlgorithmConfig(advantage="reinforce_pp", correction=reject, **FROZEN))

    def work(backend: FakeBackend) -> MicroBatch | None:
        experience = Experience(backend, config, Spans())
        scored = experience.score(MicroBatch.of([group(0), group(1)]))
        assert scored is not None
        return experience.ready(scored, 2, AdaptiveCoefficients.start(config.algorithm))[0]

    (ready,) = ranks(1, work)
    assert ready is not None
    over = unrejected(ready) if first else ready
    assert 0 < unrejected(ready).loss_mask_N.sum() < ready.loss_mask_N.sum()
    whitened = ready.advantages_N[over.loss_mask_N].double()
    assert whitened.mean().item() == pytest.approx(0, abs=1e-6)
    assert whitened.std().item() == pytest.approx(1, abs=1e-4)
    assert not ready.advantages_N[~over.loss_mask_N].any()


@pytest.mark.parametrize("advantage", ["gae", "prime"])
def test_what_is_rejected_concerns_the_policy_alone(advantage: str) -> None:
    """Critic and reward model learn from the tokens that are too far from μ too: as if nothing were rejected."""
    reject = CorrectionConfig(reject="token_k1", reject_low=0.15, reject_high=0.3)
    base = config_of(AlgorithmConfig(advantage=advantage, **FROZEN))
    rejecting = config_of(AlgorithmConfig(advantage=advantage, correction=reject, **FROZEN))
    everything, _ = run(base, ONE_CLAIM)
    found, report = run(rejecting, ONE_CLAIM)
    assert report.values["train/rejected_fraction"] > 0
    assert not torch.allclose(found["policy"][0], everything["policy"][0])
    other = "critic" if advantage == "gae" else "reward_model"
    close({other: found[other]}, {other: everything[other]})


def test_weights_of_a_loglinear_proximal_follow_the_policy_from_step_to_step() -> None:
    """min(π_p/μ, 1.1) with π_p as it is before each step, though what is rejected is settled at the first one."""
    correction = CorrectionConfig("tis", high=1.1, reject="seq_mean_k1", reject_low=1e-3, reject_high=1e3)
    config = config_of(
        AlgorithmConfig(loss="reinforce", proximal="loglinear", correction=correction), epochs=3
    )
    found, report = run(config, ONE_CLAIM, make=old_group)
    assert report.values["train/rejected_fraction"] == 0
    batch, policy = MicroBatch.of([old_group(o) for o in range(GROUPS)]), FakeBackend().policy
    mask_N, advantages_N = batch.loss_mask_N, advantages(batch, config.algorithm)
    for gradient in found["policy"]:
        logp_N = policy.says(batch)[0]
        proximal_N = loglinear_proximal(batch.behaviour_N, logp_N, batch.versions_N, 2)
        weight_N = (proximal_N - batch.behaviour_N).exp().clamp(max=1.1).detach()
        loss = -(weight_N * logp_N * advantages_N)[mask_N].mean()
        (expected,) = torch.autograd.grad(loss, policy.table)
        torch.testing.assert_close(gradient, expected, atol=2e-6, rtol=0)
        with torch.no_grad():
            policy.table -= 0.1 * gradient


def test_several_steps_are_a_plain_ppo_loop() -> None:
    """PPO with a critic and truncated weights, once more by hand: no packing, no ranks, everything in one batch."""
    config = CASES["gae, several steps"]
    found, _ = run(config, [[[0, 4], [2]], [[5, 1], [3]]])
    backend, batch = FakeBackend(["critic"]), MicroBatch.of([group(o) for o in range(GROUPS)])
    policy, critic, mask_N = backend.policy, backend.models["critic"], batch.loss_mask_N
    batch = batch.with_columns(values=critic.predict(batch))
    batch = batch.with_columns(**value_targets(batch, config.algorithm))
    advantages_N = advantages(batch, config.algorithm)
    start_N, values_N, returns_N = policy.predict(batch), batch.columns["values"], batch.columns["returns"]
    weight_N = (start_N - batch.behaviour_N).exp().clamp(max=2.0)
    steps = mini_batches(range(GROUPS), 2, 2, config.run.seed, 2)
    assert len(steps) == 4
    gradients: dict[str, list[Tensor]] = {"policy": [], "critic": []}
    for ordinals in steps:
        here_N = mask_N & torch.isin(batch.ordinals_R, torch.tensor(ordinals))[batch.seq_N]
        ratio_N = (policy.says(batch)[0] - start_N).exp()
        surrogate_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(0.8, 1.28) * advantages_N)
        value_N = critic.says(batch)[0]
        held_N = torch.clamp(value_N, values_N - 0.5, values_N + 0.5)
        error_N = 0.5 * torch.maximum((value_N - returns_N) ** 2, (held_N - returns_N) ** 2)
        losses = {"policy": -(weight_N * surrogate_N)[here_N].mean(), "critic": error_N[here_N].mean()}
        for name, model in (("policy", policy), ("critic", critic)):
            (gradient,) = torch.autograd.grad(losses[name], model.table)
            gradients[name].append(gradient)
            with torch.no_grad():
                model.table -= 0.1 * gradient
    close(found, gradients)


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_tokens_are_selected_by_the_policy_as_it_is_before_each_step(loss: str) -> None:
    """The first step is large: the second one selects others than the policy of the version's start would."""
    algorithm = AlgorithmConfig(loss=loss, cov_share=0.2, cov_range=(0.2, 9.0), **FROZEN)
    optimizer = OptimizerConfig(lr=20.0, warmup_steps=0)
    config = config_of(algorithm, learner=LearnerConfig(micro_batch_tokens=64, epochs=2, optimizer=optimizer))
    found, _ = run(config, ONE_CLAIM)
    policy, batch = FakeBackend().policy, MicroBatch.of([group(o) for o in range(GROUPS)])
    batch = batch.with_advantages(advantages(batch, algorithm)).with_columns(proximal=policy.predict(batch))
    start_N, chosen = batch.columns["proximal"], []
    for gradient in found["policy"]:
        context = AlgorithmContext(seed=(config.run.seed, 2))
        chosen.append(select_covariance(batch, policy.predict(batch), start_N, algorithm, context))
        total, _ = PolicyObjective(algorithm, 1)(batch.with_columns(selected=chosen[-1]), *policy.says(batch))
        (expected,) = torch.autograd.grad(total / batch.loss_mask_N.sum(), policy.table)
        torch.testing.assert_close(gradient, expected, atol=2e-6, rtol=0)
        with torch.no_grad():
            policy.table -= 20.0 * gradient
    assert len(chosen) == 2
    assert not torch.equal(*chosen)


def as_recorded(ordinal: int) -> Group:
    """All of version 2, with the log-probs that the policy has at its start."""
    made = dataclasses.replace(
        group(ordinal), versions=np.where(group(ordinal).loss_mask != 0, 2, -1).astype(np.int32)
    )
    return dataclasses.replace(made, logprobs=FakeBackend().policy.predict(MicroBatch.of([made])).numpy())


def test_recorded_log_probs_are_compared_before_the_first_step_alone() -> None:
    """After it the policy is no longer the one that made the tokens."""
    generator = GeneratorConfig(engine="transformers", max_length=32, max_tokens=8)
    learner = LearnerConfig(
        micro_batch_tokens=64, mini_batches=2, optimizer=OptimizerConfig(lr=50.0, warmup_steps=0)
    )
    config = config_of(AlgorithmConfig(proximal="behaviour"), generator=generator, learner=learner)
    _, report = run(config, ONE_CLAIM, make=as_recorded)
    first, _ = mini_batches(range(GROUPS), 2, 1, config.run.seed, 2)
    compared = sum(int(as_recorded(ordinal).loss_mask.sum()) for ordinal in first)
    assert report.values["train/logprob_gap/train/tokens"] == compared
    assert report.values["train/logprob_gap/train/max"] < 1e-5


def test_the_policy_waits_while_its_critic_warms_up() -> None:
    base = several(AlgorithmConfig(advantage="gae", **FROZEN), run=RunConfig(versions=5))
    config = dataclasses.replace(
        base,
        critic=dataclasses.replace(base.critic, warmup_versions=2),
        learner=dataclasses.replace(
            base.learner, optimizer=OptimizerConfig(lr=0.5, warmup_steps=0, schedule="linear", min_lr_ratio=0)
        ),
    )
    backend = FakeBackend(["critic"])
    step, start = version_step(backend, config), backend.policy.table.clone()
    rates = []
    for version in range(5):
        step.add([group(version), group(version + 1)], version)
        report = step.step(version)
        assert report.values["train/critic/loss"] > 0
        assert torch.equal(backend.policy.table, start) == (version < 2)
        rates.append(report.values.get("train/lr"))
    assert len(backend.models["critic"].gradients) == 5 * 4
    # The policy's schedule spans the 12 steps that it makes; reported is the mean over the four of a version.
    assert rates[:2] == [None, None]
    assert rates[2:] == pytest.approx([0.5 * (1 - (k + 1.5) / 11) for k in (0, 4, 8)])


def test_coefficients_adapt_from_version_to_version() -> None:
    shaping = ShapingConfig(kl_coef=0.1, kl_target=1e-3, kl_horizon=100)
    config = config_of(AlgorithmConfig(advantage="safe_rlhf", shaping=shaping, cost_limit=-1.0, cost_lr=0.5))

    def work(backend: FakeBackend) -> list[VersionReport]:
        step, reports = version_step(backend, config), []
        for version in range(2):
            step.add([group(2 * version + backend.rank)], version)
            reports.append(step.step(version))
        assert step.controls != AdaptiveCoefficients.start(config.algorithm)
        return reports

    first, second = ranks(2, work, requirements.models(config))[1]
    assert (first.values["train/kl_coef"], first.values["train/cost_multiplier"]) == (0.1, 1.0)
    # The KL is far above its target: + 20 % of 8 rollouts / 100. Costs are above their limit.
    assert second.values["train/kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * 8 / 100))
    cost = np.concatenate([group(o).reward_parts["cost"] for o in range(2)]).mean()
    assert second.values["train/cost_multiplier"] == pytest.approx(math.exp(0.5 * (cost + 1)), rel=1e-5)


def test_coefficients_wait_while_the_critic_warms_up() -> None:
    algorithm = AlgorithmConfig(advantage="safe_rlhf", cost_limit=-1.0, cost_lr=0.5)
    critic = CriticConfig(warmup_versions=1, optimizer=OptimizerConfig(lr=0.1, warmup_steps=0))
    config = config_of(algorithm, critic=critic)
    step, seen = version_step(FakeBackend(requirements.models(config)), config), []
    for version in range(3):
        step.add([group(version)], version)
        seen.append(step.step(version).values["train/cost_multiplier"])
    assert seen[0] == seen[1] == 1.0 < seen[2]


def test_the_reference_follows_every_so_many_versions() -> None:
    config = config_of(
        AlgorithmConfig(kl_loss=KlLossConfig(coef=0.1)), reference=ReferenceConfig(update_every=2)
    )
    backend = FakeBackend(["reference"])
    step, reference = version_step(backend, config), backend.models["reference"]
    same = []
    for version in range(4):
        step.add([group(version)], version)
        step.step(version)
        same.append(torch.equal(reference.table, backend.policy.table))
    assert same == [False, True, False, True]


def broken(ordinal: int) -> Group:
    """Group 3 has a log-prob that is not a number."""
    made = group(ordinal)
    if ordinal == 3:
        made.logprobs[made.loss_mask != 0] = np.nan
    return made


@pytest.mark.parametrize("name", ["grpo with KL loss", "gae, several steps", "gdpo"])
def test_a_group_that_is_not_finite_is_named_on_every_rank_before_anything_moves(name: str) -> None:
    config = CASES[name]

    def work(backend: FakeBackend) -> tuple[list[int], dict[str, list[Tensor]], VersionReport]:
        step = version_step(backend, config)

        def train(shares: Sequence[Claims]) -> VersionReport:
            for claim in shares[backend.rank]:
                step.add([broken(ordinal) for ordinal in claim], 2)
            return step.step(2)

        with pytest.raises(NonFiniteGroups) as found:
            train([[[0, 3], [5]], [[1], []]])
        models = {"policy": backend.policy, **backend.models}
        assert not any(model.gradients for model in models.values())
        step.abandon()
        report = train([[[0], [5]], [[1], []]])
        return found.value.ordinals, {name: model.gradients for name, model in models.items()}, report

    without, _ = run(config, [[[0], [5]], [[1], []]])
    for ordinals, gradients, report in ranks(2, work, requirements.models(config)):
        assert ordinals == [3]
        assert not report.refused
        close(gradients, without, atol=0)


def test_a_group_that_one_rank_finds_in_its_passes_stops_the_others_too() -> None:
    """The policy's own log-probs of group 3, which rank 0 has, are not finite."""
    config = config_of(AlgorithmConfig())

    def work(backend: FakeBackend) -> list[int]:
        step, says = version_step(backend, config), backend.policy.says

        def broken_for_3(batch: MicroBatch) -> tuple[Tensor, Tensor]:
            logp_N, entropy_N = says(batch)
            return torch.where((batch.ordinals_R == 3)[batch.seq_N], math.nan, logp_N), entropy_N

        backend.policy.says = broken_for_3  # type: ignore[method-assign]
        step.add([group(3 - backend.rank)], 2)
        with pytest.raises(NonFiniteGroups) as found:
            step.step(2)
        assert not backend.policy.gradients
        return found.value.ordinals

    assert ranks(2, work) == [[3], [3]]


def test_a_later_step_that_is_not_finite_for_one_model_moves_none_and_ends_the_version() -> None:
    """Its log-probs are not finite: too late to begin the version anew."""
    config = several(AlgorithmConfig(advantage="gae"))
    backend = FakeBackend(requirements.models(config))
    step, move = version_step(backend, config), backend.policy.optimizer_step

    def breaks(scale: float, lr: float) -> float:
        norm = move(scale, lr)
        backend.policy.table.data.fill_(math.nan)
        return norm

    backend.policy.optimizer_step = breaks  # type: ignore[method-assign]
    step.add([group(ordinal) for ordinal in range(GROUPS)], 2)
    assert step.step(2).refused == "gradient norm nan of the policy in optimizer step 2"
    assert len(backend.policy.gradients) == len(backend.models["critic"].gradients) == 1


def test_a_later_step_whose_loss_alone_is_not_finite_is_refused_too() -> None:
    """Where a clamp or a choice hides what is not a number from the backward pass, the gradient is 0."""
    backend = FakeBackend()
    step, move, says = (
        version_step(backend, several(AlgorithmConfig())),
        backend.policy.optimizer_step,
        backend.policy.says,
    )

    def not_a_number(batch: MicroBatch) -> tuple[Tensor, Tensor]:
        logp_N, entropy_N = says(batch)
        return torch.where(batch.loss_mask_N, math.nan, logp_N), entropy_N

    def breaks(scale: float, lr: float) -> float:
        backend.policy.says = not_a_number  # type: ignore[method-assign]
        return move(scale, lr)

    backend.policy.optimizer_step = breaks  # type: ignore[method-assign]
    step.add([group(ordinal) for ordinal in range(GROUPS)], 2)
    assert step.step(2).refused == "gradient norm nan of the policy in optimizer step 2"
    assert len(backend.policy.gradients) == 1


def test_a_critic_whose_gradient_is_not_finite_holds_the_policy_back_too() -> None:
    config = config_of(AlgorithmConfig(advantage="safe_rlhf"))
    backend = FakeBackend(requirements.models(config))
    step = version_step(backend, config)
    step.add([group(0)], 2)
    backend.models["cost_critic"].table.grad = torch.full((VOCABULARY,), torch.inf, dtype=torch.float64)
    assert step.step(2).refused == "gradient norm inf of the cost_critic"
    assert backend.policy.gradients == backend.models["critic"].gradients == []
    step.add([group(1)], 2)
    assert not step.step(2).refused


def test_what_was_abandoned_leaves_no_trace() -> None:
    for config in (CASES["grpo with KL loss"], CASES["gae, several steps"]):
        expected, _ = run(config, ONE_CLAIM)
        backend = FakeBackend(requirements.models(config))
        step = version_step(backend, config)
        step.add([group(17), group(18)], 2)
        step.abandon()
        step.add([group(ordinal) for ordinal in range(GROUPS)], 2)
        assert step.step(2).values["train/groups"] == GROUPS
        close({"policy": backend.policy.gradients}, {"policy": expected["policy"]})


def mostly_flat(ordinal: int) -> Group:
    return group(ordinal, flat=ordinal % 3 > 0)


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "none"])  # alone, it is refused
def test_leaving_flat_groups_out_is_exact(loss: str) -> None:
    """Where nothing is left out, no pass is saved either."""
    whole = "seq-mean-token-sum" if loss == "sppo" else "token-mean"
    advantage = "sppo" if loss == "sppo" else "grpo"
    algorithm = AlgorithmConfig(
        advantage=advantage, loss=loss, aggregation=whole, cov_share=0.2, cov_range=(-9, 9), **FROZEN
    )
    gradients, passes = [], []
    for skip in (True, False):
        config = config_of(algorithm, tokens=1, mini_batches=2)
        learner = dataclasses.replace(config.learner, skip_flat_groups=skip)
        backend = FakeBackend()
        step = version_step(backend, dataclasses.replace(config, learner=learner))
        step.add([mostly_flat(ordinal) for ordinal in range(GROUPS)], 2)
        step.step(2)
        gradients.append({"policy": backend.policy.gradients})
        passes.append(backend.policy.passes)
    close(*gradients, atol=1e-12)
    assert passes == ([24, 24] if loss in ("sppo", "kl_cov", "dro") else [8, 24])


@pytest.mark.parametrize(
    "term",
    [
        {"entropy_bonus": 0.1},
        {"kl_loss": KlLossConfig(coef=0.1)},
        {"teacher_loss": TeacherLossConfig(coef=0.1)},
        {"lm_coef": 0.1},
    ],
    ids=lambda t: next(iter(t)),
)
def test_a_term_beside_the_loss_takes_flat_groups_too(term: dict[str, Any]) -> None:
    """It has a gradient where no token has an advantage."""
    config = config_of(AlgorithmConfig(**term, **FROZEN), tokens=1, mini_batches=2)
    assert config.learner.skip_flat_groups
    backend = FakeBackend(requirements.models(config))
    step = version_step(backend, config)
    step.add([group(ordinal, flat=True) for ordinal in range(GROUPS)], 2)
    step.step(2)
    assert backend.policy.passes == GROUPS * SIZE
    assert all(gradient.abs().sum() > 0 for gradient in backend.policy.gradients)


@pytest.mark.parametrize(
    ("advantage", "trained"),
    [("dr_grpo", 0), ("off_policy_baseline", GROUPS * SIZE), ("asymre", GROUPS * SIZE)],
)
def test_flat_groups_whose_answers_are_less_probable_now_are_trained_on(advantage: Any, trained: int) -> None:
    """With two baselines and not with the mean. The policy is near a uniform one, μ gives each token e⁻²."""
    config = config_of(AlgorithmConfig(advantage=advantage), tokens=1)
    backend = FakeBackend()
    step = version_step(backend, config)
    step.add([group(ordinal, flat=True) for ordinal in range(GROUPS)], 2)
    step.step(2)
    assert backend.policy.passes == trained


def test_rollouts_that_were_not_drawn_need_no_pass() -> None:
    config = config_of(AlgorithmConfig(shaping=ShapingConfig(resample="max_min")), tokens=1)
    backend = FakeBackend()
    step = version_step(backend, config)
    step.add([group(ordinal) for ordinal in range(GROUPS)], 2)
    report = step.step(2)
    assert (
        backend.policy.passes
        == round(report.values["rollout/resampled_fraction"] * GROUPS * SIZE)
        < GROUPS * SIZE
    )


def test_the_reward_model_learns_the_outcomes_from_before_any_shaping() -> None:
    """Every answer is longer than allowed and loses 10; those with a reward of 1 or 2 are successes nevertheless."""
    shaping = ShapingConfig(overlong_buffer=1, overlong_penalty=10.0)
    config = config_of(AlgorithmConfig(advantage="prime", prm_beta=0.7, shaping=shaping))
    config = dataclasses.replace(config, generator=dataclasses.replace(config.generator, max_tokens=1))
    found, report = run(config, ONE_CLAIM)
    assert report.values["rollout/reward/overlong_penalty"] == 10
    backend = FakeBackend(["reference", "reward_model"])
    batch = MicroBatch.of([group(ordinal) for ordinal in range(GROUPS)])
    model, log_ref_N = backend.models["reward_model"], backend.models["reference"].predict(batch)
    ratio_N = (model.says(batch)[0] - log_ref_N) * batch.loss_mask_N
    reward_R = 0.7 * torch.stack([part.sum() for part in ratio_N.split(batch.lengths_R)])
    success_R = batch.rewards_R > 0.5
    loss = -torch.where(success_R, reward_R.sigmoid().log(), (-reward_R).sigmoid().log()).mean()
    loss.backward()
    assert model.table.grad is not None
    close({"reward_model": found["reward_model"]}, {"reward_model": [model.table.grad]})
    assert report.values["train/reward_model/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert report.values["train/reward_model/accuracy"] == ((reward_R > 0) == success_R).double().mean()


def test_what_has_succeeded_is_imitated_whatever_was_taken_off_its_reward() -> None:
    """The LM loss is the mean of −log π over the tokens of successful rollouts of the mini-batch."""
    shaping = ShapingConfig(overlong_buffer=1, overlong_penalty=10.0)
    algorithm = AlgorithmConfig(loss="reinforce", advantage_scale=0.0, lm_coef=0.3, shaping=shaping)
    found, _ = run(config_of(algorithm, mini_batches=2), [[[0, 4], [2]], [[5, 1], [3]]])
    policy = FakeBackend().policy
    for ordinals, gradient in zip(mini_batches(range(GROUPS), 2, 1, 0, 2), found["policy"], strict=True):
        batch = MicroBatch.of([group(ordinal) for ordinal in ordinals])
        chosen_N = batch.loss_mask_N & (batch.rewards_R > 0.5)[batch.seq_N]
        (expected,) = torch.autograd.grad(-0.3 * policy.says(batch)[0][chosen_N].mean(), policy.table)
        torch.testing.assert_close(gradient, expected, atol=2e-6, rtol=0)
        with torch.no_grad():
            policy.table -= 0.1 * gradient


@pytest.mark.parametrize(
    ("name", "lacking", "says"),
    [
        ("remax", {"greedy_reward": None}, "greedy"),
        ("gigpo", {"columns": {}}, "column 'step'"),
        ("off_policy_step_baseline", {"columns": {}}, "column 'step'"),
        ("safe_rlhf", {"reward_parts": {}}, "reward part 'cost'"),
    ],
)
def test_what_a_group_lacks_is_named(name: str, lacking: dict[str, Any], says: str) -> None:
    with pytest.raises(TrainingError, match=says):
        run(CASES[name], [[[0, 1, 2]]], make=lambda o: dataclasses.replace(group(o), **lacking))


def uneven(ordinal: int) -> Group:
    """Half of the groups come without steps and without a cost, as a reward function may leave them out."""
    made = group(ordinal)
    if ordinal % 2:
        return made
    parts = {name: part for name, part in made.reward_parts.items() if name != "cost"}
    return dataclasses.replace(made, columns={}, reward_parts=parts)


def without(ordinal: int) -> Group:
    """The same, said aloud: no steps, and a cost of 0."""
    made = uneven(ordinal)
    if ordinal % 2:
        return made
    none_N, none_n = np.zeros(len(made.token_ids)), np.zeros(SIZE, np.float32)
    columns = {
        "step": (none_N - 1).astype(np.int32),
        "anchor": none_N.astype(np.int64),
        "step_rewards": none_N.astype(np.float32),
    }
    return dataclasses.replace(made, columns=columns, reward_parts={**made.reward_parts, "cost": none_n})


@pytest.mark.parametrize("name", ["gigpo", "safe_rlhf", "gdpo", "gae, several steps"])
def test_groups_without_steps_or_parts_take_them_from_no_other(name: str) -> None:
    """However claims and ranks put the two kinds together."""
    config = CASES[name]
    expected, report = run(config, ONE_CLAIM, make=without)
    for shares in (ONE_CLAIM, [[[0], [1, 3], [2, 4], [5]]], [[[0, 2], [4]], [[1], [3, 5]]]):
        found, same = run(config, shares, make=uneven)
        close(found, expected)
        assert same.values == pytest.approx(report.values, rel=1e-4, abs=1e-5)
