"""`examples/own_critic.py`, and models that a user declares: numbers by hand, what is refused, and training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from learner_cases import OWN_CRITIC, kept_registries, rewards_batch, rollout, small_config, tiny_model

from asyncrl.bench.climb import climb
from asyncrl.config.schema import Config
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.models import CriticConfig
from asyncrl.config.sections.placement import PlacementConfig
from asyncrl.errors import ConfigError, TrainingError
from asyncrl.learner.algorithms import roles
from asyncrl.learner.algorithms.advantages import advantages
from asyncrl.learner.algorithms.advantages.return_advantages import value_targets
from asyncrl.learner.algorithms.registry import NEEDS, needs
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.training import requirements
from asyncrl.types import COLUMNS, Group, Sampling, Task

OWN = AlgorithmConfig(own_advantage=f"{OWN_CRITIC}:two_horizons", gamma=1.0, lam=1.0)

BESIDE = """
from asyncrl.learner.algorithms.registry import advantage
from asyncrl.learner.algorithms.roles import frozen

frozen("second_teacher", path={path!r})

@advantage("of_two", source="an example", needs={{"teacher", "second_teacher"}})
def of_two(batch, config, context):
    return batch.columns["teacher"] + batch.columns["second_teacher"]

@advantage("misspelt", source="an example", needs={{"second_techer"}})
def misspelt(batch, config, context): ...
"""


@pytest.fixture(scope="module", autouse=True)
def registries() -> Iterator[None]:
    with kept_registries():
        yield


def config_with(folder: Path, algorithm: AlgorithmConfig, **placement: object) -> Config:
    return small_config(
        folder,
        model=tiny_model(folder / "model"),
        algorithm=algorithm,
        placement=PlacementConfig(**placement),  # type: ignore[arg-type]
    )


def test_two_horizons_by_hand() -> None:
    """A rollout of three policy tokens with reward 1 at its end, λ = 1: the returns are 1, 1, 1 and 0.81, 0.9, 1."""
    batch = MicroBatch.of([Group.from_rollouts(Task(0, "x"), Sampling(), [rollout([5, 6, 7, 8], 1, 1.0)])])
    values, near = torch.tensor([0.0, 0.1, 0.4, 0.7]), torch.tensor([0.0, 0.2, 0.3, 0.9])
    batch = batch.with_columns(values=values, near_values=near)
    targets = value_targets(batch, OWN)
    assert targets["returns"].tolist() == pytest.approx([0, 1, 1, 1])
    assert targets["near_returns"].tolist() == pytest.approx([0, 0.81, 0.9, 1])
    mean_N = torch.tensor([(0.9 + 0.61) / 2, (0.6 + 0.6) / 2, (0.3 + 0.1) / 2])
    white_N = (mean_N - mean_N.mean()) / mean_N.std()
    assert advantages(batch, OWN)[1:].tolist() == pytest.approx(white_N.tolist(), abs=1e-5)


def test_a_declared_model_is_one_of_the_run(tmp_path: Path) -> None:
    config = config_with(tmp_path, OWN)
    assert needs(OWN) == {"critic", "near", "batch"}
    assert requirements.models(config) == requirements.colocated(config) == {"critic", "near"}
    assert requirements.critics(config) == {"critic", "near"}
    assert roles.learning() == ["critic", "cost_critic", "reward_model", "near"]


def test_a_pool_of_it_adds_its_column(tmp_path: Path) -> None:
    config = config_with(tmp_path, OWN, own={"near": {"where": "pool", "threads": 2}})
    assert requirements.colocated(config) == {"critic"}
    assert requirements.models_trained_in_pools(config) == ("near",)
    assert [stage.adds for stage in requirements.stages(config)] == [("near_values",)]
    requirements.check(config)


@pytest.mark.parametrize(
    ("own", "key"),
    [
        ({"nearer": {"where": "pool"}}, "placement.own.nearer.where"),
        ({"near": {"where": "pool", "processes": 2}}, "placement.own.near.processes"),
        ({"near": {"were": "pool"}}, "placement.own.near.were"),
        ({"near": {"threads": 2}}, "placement.own.near.threads"),
        ({"critic": {"where": "pool"}}, "placement.own.critic"),
        ({"no name": {"where": "pool"}}, "placement.own.no name"),
        ({"n" * 41: {"where": "pool"}}, f"placement.own.{'n' * 41}"),
    ],
)
def test_a_place_that_does_not_fit_is_refused(tmp_path: Path, own: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        requirements.check(config_with(tmp_path, OWN, own=own))
    assert error.value.key == key


def test_a_frozen_model_gives_its_log_probs(tmp_path: Path) -> None:
    file, model = tmp_path / "beside.py", tiny_model(tmp_path / "model")
    file.write_text(BESIDE.format(path=model.path))
    config = config_with(tmp_path, AlgorithmConfig(own_advantage=f"{file}:of_two"))
    assert requirements.models(config) == {"teacher", "second_teacher"}
    assert "second_teacher" not in roles.learning()
    backend = FsdpBackend(config, {"second_teacher"})
    batch = rewards_batch([1.0, 0.0])
    assert torch.equal(backend.models["second_teacher"].predict(batch), backend.policy.predict(batch))

    with pytest.raises(ConfigError, match="needs 'second_techer', which is neither"):
        needs(AlgorithmConfig(own_advantage=f"{file}:misspelt"))


def test_a_name_is_declared_once() -> None:
    declare = roles.critic("once")
    declare(value_targets)
    declare(value_targets)  # a script is executed twice
    with pytest.raises(ValueError, match="'once' is the name of something else"):
        declare(needs)


@pytest.mark.parametrize(
    "name",
    [
        "critic",
        "policy",
        "batch",
        "cost",
        "step",
        "learner",
        "generator",
        "generators_a",
        "a b",
        "Near",
        "near_",
    ],
)
def test_a_name_that_means_something_else_is_refused(name: str) -> None:
    """cost: the columns of cost_critic would be its own, too."""
    with pytest.raises(ValueError, match=repr(name)):
        roles.critic(name)(value_targets)


def test_a_frozen_model_is_no_column_of_another() -> None:
    with pytest.raises(ValueError, match="'values' is the name of something else"):
        roles.frozen("values", "here")


def test_no_need_and_no_column_can_be_the_name_of_a_model() -> None:
    assert NEEDS - roles.BUILT_IN.keys() <= roles.RESERVED
    assert COLUMNS.keys() <= roles.RESERVED


TARGETS = """
from asyncrl.learner.algorithms.registry import advantage
from asyncrl.learner.algorithms.roles import critic

@critic("{name}")
def targets({arguments}):
    return batch.rewards_R

@advantage("{name}", source="an example", needs={{"{name}"}})
def of_one(batch, config, context): ...
"""


def test_targets_that_take_other_arguments_are_refused_before_the_run(tmp_path: Path) -> None:
    file = tmp_path / "arguments.py"
    file.write_text(TARGETS.format(name="short", arguments="batch"))
    with pytest.raises(ConfigError, match=r"@critic\('short'\) .* is called with \(batch, config\)"):
        requirements.check(config_with(tmp_path, AlgorithmConfig(own_advantage=f"{file}:of_one")))
    with pytest.raises(ValueError, match="are no function"):
        roles.critic("partial")(partial(value_targets, config=OWN))


def test_targets_must_be_one_number_for_each_token(tmp_path: Path) -> None:
    file = tmp_path / "shapes.py"
    file.write_text(TARGETS.format(name="shapeless", arguments="batch, config"))
    with pytest.raises(
        TrainingError, match=r"targets of the critic shapeless have the shape \[2\]; \[\d+\] are"
    ):
        value_targets(rewards_batch([0.0, 1.0]), AlgorithmConfig(own_advantage=f"{file}:of_one"))


def test_a_critic_that_only_a_loss_needs_has_targets(tmp_path: Path) -> None:
    file = tmp_path / "in_a_loss.py"
    file.write_text(
        "from asyncrl.learner.algorithms.registry import loss\n"
        '@loss("valued", source="an example", needs={"critic"})\n'
        "def valued(terms, config): ...\n"
        '@loss("misspelt", source="an example", needs={"critc"})\n'
        "def misspelt(terms, config): ...\n"
    )
    batch = rewards_batch([0.0, 1.0])
    batch = batch.with_columns(values=torch.zeros(batch.tokens))
    assert value_targets(batch, AlgorithmConfig(own_loss=f"{file}:valued")).keys() == {"returns"}
    both = dataclasses.replace(OWN, own_loss=f"{file}:misspelt")
    with pytest.raises(ConfigError, match=r"algorithm\.own_loss = .* needs 'critc'"):
        needs(both)


def test_the_settings_of_critics_are_its_own(tmp_path: Path) -> None:
    """Though the algorithm has no critic that is built in."""
    file = tmp_path / "alone.py"
    source = OWN_CRITIC.read_text("utf-8").replace('"near"', '"alone"').replace("near_values", "alone_values")
    file.write_text(source.replace('needs={"critic", ', "needs={").replace('"two_horizons"', '"alone"'))
    config = config_with(tmp_path, AlgorithmConfig(own_advantage=f"{file}:two_horizons"))
    warm = dataclasses.replace(config, critic=CriticConfig(warmup_versions=2))
    requirements.check(warm)
    assert requirements.first_policy_version(warm) == 2


def test_the_example_learns(tmp_path: Path) -> None:
    """Both critics explain the returns at the end, and the policy finds the reward."""
    made = climb("ppo", tmp_path, [f"algorithm.own_advantage={OWN_CRITIC}:two_horizons"], enough=0.5)
    assert made.end > 2 * made.start


def test_the_example_is_short() -> None:
    assert len(OWN_CRITIC.read_text("utf-8").splitlines()) <= 30
