"""The networks alone: values against a plain module, and which networks go with a policy."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import random_group, small_config, tiny_model
from transformers import AutoModel, GPT2Config, GPT2LMHeadModel

from asyncrl.config.schema import Config, CriticConfig, ModelConfig, ReferenceConfig, TeacherConfig
from asyncrl.errors import ConfigError, TrainingError
from asyncrl.learner.algorithms.roles import POLICY
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.backends.fsdp.sharded import decoder_layers
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.models.documents import Documents
from asyncrl.learner.models.networks import Critic, check_vocabularies, load_network
from asyncrl.tasks.addition import write_model_folder


def config_in(folder: Path, dtype: str = "float32") -> Config:
    return small_config(folder, model=tiny_model(folder / "model", dtype=dtype))


def gpt2_config(vocab_size: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=vocab_size,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=19,
    )


def critic_with_a_head(config: Config) -> Critic:
    """At 0, as the head starts, the body would get no gradient."""
    critic = load_network("critic", config)
    assert isinstance(critic, Critic)
    with torch.no_grad():
        critic.weight_D.copy_(torch.linspace(-1, 1, len(critic.weight_D)))
        critic.bias_1.fill_(0.5)
    return critic


def test_values_and_gradients_are_those_of_a_plain_module(tmp_path: Path) -> None:
    """Rollout by rollout, whole sequences, Hugging Face's own attention: V of token t is read at t-1. The body is
    GPT-2's, since Qwen2 falls back to float32 within."""
    gpt2_config(vocab_size=33).save_pretrained(tmp_path)
    critic = critic_with_a_head(small_config(tmp_path, model=ModelConfig(str(tmp_path), dtype="float64")))
    batch = MicroBatch.of([random_group(0), random_group(1)])
    (values_N,) = critic(batch, Documents(batch.lengths_R, mask_N=batch.loss_mask_N))
    values_N.square().sum().backward()

    plain = AutoModel.from_config(critic.body.config, attn_implementation="eager", dtype=torch.float64)
    plain.eval().load_state_dict(critic.body.state_dict())
    head = torch.nn.Linear(32, 1).double()
    head.load_state_dict({"weight": critic.weight_D.detach()[None], "bias": critic.bias_1.detach()})
    parts = []
    for rollout in range(batch.rollouts):
        at = batch.tokens_of([rollout])
        seen = head(plain(input_ids=batch.token_ids_N[at][None]).last_hidden_state)[0, :, 0]
        parts.append(torch.cat([seen.new_zeros(1), seen[:-1]]) * batch.loss_mask_N[at])
    expected_N = torch.cat(parts)
    expected_N.square().sum().backward()

    torch.testing.assert_close(values_N, expected_N, atol=1e-12, rtol=0)
    assert values_N.abs().sum() > 1
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(critic.body.get_parameter(name).grad, parameter.grad, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(critic.weight_D.grad, head.weight.grad[0], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(critic.bias_1.grad, head.bias.grad, atol=1e-9, rtol=1e-9)


def test_a_new_critic_says_0_and_draws_no_random_numbers(tmp_path: Path) -> None:
    config = config_in(tmp_path, "bfloat16")
    before = torch.get_rng_state()
    critic = load_network("critic", config)
    assert torch.equal(torch.get_rng_state(), before)
    batch = MicroBatch.of([random_group(0)])
    (values_N,) = critic(batch, Documents(batch.lengths_R, mask_N=batch.loss_mask_N))
    assert values_N.dtype == torch.float32
    assert not values_N.any()


def test_without_weights_on_disk_all_bodies_start_alike(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    policy, reference = (dict(load_network(n, config).named_parameters()) for n in (POLICY, "reference"))
    assert policy.keys() == reference.keys()
    for name, parameter in policy.items():
        assert torch.equal(parameter, reference[name])
    other = dataclasses.replace(config, run=dataclasses.replace(config.run, seed=1))
    assert not torch.equal(next(load_network("reference", other).parameters()), reference[next(iter(policy))])


@pytest.mark.parametrize(
    ("name", "section"),
    [
        ("teacher", {"teacher": TeacherConfig(path="{other}")}),
        ("reference", {"reference": ReferenceConfig(path="{other}")}),
        ("critic", {"critic": CriticConfig(path="{other}")}),
    ],
)
def test_another_vocabulary_is_refused(tmp_path: Path, name: str, section: dict[str, TeacherConfig]) -> None:
    config = config_in(tmp_path)
    other = tmp_path / "other"
    gpt2_config(vocab_size=34).save_pretrained(other)
    named = {key: dataclasses.replace(value, path=str(other)) for key, value in section.items()}
    with pytest.raises(ConfigError, match=rf"{name}.path = .*other': has a vocabulary of 34 .* one of 33"):
        check_vocabularies([name], dataclasses.replace(config, **named))
    check_vocabularies(["reference", "critic", "cost_critic", "reward_model"], config)


def test_a_teacher_needs_a_path_and_a_wrong_path_is_called_by_its_key(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    with pytest.raises(ConfigError, match=r"teacher.path = None"):
        check_vocabularies(["teacher"], config)
    nowhere = dataclasses.replace(config, critic=CriticConfig(path=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"critic.path = .*nowhere"):
        load_network("critic", nowhere)


def test_decoder_layers_are_found_under_any_name() -> None:
    model = GPT2LMHeadModel(gpt2_config(vocab_size=33))
    assert decoder_layers(model) == list(model.transformer.h)


def with_teacher(folder: Path) -> Config:
    """A policy and a teacher that is its copy, tokenizer and all."""
    write_model_folder(folder / "policy", hidden_size=32, layers=1)
    shutil.copytree(folder / "policy", folder / "teacher")
    return dataclasses.replace(
        small_config(folder, model=ModelConfig(path=str(folder / "policy"))),
        teacher=TeacherConfig(path=str(folder / "teacher")),
    )


def edit(path: Path, change: Callable[[Any], None]) -> None:
    read = json.loads(path.read_text("utf-8"))
    change(read)
    path.write_text(json.dumps(read), "utf-8")


def test_the_same_tokens_padded_to_another_size_are_no_other_vocabulary(tmp_path: Path) -> None:
    config = with_teacher(tmp_path)
    edit(tmp_path / "teacher" / "config.json", lambda read: read.update(vocab_size=64))
    check_vocabularies(["teacher"], config)


def test_other_tokens_of_the_same_number_are_another_vocabulary(tmp_path: Path) -> None:
    config = with_teacher(tmp_path)

    def swap(read: Any) -> None:
        ids = read["model"]["vocab"]
        ids["3"], ids["4"] = ids["4"], ids["3"]

    edit(tmp_path / "teacher" / "tokenizer.json", swap)
    with pytest.raises(ConfigError, match=r"teacher\.path = .*other tokens than the policy's"):
        check_vocabularies(["teacher"], config)


def test_a_smaller_table_must_hold_every_token_of_the_tokenizer(tmp_path: Path) -> None:
    config = with_teacher(tmp_path)
    edit(tmp_path / "policy" / "config.json", lambda read: read.update(vocab_size=64))
    check_vocabularies(["teacher"], config)
    edit(tmp_path / "teacher" / "config.json", lambda read: read.update(vocab_size=5))
    with pytest.raises(
        ConfigError, match=r"teacher\.path = .*a vocabulary of 5 tokens, its tokenizer ids up to"
    ):
        check_vocabularies(["teacher"], config)


@pytest.mark.parametrize("name", ["critic", "reference"])
def test_a_token_beyond_a_table_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """A policy with more padding can sample it."""
    model = FsdpBackend(config_in(tmp_path), [name]).models[name]
    batch = MicroBatch.of([random_group(0)])
    beyond = dataclasses.replace(batch, token_ids_N=batch.token_ids_N.index_fill(0, torch.tensor([4]), 33))
    with pytest.raises(TrainingError, match="token 33 is beyond the 33 of"):
        model.predict(beyond)
    if name == "critic":
        with pytest.raises(TrainingError, match="token 33 is beyond the 33 of"):
            model.accumulate([batch, beyond], lambda batch, values_N: values_N.sum())
