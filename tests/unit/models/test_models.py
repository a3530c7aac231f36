"""Loading the policy and its tokenizer, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from asyncrl.config.schema import Config, EvaluationConfig, ModelConfig, TasksConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.storage import write_hf_configs
from asyncrl.models.loading import checkpoint_tensors, load_causal_lm, load_model_config, load_tokenizer
from asyncrl.models.prompts import encode_prompt, policy_tokenizer
from asyncrl.types import Task


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config and a tokenizer, no weights."""
    Qwen2Config(
        vocab_size=12,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    ).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({str(digit): digit for digit in range(10)} | {"?": 10}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    return tmp_path


def weights(path: Path, seed: int) -> list[torch.Tensor]:
    return [p.data for p in load_causal_lm(ModelConfig(path=str(path)), seed).parameters()]


def test_a_folder_without_weights_starts_from_its_seed(folder: Path) -> None:
    state = torch.get_rng_state()
    first, same, other = weights(folder, 3), weights(folder, 3), weights(folder, 4)
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def quantize(folder: Path, method: str) -> dict[str, torch.Tensor]:
    """Save a model there whose linear maps are in 8 bits, with a scale for each; the weights that they stand for."""
    load_causal_lm(ModelConfig(path=str(folder)), seed=1).save_pretrained(folder)
    file, config = folder / "model.safetensors", folder / "config.json"
    saved: dict[str, torch.Tensor] = {}
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        saved[name] = whole[name] = tensor
        if name.endswith("proj.weight"):
            scale = tensor.abs().max() / 400
            saved[name] = (tensor / scale).to(torch.float8_e4m3fn)
            saved[f"{name}_scale_inv"] = scale.reshape(1, 1)
            whole[name] = saved[name].float() * scale
    save_file(saved, file, metadata={"format": "pt"})
    settings = {"quant_method": method, "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": settings}))
    return whole


def test_quantized_weights_are_converted_also_where_the_gpu_could_multiply_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantize(folder, "fp8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    loaded = load_causal_lm(ModelConfig(path=str(folder)), seed=0)
    found = checkpoint_tensors(loaded)
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-2)


def test_an_export_of_them_is_a_plain_model(folder: Path) -> None:
    quantize(folder, "fp8")
    model = ModelConfig(path=str(folder))
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(load_model_config(model))
    write_hf_configs(folder / "out", causal_lm, Config(model=model))
    assert "quantization_config" not in json.loads((folder / "out" / "config.json").read_text())


def test_weights_that_cannot_be_converted_are_refused(folder: Path) -> None:
    quantize(folder, "gptq")
    with pytest.raises(ConfigError, match=r"model\.path = .*quantized by gptq, which cannot be trained"):
        load_causal_lm(ModelConfig(path=str(folder)), seed=0)


def test_saved_weights_are_loaded_in_the_dtype_of_the_config(folder: Path) -> None:
    saved = load_causal_lm(ModelConfig(path=str(folder)), seed=1)
    saved.save_pretrained(folder)
    loaded = load_causal_lm(ModelConfig(path=str(folder), dtype="bfloat16"), seed=2)
    assert not loaded.training
    for mine, theirs in zip(loaded.parameters(), saved.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(torch.bfloat16))


def test_the_tokenizer_beside_the_model_is_loaded(folder: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    assert tokenizer.encode("4 2", add_special_tokens=False) == [4, 2]


TEMPLATE = "{% for m in messages %}{{ m['content'] }} 7{% endfor %}"
CHAT = TasksConfig(source="tasks.jsonl", chat=True)
ASKED = Task(7, [{"role": "user", "content": "4 2"}])


def test_prompts_are_framed_with_a_template_of_ones_own(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE)
    tasks = dataclasses.replace(CHAT, chat_template=str(file))
    tokenizer = policy_tokenizer(Config(model=ModelConfig(path=str(folder)), tasks=tasks))
    assert encode_prompt(tokenizer, ASKED).tolist() == [4, 2, 7]


def test_variables_of_the_template_are_set_for_all_prompts(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE.replace("7", "{{ '4' if brief else '7' }}"))
    for variables, ids in (({}, [4, 2, 7]), ({"brief": True}, [4, 2, 4])):
        tasks = dataclasses.replace(CHAT, chat_template=str(file), chat_template_kwargs=variables)
        tokenizer = policy_tokenizer(Config(model=ModelConfig(path=str(folder)), tasks=tasks))
        assert encode_prompt(tokenizer, ASKED, tasks.chat_template_kwargs).tolist() == ids


@pytest.mark.parametrize("name", ["breif", "add_generation_prompt"])
def test_what_is_no_variable_of_the_template_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE)
    tasks = dataclasses.replace(CHAT, chat_template=str(file), chat_template_kwargs={name: True})
    with pytest.raises(ConfigError, match=rf"^tasks.chat_template_kwargs.{name} = True"):
        policy_tokenizer(Config(model=ModelConfig(path=str(folder)), tasks=tasks))


@pytest.mark.parametrize("text", [None, "{% for m in messages %}", "{{ raise_exception('no') }}"])
def test_a_template_that_is_none_is_refused(folder: Path, tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "own.jinja"
    if text is not None:
        file.write_text(text)
    tasks = dataclasses.replace(CHAT, chat_template=str(file))
    with pytest.raises(ConfigError, match=r"^tasks.chat_template = .*own.jinja'"):
        policy_tokenizer(Config(model=ModelConfig(path=str(folder)), tasks=tasks))


def test_messages_without_a_template_are_refused(folder: Path) -> None:
    model = ModelConfig(path=str(folder))
    hard = {"source": "hard.jsonl", "system": "Be brief."}
    for config, key in (
        (Config(model=model, tasks=CHAT), "tasks.chat = True"),
        (
            Config(model=model, evaluation=EvaluationConfig(sets={"hard": hard})),
            "evaluation.sets.hard.system",
        ),
    ):
        with pytest.raises(ConfigError, match=f"^{key}.*tasks.chat_template=FILE"):
            policy_tokenizer(config)
    with pytest.raises(ConfigError, match=r"^tasks.chat_template = None"):
        encode_prompt(policy_tokenizer(Config(model=model)), ASKED)


def test_a_model_without_a_tokenizer_is_refused(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ConfigError, match=r"^model.path = "):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model.path = .*there is no such folder"):
        load_causal_lm(ModelConfig(path=str(tmp_path / "nowhere")), seed=0)


@pytest.mark.parametrize("name", ["gpt2", "nobody/nothing"])
def test_a_name_that_is_not_in_the_cache_is_answered_with_how_to_fetch_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = rf"neither such a folder in {tmp_path} .*downloads nothing at run time.*`hf download {name}`"
    with pytest.raises(ConfigError, match=message):
        load_model_config(ModelConfig(path=name))


def test_a_relative_folder_that_is_not_there_is_named_with_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"there is no such folder in {tmp_path}"):
        load_model_config(ModelConfig(path="./models/mine"))
