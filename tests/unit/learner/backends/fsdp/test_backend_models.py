"""The models beside the policy, on one process and, really, on two gloo processes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from learner_cases import copied_weights, random_group, same, small_config, tiny_model
from rank_processes import run_ranks
from torch import Tensor

from asyncrl.config.schema import Config, CriticConfig, LearnerConfig, ReferenceConfig
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.algorithms.roles import BUILT_IN
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.backends.fsdp.sharded import ShardedModel
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.system.rank_process import end_rank

BESIDE = ("critic", "reference", "reward_model")
LR = 1e-2


def config_in(folder: Path, dtype: str = "float64") -> Config:
    optimizer = OptimizerConfig(grad_clip=0.5)
    return small_config(
        folder,
        model=tiny_model(folder / "model", dtype=dtype),
        learner=LearnerConfig(optimizer=optimizer),
        critic=CriticConfig(optimizer=dataclasses.replace(optimizer, betas=(0.8, 0.9))),
        reference=ReferenceConfig(update_every=2),
    )


def groups_of(step: int, backend: FsdpBackend) -> MicroBatch:
    """This rank's share of three groups: all of them, two or one; in odd steps rank 1 of two has none."""
    groups = [random_group(3 * step + i) for i in range(3)]
    if backend.world == 1:
        return MicroBatch.of(groups)
    mine = ([groups, []] if step % 2 else [groups[:2], groups[2:]])[backend.rank]
    return MicroBatch.of(mine) if mine else MicroBatch.empty()


def squared_error(here: MicroBatch, values_N: Tensor) -> Tensor:
    return (values_N - here.rewards_R[here.seq_N] * here.loss_mask_N).square().sum()


def train_critic(backend: FsdpBackend, step: int) -> float:
    critic, batch = backend.models["critic"], groups_of(step, backend)
    critic.accumulate([batch], squared_error)
    return critic.optimizer_step(1 / 50, LR)


def train_likelihood(model: Any, batch: MicroBatch) -> float:
    """One step up in log-prob: the policy and the reward model."""
    model.accumulate([batch], lambda _, logp_N, __: -logp_N.sum())
    return float(model.optimizer_step(1 / 50, LR))


def train(backend: FsdpBackend, step: int) -> list[float]:
    """One step of everything that learns; the gradient norms."""
    norms = [train_critic(backend, step), train_likelihood(backend.policy, groups_of(step, backend))]
    if "reward_model" in backend.models:
        norms.append(train_likelihood(backend.models["reward_model"], groups_of(step + 10, backend)))
    return norms


def predictions(backend: FsdpBackend) -> dict[str, Tensor]:
    """Of every model, on the same tokens whatever the rank."""
    batch = MicroBatch.of([random_group(100)])
    beside = {name: model.predict(batch) for name, model in backend.models.items()}
    return {"policy": backend.policy.predict(batch), **beside}


def shards(model: Any) -> Mapping[str, Tensor]:
    assert isinstance(model, ShardedModel)
    return {name: tensor.clone() for name, tensor in model.in_checkpoint()[1].items()}


def said_with_gradient(model: Any, batch: MicroBatch) -> Tensor:
    seen: list[Tensor] = []

    def loss(_: MicroBatch, first_N: Tensor, *__: Tensor) -> Tensor:
        seen.append(first_N.detach())
        return first_N.square().sum()

    model.accumulate([batch], loss)
    return seen[0]


def wrong_predictions(backend: FsdpBackend) -> list[str]:
    """Models that do not predict what their forward says, or not with the weights of now: a prediction leaves nothing
    behind that the next one reads in place of weights that a step has moved."""
    batch, trained = MicroBatch.of([random_group(100)]), {"policy": backend.policy, **backend.models}
    del trained["reference"]
    wrong = []
    for name, model in trained.items():
        said_N = model.predict(batch)
        forward_N = said_with_gradient(model, batch)
        model.predict(batch)
        model.optimizer_step(1.0, LR)
        moved_N = model.predict(batch)
        again_N = said_with_gradient(model, batch)  # whoever is whole for this is in shards again afterwards
        model.forget_gradients()
        pairs = ((said_N, forward_N), (moved_N, again_N), (moved_N, model.predict(batch)))
        right = all(torch.equal(one_N, other_N.float()) for one_N, other_N in pairs)
        if not right or torch.equal(said_N, moved_N):
            wrong.append(name)
    return wrong


def rank_main(folder: Path) -> None:
    """One of two ranks: 2 steps, the reference moves up, save, 1 step."""
    backend = FsdpBackend(config_in(folder), BESIDE)
    reference = backend.models["reference"]
    first = predictions(backend)
    norms = [train(backend, step) for step in range(2)]
    stayed = torch.equal(predictions(backend)["reference"], first["reference"])
    reference.copy_from_policy()
    copied = same(shards(reference), backend.local_tensors())
    after_copy = predictions(backend)
    backend.save(folder / "saved_by_two")
    norms.append(train(backend, 2))
    kept = torch.equal(predictions(backend)["reference"], after_copy["reference"])
    gathered = [
        backend.gather(torch.full((2 * backend.rank, 3), backend.rank + 0.5, dtype=torch.float64)),
        backend.gather(torch.arange(3 - backend.rank) > 0),
        backend.gather(torch.zeros(0, dtype=torch.int64)),
    ]
    says = {
        "norms": norms,
        "stayed": stayed,
        "copied": copied,
        "kept": kept,
        "said_after_copy": {name: tensor.tolist() for name, tensor in after_copy.items()},
        "said": {name: tensor.tolist() for name, tensor in predictions(backend).items()},
        "critic_shapes": [list(t.shape) for t in shards(backend.models["critic"]).values()],
        "gathered": [[(str(t.dtype), t.tolist()) for t in tensors] for tensors in gathered],
        "wrong": wrong_predictions(backend),  # last: it takes steps
    }
    (folder / f"rank{backend.rank}.json").write_text(json.dumps(says))
    backend.close()
    end_rank()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    config_in(folder)
    run_ranks("test_backend_models:rank_main", folder)
    return folder, [json.loads((folder / f"rank{r}.json").read_text()) for r in range(2)]


def assert_says(backend: FsdpBackend, said: dict[str, list[float]]) -> None:
    """Qwen2 works in float32 here and there, whatever its parameters."""
    mine = predictions(backend)
    assert mine.keys() == said.keys()
    for name, values in said.items():
        torch.testing.assert_close(mine[name], torch.tensor(values), atol=1e-5, rtol=1e-5)


def test_two_ranks_train_every_model_like_one(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, says = two_ranks
    alone = FsdpBackend(config_in(folder), BESIDE)
    norms = [train(alone, step) for step in range(2)]
    alone.models["reference"].copy_from_policy()
    norms.append(train(alone, 2))
    for rank in says:
        assert rank["norms"] == [pytest.approx(step, rel=1e-6) for step in norms]
        assert_says(alone, rank["said"])


def test_a_reference_moves_when_it_is_told_to_and_not_before(
    two_ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in two_ranks[1]:
        assert (rank["stayed"], rank["copied"], rank["kept"]) == (True, True, True)
        said = rank["said_after_copy"]
        assert said["reference"] == said["policy"]
        assert rank["said"]["reference"] != rank["said"]["policy"]


def test_a_prediction_is_what_forward_says_on_two_ranks(
    two_ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    assert [rank["wrong"] for rank in two_ranks[1]] == [[], []]


def test_ranks_share_a_critic_and_gather_unequal_tensors(
    two_ranks: tuple[Path, list[dict[str, Any]]],
) -> None:
    zero, one = two_ranks[1]
    assert zero["critic_shapes"] != one["critic_shapes"]  # the bias is one number: it has one owner
    assert zero["gathered"] == one["gathered"]
    assert zero["gathered"] == [
        [["torch.float64", []], ["torch.float64", [[1.5] * 3] * 2]],
        [["torch.bool", [False, True, True]], ["torch.bool", [False, True]]],
        [["torch.int64", []], ["torch.int64", []]],
    ]


def test_a_checkpoint_of_two_ranks_goes_on_with_one(two_ranks: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, says = two_ranks
    alone = FsdpBackend(config_in(folder), BESIDE)
    alone.load(folder / "saved_by_two")
    assert_says(alone, says[0]["said_after_copy"])
    assert train(alone, 2) == pytest.approx(says[0]["norms"][2], rel=1e-6)
    assert_says(alone, says[0]["said"])


def test_a_loaded_checkpoint_goes_on_bit_for_bit(tmp_path: Path) -> None:
    through, stopped, fresh = (FsdpBackend(config_in(tmp_path, "bfloat16"), BESIDE) for _ in range(3))
    for backend in (through, stopped):
        train(backend, 0)
        backend.models["reference"].copy_from_policy()
        train(backend, 1)
    stopped.save(tmp_path / "saved")
    fresh.load(tmp_path / "saved")
    for backend in (through, fresh):
        train(backend, 2)
    for name, model in fresh.models.items():
        assert same(shards(model), shards(through.models[name]))
    assert same(fresh.local_tensors(), through.local_tensors())


def test_a_frozen_model_is_kept_only_once_it_has_changed(tmp_path: Path) -> None:
    backend = FsdpBackend(config_in(tmp_path), ("reference",))
    train_likelihood(backend.policy, groups_of(0, backend))
    backend.save(tmp_path / "before")
    before = shards(backend.models["reference"])
    backend.models["reference"].copy_from_policy()
    backend.save(tmp_path / "after")
    after = shards(backend.models["reference"])
    assert same(after, backend.local_tensors())
    assert not same(after, before)
    keys = {
        folder: dcp.FileSystemReader(tmp_path / folder).read_metadata().state_dict_metadata.keys()
        for folder in ("before", "after")
    }
    assert {key.split(".")[0] for key in keys["before"]} == {"policy", "optimizer", "rng"}
    assert keys["after"] - keys["before"] == {f"reference.{name}" for name in before}
    for folder, expected in (("before", before), ("after", after)):
        fresh = FsdpBackend(config_in(tmp_path), ("reference",))
        fresh.load(tmp_path / folder)
        assert same(shards(fresh.models["reference"]), expected)
        fresh.save(tmp_path / f"{folder}_again")  # a restored reference stays in later checkpoints
        again = dcp.FileSystemReader(tmp_path / f"{folder}_again").read_metadata().state_dict_metadata.keys()
        assert again == keys[folder]


def test_a_checkpoint_of_the_policy_alone_loads_for_the_policy_alone(tmp_path: Path) -> None:
    """Its keys are those of checkpoints from before there were other models."""
    trained = FsdpBackend(config_in(tmp_path, "float32"))
    train_likelihood(trained.policy, groups_of(0, trained))
    trained.save(tmp_path / "saved")
    keys = dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata.keys()
    moments = ("optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.step")
    assert keys == {"rng"} | {f"{part}.{n}" for part in ("policy", *moments) for n in trained.local_tensors()}

    fresh = FsdpBackend(config_in(tmp_path, "float32"))
    fresh.load(tmp_path / "saved")
    assert same(fresh.local_tensors(), trained.local_tensors())
    with pytest.raises(ConfigError, match="has no critic, reward_model"):
        FsdpBackend(config_in(tmp_path, "float32"), BESIDE).load(tmp_path / "saved")


def test_a_rank_without_a_part_of_a_missing_model_refuses_the_checkpoint_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait in the collective for the ranks that refuse."""
    config = config_in(tmp_path)
    FsdpBackend(config).save(tmp_path / "saved")
    backend, collective = FsdpBackend(config, {"critic"}), list[Path]()
    monkeypatch.setattr(backend, "_load_state", collective.append)
    with pytest.raises(ConfigError, match="has no critic"):
        backend.load(tmp_path / "saved")
    assert collective == []


def test_a_checkpoint_with_a_critic_loads_for_the_policy_alone(tmp_path: Path) -> None:
    both = FsdpBackend(config_in(tmp_path), ("critic",))
    train(both, 0)
    both.save(tmp_path / "saved")
    alone = FsdpBackend(config_in(tmp_path))
    alone.load(tmp_path / "saved")
    assert same(alone.local_tensors(), both.local_tensors())


def test_a_bfloat16_policy_with_a_critic(tmp_path: Path) -> None:
    """Values are float32, and steps that bfloat16 cannot hold add up in the masters."""
    backend = FsdpBackend(config_in(tmp_path, "bfloat16"), ("critic",))
    critic = backend.models["critic"]
    first = shards(critic)
    losses = []

    def loss(here: MicroBatch, values_N: Tensor) -> Tensor:
        assert values_N.dtype == torch.float32
        error = squared_error(here, values_N)
        losses.append(float(error.detach()))
        return error

    for _ in range(30):
        critic.accumulate([groups_of(0, backend)], loss)
        critic.optimizer_step(1 / 50, 1e-3)
    assert losses[-1] < 0.9 * losses[0]
    last = shards(critic)
    assert all(tensor.dtype == torch.bfloat16 for tensor in last.values())
    assert not torch.equal(first["body.norm.weight"], last["body.norm.weight"])


def test_each_model_has_its_own_gradients_and_clip(tmp_path: Path) -> None:
    """A step of the critic moves nothing else; a gradient that is forgotten moves nothing at all."""
    backend = FsdpBackend(config_in(tmp_path), BUILT_IN.keys() - {"teacher"})
    before = {name: shards(model) for name, model in backend.models.items()}
    policy = copied_weights(backend)
    train_critic(backend, 0)
    changed = [name for name, model in backend.models.items() if not same(shards(model), before[name])]
    assert changed == ["critic"]
    assert same(backend.local_tensors(), policy)
    model = backend.models["reward_model"]
    model.accumulate([groups_of(0, backend)], lambda _, logp_N, __: logp_N.sum())
    model.forget_gradients()
    assert model.optimizer_step(1.0, LR) == 0.0
    assert same(shards(model), before["reward_model"])


def test_frozen_models_have_no_gradients(tmp_path: Path) -> None:
    backend = FsdpBackend(config_in(tmp_path), ("reference", "critic"))
    reference, critic = backend.models["reference"], backend.models["critic"]
    assert isinstance(reference, ShardedModel)
    assert not any(parameter.requires_grad for parameter in reference.network.parameters())
    with pytest.raises(TypeError, match="frozen"):
        reference.accumulate([groups_of(0, backend)], lambda _, logp_N, __: logp_N.sum())
    with pytest.raises(TypeError, match="frozen"):
        critic.copy_from_policy()


def test_a_reference_that_cannot_take_the_policys_weights_is_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    tiny_model(tmp_path / "untied", tied=False)
    wrong = ReferenceConfig(path=str(tmp_path / "untied"), update_every=1)
    with pytest.raises(ConfigError, match=r"reference.path = .*untied.*another architecture"):
        FsdpBackend(dataclasses.replace(config, reference=wrong), ("reference",))
    never = dataclasses.replace(wrong, update_every=None)
    FsdpBackend(dataclasses.replace(config, reference=never), ("reference",))


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model is called 'judge'"):
        FsdpBackend(config_in(tmp_path), ("judge",))
