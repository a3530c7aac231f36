"""Networks that compute a repeated prompt once give the outputs and gradients of those that compute it each time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_stand_in import flash_attn_varlen_func
from image_cases import group as picture_group
from learner_cases import random_group, rollout, small_config, tiny_model
from model_families import save_family

from asyncrl.config.schema import Config, LearnerConfig, ModelConfig
from asyncrl.config.sections.learner import ParallelConfig
from asyncrl.config.sections.models import ScoringModelConfig
from asyncrl.learner.algorithms.roles import POLICY
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.data.shared_prompts import sources
from asyncrl.learner.models import attention
from asyncrl.learner.models.attention import whole_attention
from asyncrl.learner.models.documents import Documents
from asyncrl.learner.models.networks import counts_prompts_once, load_network
from asyncrl.models import attention as model_attention
from asyncrl.models.attention import AttentionRule
from asyncrl.types import Group, Sampling, Task


def some_batch() -> MicroBatch:
    """Two groups, one of them with rollouts of two segments, and one whose prompt is longer than its answers."""
    answers = ([1, 2], [3], [4, 5, 6], [7, 8])
    long = [rollout([*range(9, 21), *answer], prompt=12) for answer in answers]
    groups = [random_group(0), random_group(1, size=3, segments=2)]
    return MicroBatch.of([*groups, Group.from_rollouts(Task(2, ""), Sampling(), long)])


def documents(batch: MicroBatch, share: bool, multiple: int = 1) -> Documents:
    source_N = sources(batch) if share else None
    assert (source_N is not None) == share
    return Documents(batch.segment_lengths, multiple=multiple, mask_N=batch.loss_mask_N, source_N=source_N)


def config_of(folder: Path, kind: type[ModelConfig] = ModelConfig) -> Config:
    model = tiny_model(folder / "model")
    return small_config(folder, model=kind(path=model.path, dtype="float64"))


@pytest.mark.parametrize(
    ("name", "kind"), [(POLICY, ModelConfig), (POLICY, ScoringModelConfig), ("critic", ModelConfig)]
)
@pytest.mark.parametrize("multiple", [1, 7])
def test_outputs_and_gradients_are_those_of_each_prompt_by_itself(
    name: str, kind: type[ModelConfig], multiple: int, tmp_path: Path
) -> None:
    network = load_network(name, config_of(tmp_path, kind))
    with torch.no_grad():
        for parameter in network.parameters():  # heads start at 0
            parameter.add_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    batch, found = some_batch(), []
    for share in (False, True):
        network.zero_grad()
        outputs = network(batch, documents(batch, share, multiple))
        weights_N = batch.token_ids_N % 5 - 1.7
        sum((values_N * weights_N).sum() for values_N in outputs).backward()
        grads = {n: p.grad for n, p in network.named_parameters() if p.grad is not None}
        found.append([*outputs, *grads.values()])
    assert found[0][0].abs().max() > 0.01
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)  # Qwen2's norms are float32


def test_a_row_has_each_prompt_once() -> None:
    batch = some_batch()
    shared = documents(batch, share=True)
    assert len(shared.mine(batch.token_ids_N)) == batch.tokens - 3 * (batch.segments - 4 - 2) - 12 * 3


def test_what_may_follow_each_rollout_is_the_same(tmp_path: Path) -> None:
    network, batch = load_network(POLICY, config_of(tmp_path)), some_batch().by_segment()
    with torch.no_grad():
        found, expected = (
            network(batch, documents(batch, share), following=True)[0] for share in (True, False)
        )
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rule", [AttentionRule(), AttentionRule(0.7, 2, 1.5)])
def test_flash_attention_gets_the_queries_of_the_row_and_the_keys_of_whole_documents(
    rule: AttentionRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, random = some_batch(), torch.Generator().manual_seed(0)
    shared = documents(batch, share=True)
    tokens = len(shared.mine(batch.token_ids_N))
    q, k, v = (torch.randn(tokens, heads, 4, generator=random, dtype=torch.float64) for heads in (2, 2, 2))
    dense = whole_attention(q, k, v, shared, rule)
    monkeypatch.setattr(attention, "_flash", lambda *_: True)
    monkeypatch.setattr(model_attention, "flash_attn_varlen_func", flash_attn_varlen_func)
    torch.testing.assert_close(whole_attention(q, k, v, shared, rule), dense)


@pytest.mark.parametrize("family", ["qwen3-next", "deepseek-v3", "gpt-oss"])
def test_a_step_is_the_same_with_states_experts_windows_and_sinks(family: str, tmp_path: Path) -> None:
    save_family(family, tmp_path / "model")
    batch, found = some_batch(), []
    for share in (False, True):
        config = small_config(
            tmp_path,
            model=ModelConfig(path=str(tmp_path / "model")),
            learner=LearnerConfig(share_prompts=share),
        )
        policy: Any = FsdpBackend(config).policy
        policy.accumulate([batch], lambda batch, logp_N, entropy_N: (logp_N * batch.token_ids_N).sum())
        found.append((policy.predict(batch), policy.gradient_norm(1.0)))
    (plain_N, plain), (shared_N, shared) = found
    torch.testing.assert_close(shared_N, plain_N, atol=2e-5, rtol=1e-5)
    assert shared == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "mistral"])
def test_padding_behind_a_window_has_a_gradient(family: str, tmp_path: Path) -> None:
    """Answers of 1 and of 8 to prompts of 22 and 16: with a window of 5, the padding of a short answer has no key."""
    save_family(family, tmp_path / "model")
    groups = [
        Group.from_rollouts(Task(i, ""), Sampling(), [rollout([*range(1, p + 1), *[3] * n], p)] * 2)
        for i, (p, n) in enumerate([(22, 1), (16, 8)])
    ]
    batch = MicroBatch.of(groups)
    config = small_config(tmp_path, model=ModelConfig(path=str(tmp_path / "model")))
    policy: Any = FsdpBackend(config).policy
    policy.accumulate([batch], lambda batch, logp_N, _: logp_N.sum())
    assert math.isfinite(policy.gradient_norm(1.0))


def test_micro_batches_of_delta_nets_count_all_prompts(tmp_path: Path) -> None:
    for family, once in (("qwen3-next", False), ("qwen3", True)):
        save_family(family, tmp_path / family)
        config = small_config(tmp_path, model=ModelConfig(path=str(tmp_path / family)))
        assert counts_prompts_once(POLICY, config) == once


def test_a_slice_of_a_row_with_shared_prompts_is_refused() -> None:
    with pytest.raises(ValueError, match="prompts are shared"):
        _ = documents(some_batch(), share=True).cuts


def test_a_vision_tower_has_the_gradient_of_each_answer_once(tmp_path: Path) -> None:
    save_family("qwen2.5-vl", tmp_path / "model")
    batch, found = MicroBatch.of([picture_group(tmp_path / "model", i) for i in range(2)]), []
    assert sources(batch) is not None
    for share in (False, True):
        config = small_config(
            tmp_path,
            model=ModelConfig(path=str(tmp_path / "model"), vision="train"),
            learner=LearnerConfig(share_prompts=share),
        )
        policy: Any = FsdpBackend(config).policy
        policy.accumulate([batch], lambda batch, logp_N, _: (logp_N * batch.token_ids_N).sum())
        found.append({n: p.grad for n, p in policy.network.named_parameters() if "visual" in n})
    assert max(grad.abs().max() for grad in found[0].values()) > 0.01
    torch.testing.assert_close(found[1], found[0], atol=1e-3, rtol=1e-3)


def test_prompts_are_shared_wherever_one_row_has_them() -> None:
    def shares(**keys: Any) -> bool:
        return LearnerConfig(**keys).shares

    assert shares()
    assert shares(backend="megatron")
    assert shares(parallel=ParallelConfig(context=2))
    assert not shares(parallel=ParallelConfig(context=2, context_way="all_gather"))
    assert not shares(own_backend="mine.py:backend")
    assert not shares(share_prompts=False)
