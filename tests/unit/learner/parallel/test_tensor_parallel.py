"""Tensor parallelism and HSDP on two and four gloo processes: losses, gradients and weights are those of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import random_group
from parallel_cases import (
    ALONE,
    FAMILIES,
    LR,
    SIZES,
    WITH_EXPERTS,
    assert_close,
    assert_same,
    config_of,
    published,
    together,
    train,
)
from rank_processes import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from asyncrl.config.sections.learner import ParallelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.models.logprobs import (
    LikelyTokens,
    VocabularyPart,
    most_likely,
    next_logprobs,
    token_logprobs,
)
from asyncrl.learner.parallel.tensor_parallel import parallelize, vocabulary_part
from asyncrl.system.rank_process import end_rank

pytestmark = pytest.mark.timeout(300)  # the first test of each world waits for all its ranks have to do

TENSOR, PLAIN_TENSOR = ParallelConfig(tensor=2), ParallelConfig(tensor=2, sequence=False)
ON_TWO = {
    "tensor with sequence": (TENSOR, list(FAMILIES)),
    "tensor": (PLAIN_TENSOR, ["qwen3"]),
}
ON_FOUR = {
    "replicate and shard": (ParallelConfig(replicate=2), ["qwen2"]),
    "shard and tensor with sequence": (TENSOR, ["qwen2", "gemma"]),
    "replicate and tensor": (ParallelConfig(replicate=2, tensor=2, sequence=False), ["qwen3"]),
}
CASES = {
    "two": [(way, family) for way, (_, families) in ON_TWO.items() for family in families],
    "four": [(way, family) for way, (_, families) in ON_FOUR.items() for family in families],
}
SAVED = "qwen2"


def squared_error(batch: MicroBatch, values_N: Tensor) -> Tensor:
    return (values_N - batch.token_ids_N * batch.loss_mask_N).square().sum()


def train_critic(backend: FsdpBackend) -> tuple[list[float], Tensor]:
    """Gradient norms of two steps, and the values after them."""
    critic, batch, norms = backend.models["critic"], MicroBatch.of([random_group(0)]), []
    for _ in range(2):
        critic.accumulate([batch], squared_error)
        norms.append(critic.optimizer_step(1 / 50, LR))
    return norms, critic.predict(batch)


def shared_words() -> dict[str, list[Tensor]]:
    """Log-probs, entropies and gradients of some hidden states in float64, with this rank's rows of the head."""
    random = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(7, 5, generator=random, dtype=torch.float64).requires_grad_()
    head_VD = torch.randn(33, 5, generator=random, dtype=torch.float64)
    target_T = torch.randint(0, 33, (7,), generator=random)
    temperature_T = torch.tensor([0.6, 1.0, 1.5, 0.6, 0.2, 1.0, 3.0], dtype=torch.float64)
    part, rows = None, range(33)
    if torch.distributed.is_initialized():
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        rows = vocabulary_part(33, mesh)
        part = VocabularyPart(mesh.get_group(), rows.start, -(-33 // mesh.size()), 33)
    mine_VD = head_VD[rows.start : rows.stop].clone().requires_grad_()
    likely_TK = torch.stack([target_T, (target_T + 20) % 33], -1)
    logp_T, entropy_T, outcome_TO = token_logprobs(
        hidden_TD, mine_VD, target_T, temperature_T, chunk=3, part=part, likely_TK=likely_TK
    )
    (
        logp_T * torch.arange(7) + 0.3 * entropy_T + outcome_TO @ hidden_TD.new_tensor([1.0, -2.0, 0.5])
    ).sum().backward()
    assert hidden_TD.grad is not None
    assert mine_VD.grad is not None
    likely = [LikelyTokens(20, among) for among in (33, 21)]
    few = [most_likely(hidden_TD.detach(), mine_VD, target_T, temperature_T, each, part) for each in likely]
    following_TV = next_logprobs(hidden_TD.detach(), mine_VD.detach(), temperature_T, part)
    everywhere = [
        logp_T.detach(),
        entropy_T.detach(),
        hidden_TD.grad,
        following_TV,
        outcome_TO.detach(),
        *few,
    ]
    return {"everywhere": everywhere, "part": [mine_VD.grad]}


def reference_after_a_step(backend: FsdpBackend) -> tuple[Tensor, Tensor]:
    """What the reference says before and after it has taken over the policy's weights."""
    reference, batch = backend.models["reference"], MicroBatch.of([random_group(0)])
    backend.policy.accumulate([batch], lambda _, logp_N, __: -logp_N.sum())
    backend.policy.optimizer_step(1 / 50, LR)
    before_N = reference.predict(batch)
    reference.copy_from_policy()
    assert torch.equal(reference.predict(batch), backend.policy.predict(batch))
    return before_N, reference.predict(batch)


def two_main(folder: Path) -> None:
    says: dict[Any, Any] = {}
    for way, (parallel, families) in ON_TWO.items():
        for family in families:
            backend = FsdpBackend(config_of(folder, family, parallel))
            says[way, family] = train(backend, range(2))
            if (way, family) == ("tensor with sequence", SAVED):
                backend.save(folder / "saved_by_tensor")
    beside = FsdpBackend(config_of(folder, "qwen3", TENSOR), ("critic", "reference"))
    says["critic"], says["reference"] = train_critic(beside), reference_after_a_step(beside)
    says["words"] = shared_words()
    shards = FsdpBackend(config_of(folder, SAVED, ALONE))
    shards.load(folder / "saved_by_tensor")
    says["goes on"] = train(shards, range(2, 3))
    torch.save(says, folder / f"of_two_{os.environ['RANK']}.pt")
    end_rank()


def four_main(folder: Path) -> None:
    says: dict[Any, Any] = {}
    for way, (parallel, families) in ON_FOUR.items():
        for family in families:
            says[way, family] = train(FsdpBackend(config_of(folder, family, parallel)), range(2))
    both = FsdpBackend(config_of(folder, SAVED, TENSOR))
    both.load(folder / "saved_by_tensor")
    says["goes on"] = train(both, range(2, 3))
    both.save(folder / "saved_by_four")
    both.export_hf(folder / "exported_by_four")
    torch.save(says, folder / f"of_four_{os.environ['RANK']}.pt")
    end_rank()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    for family in FAMILIES:
        config_of(folder, family)
    run_ranks("test_tensor_parallel:two_main", folder)
    return folder


@pytest.fixture(scope="module")
def four(folder: Path) -> Path:
    run_ranks("test_tensor_parallel:four_main", folder, world=4)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    return {family: train(FsdpBackend(config_of(folder, family)), range(2)) for family in FAMILIES}


def said(folder: Path, world: str, what: Any) -> list[Any]:
    """By rank."""
    files = sorted(folder.glob(f"of_{world}_*.pt"))
    return [torch.load(file, weights_only=False)[what] for file in files]


@pytest.mark.parametrize(("way", "family"), CASES["two"])
def test_two_ranks_train_like_one(
    folder: Path, alone: dict[str, dict[str, Any]], way: str, family: str
) -> None:
    ranks = said(folder, "two", (way, family))
    assert len(ranks) == 2
    assert_same(ranks, alone[family], atol=1e-5 if family in WITH_EXPERTS else 1e-6)


@pytest.mark.parametrize(("way", "family"), CASES["four"])
def test_four_ranks_train_like_one(
    four: Path, alone: dict[str, dict[str, Any]], way: str, family: str
) -> None:
    ranks = said(four, "four", (way, family))
    assert len(ranks) == 4
    assert_same(ranks, alone[family])


def test_models_beside_the_policy_are_spread_like_it(folder: Path) -> None:
    alone = FsdpBackend(config_of(folder, "qwen3"), ("critic", "reference"))
    norms, values_N = train_critic(alone)
    for their_norms, theirs_N in said(folder, "two", "critic"):
        assert their_norms == pytest.approx(norms, rel=1e-6)
        torch.testing.assert_close(theirs_N, values_N, atol=1e-4, rtol=1e-5)
    expected = reference_after_a_step(alone)
    assert not torch.equal(*expected)
    for theirs in said(folder, "two", "reference"):
        torch.testing.assert_close(theirs, expected, atol=1e-4, rtol=1e-5)


def test_log_probs_of_shared_words_are_those_of_all_words(folder: Path) -> None:
    expected, ranks = shared_words(), said(folder, "two", "words")
    for rank in ranks:
        torch.testing.assert_close(rank["everywhere"], expected["everywhere"], atol=1e-12, rtol=0)
    head_grad_VD = torch.cat([rank["part"][0] for rank in ranks])
    torch.testing.assert_close(head_grad_VD, expected["part"][0], atol=1e-12, rtol=0)


def test_a_checkpoint_goes_on_in_another_arrangement(folder: Path, four: Path) -> None:
    """Two steps at tensor 2, then one on one process, over two shards, and over tensor 2 × shard 2, and back to one."""
    backend = FsdpBackend(config_of(folder, SAVED))
    backend.load(folder / "saved_by_tensor")
    expected = train(backend, range(2, 3))
    for world in ("two", "four"):
        assert_same(said(folder, world, "goes on"), expected)
    again = FsdpBackend(config_of(folder, SAVED))
    again.load(folder / "saved_by_four")
    assert_close(together([published(again)]), together([expected["published"]]), 1e-6)
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(folder / "exported_by_four", dtype=torch.float64)
    weights = {name: tensor.detach() for name, tensor in exported.named_parameters()}
    assert_close(weights, together([published(again)]), 0.0)


@pytest.fixture
def one_rank() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("strange", "why"),
    [
        ("phi", "no plan for its attention"),
        ("minimax", "no style for a .* in a MiniMaxLightningAttention"),
    ],
)
def test_a_model_that_nobody_knows_how_to_cut_is_refused(
    one_rank: DeviceMesh, strange: str, why: str
) -> None:
    from transformers import AutoConfig, AutoModel

    body = AutoModel.from_config(AutoConfig.for_model(strange, **SIZES))
    with pytest.raises(ConfigError, match=rf"learner\.parallel\.tensor .*{why}"):
        parallelize(body, body, None, one_rank, sequence=True)
