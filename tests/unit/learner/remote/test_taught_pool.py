"""Models that learn on a pool of their own: the same steps as beside the policy, whoever comes first or comes back."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
import zmq
from learner_cases import OWN_CRITIC, copied_weights, kept_registries, random_group, small_config, tiny_model
from learner_fakes import FakeBackend, ranks
from processes import until
from torch import Tensor
from trainer_cases import checkpoints_of

from asyncrl.config.schema import (
    AgentConfig,
    BatchConfig,
    Config,
    CriticConfig,
    LearnerConfig,
    RewardConfig,
    RewardModelConfig,
)
from asyncrl.config.sections.algorithm import AlgorithmConfig
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.config.sections.placement import PlaceConfig, PlacementConfig
from asyncrl.errors import DeadlineError, PoolLostError, RefusedError, WireError
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.checkpoint import Meta
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.remote import remote_protocol
from asyncrl.learner.remote.remote_model import RemoteModel
from asyncrl.learner.training import requirements
from asyncrl.learner.training.objectives import OutcomeObjective, ValueObjective
from asyncrl.learner.training.passes import PADDING, PassResult
from asyncrl.learner.training.version_step import VersionReport, version_step
from asyncrl.pool.model import InferenceModel
from asyncrl.pool.trained_model import TrainedModel
from asyncrl.pool.training_server import CallBarrier, TrainingServer
from asyncrl.rpc.client import RpcClient
from asyncrl.rpc.keys import ClientKeys, client_keys, make_keys
from asyncrl.rpc.message import decode, encode
from asyncrl.telemetry import tracing
from asyncrl.telemetry.metrics import Mean, Metrics
from asyncrl.types import Group

GAE = AlgorithmConfig(advantage="gae", lam=0.9)
SAFE = AlgorithmConfig(advantage="safe_rlhf", cost_multiplier=0.5)
PRIME = AlgorithmConfig(advantage="prime")
OWN = AlgorithmConfig(own_advantage=f"{OWN_CRITIC}:two_horizons")
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=1)
LOOPBACK = "127.0.0.1"


@pytest.fixture(scope="module", autouse=True)
def registries() -> Iterator[None]:
    with kept_registries():
        yield


def config_of(folder: Path, algorithm: AlgorithmConfig = GAE, pool: bool = True, **learner: Any) -> Config:
    """All models that learn beside the policy on pools, the others with the learner."""
    place = PlaceConfig(where="pool", deadline_s=20) if pool else PlaceConfig()
    here = small_config(
        folder,
        model=tiny_model(folder / "model", dtype="float64"),
        batch=BatchConfig(groups=4, group_size=4),
        algorithm=algorithm,
        learner=LearnerConfig(micro_batch_tokens=40, optimizer=OPTIMIZER, **learner),
        critic=CriticConfig(optimizer=OPTIMIZER),
        reward_model=RewardModelConfig(optimizer=OPTIMIZER),
        reward=RewardConfig(weights={"cost": 0.0}),
        agent=AgentConfig(environment="grids.py:Grid"),  # whose rollouts may have segments
    )
    names = requirements.models(here) & {"critic", "cost_critic", "reward_model"}
    own = {"near": {"where": place.where}} if "near" in requirements.models(here) else {}
    return dataclasses.replace(here, placement=PlacementConfig(own=own, **dict.fromkeys(names, place)))


class Pools:
    """A process of each pool of a run, in threads of this one, and the run's board."""

    def __init__(self, config: Config, keys: ClientKeys | None = None) -> None:
        self.keys, names = keys, requirements.models_trained_in_pools(config)
        self.config, self.models = config, {name: TrainedModel(name, config) for name in names}
        self.lessons = {name: TrainingServer(model, LOOPBACK, keys) for name, model in self.models.items()}
        self.lines: list[RemoteModel] = []

    def lookup(self, key: str, wait_s: float) -> Any:
        return self.lessons[key.removeprefix("pool/")].where

    def open(
        self,
        epoch: int = 1,
        rank: int = 0,
        world: int = 1,
        checkpoint: str | None = None,
        is_data_leader: bool = True,
    ) -> dict[str, RemoteModel]:
        """What one rank of a learner has of them."""
        backend: Any = SimpleNamespace(rank=rank, world=world, is_data_leader=is_data_leader)
        found = {
            name: RemoteModel(name, self.config, backend, self, self.keys)  # type: ignore[arg-type]
            for name in self.models
        }
        self.lines += found.values()
        for model in found.values():
            model.open(epoch, checkpoint, 0)
        return found

    def scored(self, groups: Sequence[Group]) -> list[Group]:
        """As they come out of the queue behind the pools, which have the weights of now."""
        return [self._scored(group) for group in groups]

    def _scored(self, group: Group) -> Group:
        columns = dict(group.columns)
        for each in self.lessons.values():
            columns |= asyncio.run(each.columns(group))
        return dataclasses.replace(group, columns=columns)

    def weights(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": tensor.clone()
            for name, model in self.models.items()
            for key, tensor in model._model.parameters().items()
        }

    def close(self) -> None:
        for line in self.lines:
            line.close()
        for each in self.lessons.values():
            each.close()


@pytest.fixture
def pools_of() -> Iterator[Callable[..., Pools]]:
    made: list[Pools] = []

    def make(config: Config, keys: ClientKeys | None = None) -> Pools:
        made.append(Pools(config, keys))
        return made[-1]

    yield make
    for each in made:
        each.close()


def group(ordinal: int) -> Group:
    made = random_group(ordinal, segments=1 + ordinal % 2)
    cost = made.rewards - 0.5 + ordinal / 8
    return dataclasses.replace(made, reward_parts={"cost": cost.astype(made.rewards.dtype)})


def versions(
    config: Config, backend: FsdpBackend, pools: Pools | None, count: int = 2
) -> Iterator[VersionReport]:
    """A few versions of a learner at max_staleness 0, claim by claim."""
    training = version_step(backend, config, remote_models=pools.open() if pools else None)
    for version in range(count):
        groups = [group(4 * version + i) for i in range(4)]
        for one in pools.scored(groups) if pools else groups:
            training.add([one], version)
        yield training.step(version)


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name}: {(found[name] - tensor).abs().max()}"


# ---------------------------------------------------------------------- beside the policy, and on a pool


@pytest.mark.parametrize(
    ("algorithm", "learner"),
    [
        (GAE, {}),
        (GAE, {"mini_batches": 2, "epochs": 2}),
        (SAFE, {}),
        (PRIME, {}),
        (PRIME, {"epochs": 2}),
        (OWN, {}),
    ],
    ids=["gae", "gae, four steps", "safe_rlhf", "prime", "prime, two steps", "a user's second critic"],
)
def test_the_same_groups_make_the_same_steps_wherever_the_model_is(
    algorithm: AlgorithmConfig,
    learner: dict[str, int],
    tmp_path: Path,
    pools_of: Callable[..., Pools],
) -> None:
    beside = config_of(tmp_path, algorithm, pool=False, **learner)
    away = config_of(tmp_path, algorithm, **learner)
    here, there = (FsdpBackend(config, requirements.colocated(config)) for config in (beside, away))
    pools = pools_of(away)
    assert not pools.models.keys() & there.models.keys()
    start = pools.weights()
    expected, found = versions(beside, here, None), versions(away, there, pools)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.values == pytest.approx(theirs.values, rel=1e-12)  # sums over ranks, in another order
    assert_equal(there.local_tensors(), here.local_tensors())
    weights = pools.weights()
    assert_equal(
        weights,
        {
            f"{name}.{key}": tensor
            for name in pools.models
            for key, tensor in here._models[name].parameters().items()
        },
    )
    assert any(not torch.equal(weights[name], tensor) for name, tensor in start.items())


def test_two_ranks_of_a_learner_make_the_steps_of_one_and_repeat_them(
    tmp_path: Path, pools_of: Callable[..., Pools]
) -> None:
    config = config_of(tmp_path)

    def trained(data_world: int, sharing: int = 1) -> dict[str, Tensor]:
        pools = pools_of(config)

        def work(backend: FakeBackend) -> None:
            pooled = pools.open(rank=backend.rank, world=backend.world, is_data_leader=backend.is_data_leader)
            training = version_step(backend, config, remote_models=pooled)
            for version in range(2):
                groups = pools.scored(
                    [group(4 * version + i) for i in range(backend.data_rank, 4, data_world)]
                )
                backend.exchange(None)  # all have been scored before the weights move
                for one in groups:
                    training.add([one], version)
                training.step(version)

        ranks(data_world * sharing, work, sharing=sharing)
        return pools.weights()

    alone, twice, again = trained(1), trained(2), trained(2)
    assert_equal(again, twice)
    assert_equal(trained(2, sharing=2), twice)  # of two that have the same rows one leads
    # Qwen2's norms are float32, and two ranks share other prompts than one.
    for name, tensor in alone.items():
        assert torch.allclose(twice[name], tensor, atol=1e-6), name


def test_each_rank_hears_what_its_own_batches_have_found(
    tmp_path: Path, pools_of: Callable[..., Pools]
) -> None:
    """A critic says 0 at first: of P policy tokens that were worth g the loss is P · g² / 2."""
    pools = pools_of(config_of(tmp_path))
    batch = MicroBatch.of(pools.scored([group(0)]))
    tokens = int(batch.loss_mask_N.sum())

    def work(backend: FakeBackend) -> float:
        (model,) = pools.open(rank=backend.rank, world=2).values()
        worth = torch.full((batch.tokens,), float(backend.rank + 1))
        model.learn(None, [batch.with_columns(returns=worth)] * (2 - backend.rank), 2, 0)  # type: ignore[arg-type]
        return model.take_results(wait=True).loss

    assert ranks(2, work) == pytest.approx([2 * tokens * 0.5, tokens * 2.0])


def test_a_critic_warms_up_alone(tmp_path: Path, pools_of: Callable[..., Pools]) -> None:
    config = config_of(tmp_path)
    config = dataclasses.replace(config, critic=dataclasses.replace(config.critic, warmup_versions=1))
    backend, pools = FsdpBackend(config), pools_of(config)
    start = copied_weights(backend)
    reports = versions(config, backend, pools)
    assert {"train/critic/loss", "train/critic/grad_norm", "train/critic/clip_fraction"} <= next(
        reports
    ).values.keys()
    assert_equal(backend.local_tensors(), start)
    next(reports)
    assert any(not torch.equal(start[name], tensor) for name, tensor in backend.local_tensors().items())


def test_a_step_that_is_not_finite_moves_neither_the_policy_nor_the_critic(
    tmp_path: Path, pools_of: Callable[..., Pools], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    backend, pools = FsdpBackend(config), pools_of(config)
    start = pools.weights()
    monkeypatch.setattr(backend.policy, "gradient_norm", lambda scale: math.nan)
    (report,) = versions(config, backend, pools, count=1)
    assert report.refused == "gradient norm nan of the policy"
    assert_equal(pools.weights(), start)


def test_a_frozen_model_says_what_it_says_without_being_taught(tmp_path: Path) -> None:
    config = config_of(tmp_path, PRIME)
    taught, frozen = TrainedModel("reward_model", config), InferenceModel("reference", config)
    assert torch.equal(taught.predict(group(0)), frozen.predict(group(0)))


# ---------------------------------------------------------------------- checkpoints, and whoever comes back


def test_a_model_goes_on_from_a_checkpoint_or_from_the_beginning(
    tmp_path: Path, pools_of: Callable[..., Pools]
) -> None:
    config = config_of(tmp_path)
    pools, backend = pools_of(config), FsdpBackend(config)
    start = pools.weights()
    folder = Path(config.run.dir) / config.run.name
    pooled = pools.open(epoch=1)
    saver = checkpoints_of(folder, backend, remote_models=pooled.values())
    training = version_step(backend, config, remote_models=pooled)
    saved: dict[str, Tensor] = {}
    for version in range(2):
        if version == 1:
            saved = pools.weights()
            saver.begin(Meta(1, b"", None))
        for one in pools.scored([group(4 * version + i) for i in range(4)]):
            training.add([one], version)
        training.step(version)
    assert saver.finish() == 1
    assert (folder / "checkpoints" / "v000001" / "critic").is_dir()
    moved = pools.weights()
    assert any(not torch.equal(moved[name], tensor) for name, tensor in saved.items())
    others = pools_of(config)  # started anew
    for epoch, these in ((2, pools), (1, others)):
        these.open(epoch, checkpoint="v000001")
        assert_equal(these.weights(), saved)
    pools.open(epoch=3)
    assert_equal(pools.weights(), start)


def test_a_checkpoint_without_the_model_is_refused_by_name(
    tmp_path: Path, pools_of: Callable[..., Pools]
) -> None:
    pools = pools_of(config_of(tmp_path))
    with pytest.raises(RefusedError, match=r"run\.resume.*has no folder 'critic'"):
        pools.open(checkpoint="v000007")
    with pytest.raises(RefusedError, match="is not the name of a checkpoint"):
        pools.open(epoch=2, checkpoint="../../v000007")


def test_a_disk_that_does_not_take_the_model_is_an_oserror_of_the_learner(
    tmp_path: Path, pools_of: Callable[..., Pools]
) -> None:
    config = config_of(tmp_path)
    (model,) = pools_of(config).open().values()
    in_the_way = Path(config.run.dir) / config.run.name / "checkpoints" / ".v000001.partial"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    written = model.save(in_the_way)
    with pytest.raises(OSError, match="partial"):
        written()
    assert model.gradient_norm(1.0) == 0  # the pool lives on


def test_a_call_that_fails_ends_the_process_of_the_pool(
    tmp_path: Path, pools_of: Callable[..., Pools]
) -> None:
    pools = pools_of(config_of(tmp_path))
    (model,) = pools.open().values()
    lessons = pools.lessons["critic"]
    lessons.check()

    def fail(said: Any) -> float:
        raise RuntimeError("out of memory")

    pools.models["critic"]._jobs["norm"] = fail
    model._call("norm", scale=1.0)
    lessons._thread.join(20)
    with pytest.raises(RuntimeError, match="out of memory"):
        lessons.check()


def test_gradients_of_a_learner_that_died_are_forgotten_and_it_is_not_listened_to_any_more(
    tmp_path: Path, pools_of: Callable[..., Pools]
) -> None:
    config = config_of(tmp_path)
    pools = pools_of(config)
    (dead,) = pools.open(epoch=1).values()
    batch = ready(config, pools)
    dead.learn(None, [batch], 1, 0)  # type: ignore[arg-type]
    assert dead.take_results(wait=True).loss > 0
    (heir,) = pools.open(epoch=2).values()
    assert heir.gradient_norm(1.0) == 0
    with pytest.raises(RefusedError, match="session"):
        dead.gradient_norm(1.0)
    with pytest.raises(RefusedError, match="fenced"):
        pools.open(epoch=1)


def ready(config: Config, pools: Pools) -> MicroBatch:
    """A batch for the critic of a pool."""
    batch = MicroBatch.of(pools.scored([group(0)]))
    return batch.with_columns(returns=torch.ones(batch.tokens))


def test_a_pool_that_dies_is_named_with_the_version_and_whoever_waited(
    tmp_path: Path, pools_of: Callable[..., Pools]
) -> None:
    pools = pools_of(config_of(tmp_path))
    (model,) = pools.open().values()
    model.check()
    pools.lessons["critic"].close()
    model.learn(None, [], 0, 7)  # type: ignore[arg-type]
    with pytest.raises(PoolLostError, match=r"learner rank 0 has lost the pool of the critic.*version 7"):
        model.take_results(wait=True)
    with pytest.raises(PoolLostError):
        model.check()


def test_a_pool_that_is_nowhere_is_waited_for_with_a_deadline(tmp_path: Path) -> None:
    class Board:
        def lookup(self, key: str, wait_s: float) -> Any:
            raise DeadlineError("learner rank 0", "the queue", f"the entry '{key}'", wait_s)

    model = RemoteModel("critic", config_of(tmp_path), FakeBackend(), Board(), None)  # type: ignore[arg-type]
    with pytest.raises(
        DeadlineError, match=r"learner rank 0 waited .* the pool of the critic: .* version 5.*pool/critic"
    ):
        model.open(1, None, 5)


def test_a_rank_that_waits_for_another_one_gives_up_by_name(
    tmp_path: Path, pools_of: Callable[..., Pools]
) -> None:
    config = config_of(tmp_path)
    hasty = {"critic": dataclasses.replace(config.placement.critic, deadline_s=0.2)}
    pools = pools_of(dataclasses.replace(config, placement=PlacementConfig(**hasty)))
    with pytest.raises(DeadlineError, match=r"rank 0 waited 0\.2 s for the pool of the critic at tcp"):
        pools.open(rank=0, world=2)


def test_no_group_is_scored_before_a_learner_has_begun(
    tmp_path: Path, pools_of: Callable[..., Pools]
) -> None:
    config = config_of(tmp_path)
    impatient = dataclasses.replace(config.learner, groups_deadline_s=0.05)
    pools = pools_of(dataclasses.replace(config, learner=impatient))
    lessons = pools.lessons["critic"]
    with pytest.raises(DeadlineError, match=r"pool of the critic waited .* the learner"):
        asyncio.run(lessons.ready())
    pools.open()
    asyncio.run(lessons.ready())


# ---------------------------------------------------------------------- what is not to be believed


def ask(endpoint: str, *messages: bytes) -> list[Any]:
    """The answers to raw messages, in their order."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 20_000)
        dealer.connect(endpoint)
        answers = []
        for message in messages:
            dealer.send(message)
            answers.append(decode(dealer.recv())[1:])
        return answers


def test_a_pool_with_keys_trains_with_those_who_hold_them_and_with_nobody_else(
    tmp_path: Path, pools_of: Callable[..., Pools]
) -> None:
    for name in ("own", "strange"):
        make_keys(tmp_path / name)
    keys, strange = (client_keys(str(tmp_path / name)) for name in ("own", "strange"))
    pools = pools_of(config_of(tmp_path), keys)
    (model,) = pools.open().values()
    assert model.gradient_norm(1.0) == 0
    for others in (None, strange):
        endpoint = pools.lessons["critic"].where["endpoint"]
        client = RpcClient(endpoint, "a stranger", "the pool", PoolLostError, others)
        with pytest.raises(PoolLostError, match=r"a stranger has lost the pool.*queue\.keys"):
            client.call("hello", {}, "a hello", 20)
        client.close()
    until(lambda: pools.lessons["critic"].stats()["strangers"] >= 1, "strangers that are counted")
    assert model.gradient_norm(1.0) == 0


def test_hostile_requests_are_refused_and_counted_and_change_nothing(
    tmp_path: Path, pools_of: Callable[..., Pools]
) -> None:
    config = config_of(tmp_path)
    pools = pools_of(config)
    (model,) = pools.open().values()
    batch = ready(config, pools)
    model.learn(None, [batch], 1, 0)  # type: ignore[arg-type]
    before = model.gradient_norm(1.0)
    session, frames = model._session, remote_protocol.encode_batch(batch, ("values", "returns"))
    here, where = {"session": session, "rank": 0, "call": 3}, pools.lessons["critic"].where
    newcomer = {"incarnation": where["incarnation"], "epoch": 9, "world": 1, "rank": 0, "call": 0}
    hostile = {
        "no msgpack": b"\xc1",
        "no session": encode(1, "learn", {"rank": 0, "call": 3, "batches": 0, "version": 0}),
        "another session": encode(1, "norm", {**here, "session": "x/1", "scale": 1.0}),
        "another rank": encode(1, "norm", {**here, "rank": 1, "scale": 1.0}),
        "another call": encode(1, "norm", {**here, "call": 9, "scale": 1.0}),
        "no such call": encode(1, "unlearn", here),
        "no scale": encode(1, "norm", here),
        "no number": encode(1, "step", {**here, "scale": "1", "lr": 1.0}),
        "no frames": encode(1, "batch", {**here, "frames": [b""]}),
        "a changed frame": encode(1, "batch", {**here, "frames": [frames[0], frames[1][:-1] + b"\x7f"]}),
        "batches that never came": encode(1, "learn", {**here, "version": 0, "batches": 5}),
        "a world of nobody": encode(1, "begin", {**newcomer, "world": 0}),
        "who has not seen the board": encode(1, "begin", {**newcomer, "incarnation": "x"}),
    }
    answers = ask(where["endpoint"], *hostile.values())
    assert [verdict for verdict, _ in answers] == ["error"] * len(hostile)
    well_formed = ("another session", "who has not seen the board")
    assert pools.lessons["critic"].stats()["malformed"] == len(hostile) - len(well_formed)
    assert model.gradient_norm(1.0) == before


def test_a_batch_is_what_it_was_behind_the_wire(tmp_path: Path) -> None:
    batch = MicroBatch.of([group(0), group(3)])
    noise = torch.randn(batch.tokens)
    batch = dataclasses.replace(batch, copies_R=torch.arange(8.0)).with_columns(values=noise, returns=-noise)
    columns = ("values", "returns")
    found = remote_protocol.decode_batch(remote_protocol.encode_batch(batch, columns), columns)
    for name in (
        "token_ids_N",
        "position_ids_N",
        "seq_N",
        "loss_mask_N",
        "group_R",
        "ordinals_R",
        "copies_R",
    ):
        assert torch.equal(getattr(found, name), getattr(batch, name)), name
    assert torch.equal(found.temperature_R, batch.temperature_R)
    assert found.lengths_R == batch.lengths_R
    assert_equal(found.columns, {"values": noise, "returns": -noise})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"lengths": [3, -1]}, "lengths"),
        ({"lengths": [1, 2]}, "lengths"),
        ({"lengths": []}, "lengths"),
        ({"copies": [1.0]}, "'copies' has 1 values"),
        ({"values": [0.0] * 3}, "'values' has 3 values"),
        ({"token_ids": [1, -2, 3, 4]}, "below 0"),
        ({"loss_mask": [True, True, True, True]}, "first token"),
        ({"temperature": [1.0, 0.0]}, "temperature"),
        ({"values": None}, "expected is"),
        ({"position_ids": [0, 1, 2, 3]}, "position ids"),
        ({"position_ids": [0, 2, 0, 1]}, "position ids"),
        ({"position_ids": [0, 0, 0, 1]}, "first token has a loss mask"),
        ({"other": [0.0] * 4}, "expected is"),
        ({"values": [[0.0, 1.0]] * 4}, "these are rows"),
        ({"lengths": [[2, 2], [2, 2]]}, "these are rows"),
    ],
)
def test_arrays_that_are_no_batch_are_refused(change: dict[str, list[Any] | None], why: str) -> None:
    import numpy as np

    from asyncrl.queue.wire.columns import encode_columns

    arrays = {
        "lengths": np.array([2, 2], np.int64),
        "ordinals": np.array([0, 1], np.int64),
        "copies": np.ones(2, np.float32),
        "temperature": np.ones(2, np.float32),
        "token_ids": np.array([1, 2, 3, 4], np.int64),
        "position_ids": np.array([0, 1, 0, 1], np.int64),
        "loss_mask": np.array([False, True, False, True]),
        "values": np.zeros(4, np.float32),
    }
    whole = [bytes(frame) for frame in encode_columns(arrays).frames]
    assert remote_protocol.decode_batch(whole, ["values"]).lengths_R == (2, 2)
    for name, values in change.items():
        kind = arrays[name].dtype if name in arrays else np.dtype(np.float32)
        arrays[name] = np.array(values or [], kind)
        if values is None:
            del arrays[name]
    with pytest.raises(WireError, match=why):
        remote_protocol.decode_batch([bytes(frame) for frame in encode_columns(arrays).frames], ["values"])


def test_what_passes_have_found_travels() -> None:
    metrics = Metrics()
    metrics.add("train/critic/clip_fraction", Mean(1.0, 4))
    found = PassResult(math.inf, frozenset({3, 5}), lambda: metrics)
    back = PassResult.from_wire(msgpack.unpackb(msgpack.packb(found.to_wire())))
    assert (back.loss, back.bad, back.metrics().values()) == (
        math.inf,
        {3, 5},
        {"train/critic/clip_fraction": 0.25},
    )
    for wire in (None, [0.0], [0.0, 1, {}], [0.0, [], {"x": ["Bad", 1]}], ["x", [], {}]):
        with pytest.raises(WireError):
            PassResult.from_wire(wire)


# ---------------------------------------------------------------------- whose turn it is


def test_a_call_is_due_once_all_ranks_have_made_it() -> None:
    step = CallBarrier(2)
    said = {"version": 3}
    step.batch(1, 0, [b"b"])
    assert step.call(1, 0, "learn", said, "one", batches=1) is None
    assert step.call(1, 1, "norm", {"scale": math.nan}, "one") is None  # it need not wait for the other rank
    step.batch(0, 0, [b"a0"])
    step.batch(0, 0, [b"a1"])
    due = step.call(0, 0, "learn", said, "zero", batches=2)
    assert due is not None
    assert (due.kind, due.arguments) == ("learn", said)
    assert due.batches == {0: [[b"a0"], [b"a1"]], 1: [[b"b"]]}
    assert due.tickets == {0: "zero", 1: "one"}
    assert step.call(0, 1, "norm", {"scale": math.nan}, "zero") is not None


def test_ranks_that_say_different_things_are_refused() -> None:
    step = CallBarrier(2)
    step.call(0, 0, "norm", {"scale": 0.5}, "zero")
    for kind, said in (("norm", {"scale": 0.25}), ("forget", {}), ("step", {"scale": 0.5})):
        with pytest.raises(RefusedError, match="disagree"):
            step.call(1, 0, kind, said, "one")
    assert step.call(1, 0, "norm", {"scale": 0.5}, "one") is not None


@pytest.mark.parametrize(("rank", "number", "batches"), [(2, 0, 0), (-1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_a_call_out_of_order_is_refused(rank: int, number: int, batches: int) -> None:
    with pytest.raises(WireError):
        CallBarrier(2).call(rank, number, "forget", {}, "", batches)


def test_threads_end_with_their_pool(tmp_path: Path, pools_of: Callable[..., Pools]) -> None:
    pools = pools_of(config_of(tmp_path))
    pools.open()
    pools.close()
    pools.close()
    names = {thread.name for thread in threading.enumerate()}
    assert not any("the pool of the critic" in name for name in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nobody_adds_nothing_to_any_objective(dtype: torch.dtype) -> None:
    zeros = torch.zeros(1, dtype=dtype, requires_grad=True)
    for objective, said in (
        (OutcomeObjective(0.05), (zeros, zeros)),
        (ValueObjective("critic", "values", "returns", 0.5), (zeros,)),
    ):
        total, _ = objective(PADDING, *said)  # type: ignore[operator]
        total.backward()
        assert total.item() == 0
        assert zeros.grad is not None
        assert float(zeros.grad) == 0


def test_both_ends_of_a_call_are_in_the_trace(
    tmp_path: Path, pools_of: Callable[..., Pools], trace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "RESOLUTION_S", 0.0)
    pools = pools_of(config_of(tmp_path))
    (model,) = pools.open().values()
    model.gradient_norm(1.0)
    lanes = trace().lanes
    assert [span.name for span in lanes["calls"].spans] == ["begin", "norm"]
    waits = [span for span in lanes["pools"].spans if span.name == "wait/critic"]
    assert [span.about["what"] for span in waits][-1] == "the gradient norm of version 0"
    # The request is sent before the wait begins, so only the ends are in order.
    assert waits[-1].end >= lanes["calls"].spans[-1].end
