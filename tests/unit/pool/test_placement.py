"""Which models run on a pool, by config alone, and what a pool's model says to what the learner's own would."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import copied_weights, random_group, small_config, tiny_model
from torch import Tensor

from asyncrl.config.load import load_config
from asyncrl.config.schema import (
    AgentConfig,
    Config,
    LearnerConfig,
    ReferenceConfig,
    RewardConfig,
    RewardModelConfig,
    TeacherConfig,
)
from asyncrl.config.sections.algorithm import AlgorithmConfig, KlLossConfig, TeacherLossConfig
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.config.sections.placement import PlaceConfig, PlacementConfig, RewardsPlaceConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.algorithms.registry import needs
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.checks.finite_check import NOT_FINITE
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.reporting.report import GeneratorTotals
from asyncrl.learner.startup import eval_settings, train_settings
from asyncrl.learner.training import requirements
from asyncrl.learner.training.accumulator import trainables
from asyncrl.learner.training.version_step import version_step
from asyncrl.pool.model import InferenceModel
from asyncrl.pool.process import run_pool
from asyncrl.pool.worker import LeftOut
from asyncrl.queue.protocol.settings import StageSettings
from asyncrl.telemetry.status import ProcessStatus
from asyncrl.types import Array, Group

POOL, TWO_PROCESSES = PlaceConfig(where="pool"), PlaceConfig(where="pool", processes=2)
KL = AlgorithmConfig(kl_loss=KlLossConfig(coef=0.1))
TOPK = AlgorithmConfig(loss="none", teacher_loss=TeacherLossConfig(coef=1.0, form="topk", top_k=5))
PRIME, DISTILL = AlgorithmConfig(advantage="prime"), AlgorithmConfig(advantage="distill", loss="reinforce")
TRAINED_BEFORE = RewardModelConfig(path="prm", frozen=True)
TWO = RewardConfig(function=None, functions={name: {"function": f"my:{name}"} for name in ("right", "liked")})


def on_pools(*names: str) -> PlacementConfig:
    return PlacementConfig(**dict.fromkeys(names, POOL))


def rewards_on_pool(*functions: str) -> PlacementConfig:
    return PlacementConfig(rewards=RewardsPlaceConfig(where="pool", functions=[*functions]))


def config_with(**sections: Any) -> Config:
    return small_config(Path("nowhere"), **sections)


# ---------------------------------------------------------------------- the section


def test_everything_is_colocated_unless_told(tmp_path: Path) -> None:
    config = config_with(algorithm=KL)
    assert config.placement.pools == {}
    assert (requirements.colocated(config), requirements.stages(config)) == ({"reference"}, ())
    assert train_settings(config, 1).columns == ()


def test_a_pool_is_set_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: m}\ntasks: {source: 'a:b'}\nreward: {function: 'a:b'}\n")
    words = [
        "placement.reference.where=pool",
        "placement.reference.processes=2",
        "placement.reference.devices='6,7'",
    ]
    (place,) = load_config(path, words).placement.pools.values()
    assert (place.processes, place.devices) == (2, "6,7")


def test_what_is_on_a_pool_is_a_stage_and_not_the_learners() -> None:
    config = config_with(
        algorithm=PRIME, reward_model=TRAINED_BEFORE, placement=on_pools("reference", "reward_model")
    )
    assert requirements.colocated(config) == set()
    assert requirements.stages(config) == (
        StageSettings("reference", adds=("reference",)),
        StageSettings("reward_model", adds=("reward_model",)),
    )
    assert train_settings(config, 2).columns == ("reference", "reward_model")
    assert eval_settings(config).stages == ()


def test_a_model_that_learns_adds_its_column_from_a_pool_of_one_process() -> None:
    safe = AlgorithmConfig(advantage="safe_rlhf")
    weights = RewardConfig(weights={"cost": 0.0})
    config = config_with(algorithm=safe, reward=weights, placement=on_pools("critic", "cost_critic"))
    assert requirements.colocated(config) == set()
    assert requirements.models_trained_in_pools(config) == ("critic", "cost_critic")
    assert train_settings(config, 1).columns == ("values", "cost_values")
    learns = config_with(algorithm=PRIME, placement=on_pools("reference", "reward_model"))
    assert requirements.models_trained_in_pools(learns) == ("reward_model",)
    frozen = dataclasses.replace(learns, reward_model=TRAINED_BEFORE)
    assert requirements.models_trained_in_pools(frozen) == ()
    dataclasses.replace(frozen, placement=PlacementConfig(reward_model=TWO_PROCESSES))


def test_models_do_not_work_on_groups_that_a_pool_may_filter() -> None:
    places = dataclasses.replace(rewards_on_pool("liked"), reference=POOL)
    filtered = dataclasses.replace(PRIME, filter="no_spread")
    config = config_with(algorithm=filtered, reward=TWO, placement=places)
    assert requirements.stages(config) == (
        StageSettings("reference", needs=("rewards",), adds=("reference",)),
        StageSettings("rewards", adds=("rewards",)),
    )
    at_once = requirements.stages(dataclasses.replace(config, algorithm=PRIME))
    assert [stage.needs for stage in at_once] == [(), ()]


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        (
            {"placement": on_pools("reference"), "reference": ReferenceConfig(update_every=2)},
            "reference.update_every",
        ),
        *(
            ({"placement": PlacementConfig(**{name: TWO_PROCESSES})}, f"placement.{name}.processes")
            for name in ("critic", "cost_critic", "reward_model")
        ),
        (
            {"placement": rewards_on_pool("liked")},
            "placement.rewards.functions",
        ),  # of one function without a name
        ({"placement": rewards_on_pool("disliked"), "reward": TWO}, "placement.rewards.functions"),
        (
            {
                "placement": rewards_on_pool("liked"),
                "reward": TWO,
                "algorithm": AlgorithmConfig(advantage="remax"),
            },
            "placement.rewards.where",
        ),
    ],
)
def test_what_does_not_go_with_a_pool_is_refused(sections: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_with(**sections)
    assert error.value.key == key


@pytest.mark.parametrize(
    ("places", "key"),
    [
        ({"teacher": PlaceConfig(devices="0")}, "placement.teacher.devices"),
        ({"reference": PlaceConfig(processes=2)}, "placement.reference.processes"),
        ({"rewards": RewardsPlaceConfig(functions=["liked"])}, "placement.rewards.functions"),
        ({"rewards": RewardsPlaceConfig(where="pool", ranks=2)}, "placement.rewards.ranks"),
        ({"teacher": PlaceConfig(where="pool", processes=0)}, "placement.teacher.processes"),
    ],
)
def test_wrong_places_are_refused(places: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config(placement=PlacementConfig(**places))
    assert error.value.key == key


def test_a_pool_of_a_model_that_nobody_asks_for_is_refused() -> None:
    config = config_with(placement=on_pools("teacher"), teacher=TeacherConfig())
    with pytest.raises(ConfigError) as error:
        requirements.check(config)
    assert error.value.key == "placement.teacher.where"
    requirements.check(config_with(algorithm=KL, placement=on_pools("reference")))


def test_reward_functions_are_dealt_out() -> None:
    weighed = dataclasses.replace(TWO, weights={"right": 2.0, "liked/warmth": 0.5})
    config = config_with(reward=weighed, placement=rewards_on_pool("liked"))
    mine, theirs = config.rewards_of("generator"), config.rewards_of("pool")
    assert mine is not None
    assert theirs is not None
    assert ([*mine.functions], mine.weights) == (["right"], {"right": 2.0})
    assert ([*theirs.functions], theirs.weights) == (["liked"], {"liked/warmth": 0.5})
    whole = config_with(placement=rewards_on_pool())
    assert whole.rewards_of("generator") is None
    assert eval_settings(whole).columns == ("rewards",)
    assert whole.rewards_of("pool") == whole.reward
    assert config_with().rewards_of("pool") is None


def test_a_frozen_reward_model_must_be_named_and_learns_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward_model\.path"):
        Config(reward_model=RewardModelConfig(frozen=True))
    model = tiny_model(tmp_path / "model")
    frozen = RewardModelConfig(path=model.path, frozen=True)
    config = small_config(tmp_path, model=model, algorithm=PRIME, reward_model=frozen)
    backend = FsdpBackend(config, requirements.colocated(config))
    assert [trainable.name for trainable in trainables(backend, config, {})] == ["policy"]


@pytest.mark.parametrize(
    ("model", "key"), [("reference", "placement.reference.where"), ("refernce", "MODEL")]
)
def test_a_process_of_a_pool_that_is_not_there_is_refused(model: str, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        asyncio.run(run_pool(config_with(), model, name="one", status=ProcessStatus()))
    assert error.value.key == key


# ---------------------------------------------------------------------- what a model says


def own_reference(folder: Path, algorithm: AlgorithmConfig, **sections: Any) -> Config:
    """In float64, with a reference (or teacher) of its own weights, and Adam's steps along the gradient."""
    optimizer = OptimizerConfig(lr=1e-2, warmup_steps=1, eps=1.0)
    model = tiny_model(folder / "model", dtype="float64")
    other = str(folder / "other")
    if not Path(other).exists():
        save_other_weights(Path(model.path), Path(other))
    given: dict[str, Any] = {
        "model": model,
        "learner": LearnerConfig(optimizer=optimizer, micro_batch_tokens=40),
        "algorithm": algorithm,
    }
    taught = "teacher" in needs(algorithm)
    beside: dict[str, Any] = {"teacher": TeacherConfig(path=other)} if taught else {}
    beside |= {"reference": ReferenceConfig(path=other)} if algorithm.kl_loss.coef else {}
    if algorithm.advantage == "prime":
        beside |= {"reward_model": RewardModelConfig(path=other, frozen=True)}
    return small_config(folder, **given, **beside, **sections)


def save_other_weights(model: Path, other: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).double().save_pretrained(other)


def staged(groups: list[Group], name: str, config: Config) -> list[Group]:
    """As they come out of the queue behind the pool of a model."""
    model = InferenceModel(name, config)
    return [
        dataclasses.replace(group, columns={**group.columns, **asyncio.run(model.columns(group))})
        for group in groups
    ]


def trained(config: Config, groups: list[Group]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The policy after one version of these groups, and what was measured."""
    backend = FsdpBackend(config, requirements.colocated(config))
    training = version_step(backend, config)
    for group in groups:
        training.add([group], 0)
    report = training.step(0)
    assert report.refused == ""
    return copied_weights(backend), dict(report.values)


def doubled(column: Array) -> Array:
    """Log-probs alone: the tokens of TOPK stay."""
    changed = column.copy()
    part = changed if changed.ndim == 1 else changed[:, : 2 + TOPK.teacher_loss.top_k]
    part *= 2
    return changed


@pytest.mark.parametrize(
    ("names", "algorithm"),
    [
        (["reference"], KL),
        (["teacher"], DISTILL),
        (["teacher"], TOPK),
        (["reference", "reward_model"], PRIME),
    ],
    ids=["reference", "teacher", "its most likely tokens", "prime"],
)
@pytest.mark.parametrize("epochs", [1, 2], ids=["streaming", "whole batch"])
def test_the_same_groups_give_the_same_gradients(
    names: list[str], algorithm: AlgorithmConfig, epochs: int, tmp_path: Path
) -> None:
    groups = [random_group(ordinal) for ordinal in range(2)]
    colocated = own_reference(tmp_path, algorithm)
    colocated = dataclasses.replace(colocated, learner=dataclasses.replace(colocated.learner, epochs=epochs))
    pooled = dataclasses.replace(colocated, placement=on_pools(*names))
    assert requirements.colocated(pooled) == set()
    expected, measured = trained(colocated, groups)
    for name in names:
        groups = staged(groups, name, pooled)
    found, told = trained(pooled, groups)
    start = FsdpBackend(pooled).local_tensors()
    for key, tensor in expected.items():
        # Columns are float32 on both ways, and packed otherwise.
        moved = (tensor - start[key]).abs().max()
        assert torch.allclose(found[key], tensor, atol=float(1e-6 * moved), rtol=0), key
    assert math.isclose(told["train/grad_norm"], measured["train/grad_norm"], rel_tol=1e-6)
    others = [
        dataclasses.replace(group, columns={**group.columns, names[-1]: doubled(group.columns[names[-1]])})
        for group in groups
    ]
    assert not math.isclose(
        trained(pooled, others)[1]["train/grad_norm"], told["train/grad_norm"], rel_tol=1e-3
    )


def test_what_a_pool_says_of_a_group_is_what_the_learners_own_would(tmp_path: Path) -> None:
    agent = AgentConfig(environment="grids.py:Grid")
    config = dataclasses.replace(own_reference(tmp_path, KL), agent=agent)
    backend = FsdpBackend(config, ["reference"])
    group = random_group(3, size=12, segments=3)
    assert group.tokens > config.learner.micro_batch_tokens  # several passes
    expected = backend.models["reference"].predict(MicroBatch.of([group]))
    values_N = InferenceModel("reference", config).predict(group)
    assert torch.allclose(values_N, expected, atol=1e-6)
    assert (values_N[torch.from_numpy(group.loss_mask == 0)] == 0).all()


def test_a_group_with_a_log_prob_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    model = InferenceModel("reference", own_reference(tmp_path, KL))
    model.predict = lambda group: torch.tensor([0.0, math.nan])  # type: ignore[method-assign]
    with pytest.raises(LeftOut, match="not finite") as left_out:
        asyncio.run(model.columns(random_group(0)))
    assert left_out.value.reason == NOT_FINITE


def test_a_group_that_no_worker_makes_is_left_out_by_a_model(tmp_path: Path) -> None:
    """It would end the pool, and whichever pool gets it next."""
    model, group = InferenceModel("reference", own_reference(tmp_path, KL)), random_group(0)
    group.token_ids[0] = 33
    with pytest.raises(LeftOut, match="token 33 is none of the 33") as left_out:
        asyncio.run(model.columns(group))
    assert left_out.value.reason == "corrupt"


def test_a_model_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = own_reference(tmp_path, KL)
    other = AutoConfig.from_pretrained(config.model.path)
    other.vocab_size = 40
    other.save_pretrained(tmp_path / "larger")
    reference = ReferenceConfig(path=str(tmp_path / "larger"))
    with pytest.raises(ConfigError, match=r"reference\.path"):
        InferenceModel("reference", dataclasses.replace(config, reference=reference))


def test_pools_are_counted_apart_from_generators() -> None:
    generator = {"tokens": 10, "seconds": {"decode": 1.0}, "held": 3}
    row = GeneratorTotals().update(
        {
            "generator-0": generator,
            "reference-0": {"stage": "reference", "groups": 2, "busy_s": 0.5},
            "reference-1": {"stage": "reference", "groups": 3, "busy_s": 0.25, "dropped/not_finite": 1},
        }
    )
    assert row["rollout/generators"] == 1
    pools = {key: value for key, value in row.items() if key.startswith("rollout/pool/")}
    assert pools == {
        "rollout/pool/reference/groups": 5,
        "rollout/pool/reference/busy_s": 0.75,
        "rollout/pool/reference/dropped/not_finite": 1,
    }
