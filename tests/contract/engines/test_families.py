"""One suite over families of models, tiny and random, made from their config alone: what the learner says of packed
rollouts is what plain transformers says of each by itself, and what it writes is what transformers reads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from engine_cases import log_probs, request
from learner_cases import copied_weights
from model_families import EACH, FAMILIES, Family, constants, names_in, rollouts, save_family
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from asyncrl.config.schema import Config, EvaluationConfig, GeneratorConfig, LearnerConfig, ModelConfig
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.errors import ConfigError
from asyncrl.generator.engines.transformers.kv_cache import ATTENTION
from asyncrl.generator.engines.transformers.transformers_engine import TransformersEngine
from asyncrl.learner.algorithms.roles import POLICY
from asyncrl.learner.backends.checkpoint_source import origin_of
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.models.networks import load_network
from asyncrl.models.loading import load_causal_lm
from asyncrl.types import Group, Sampling, Task

REFUSED = {
    "gemma3": (
        Family("gemma3", {"head_dim": 8}, {"num_hidden_layers": 1}),
        "renames its checkpoint.s parameters",
    ),
    "cohere": (Family("cohere", {"logit_scale": 0.5}), "its head has logit_scale=0.5"),
    "granite": (Family("granite", {"logits_scaling": 8.0}), "its head has logits_scaling=8.0"),
    "phi": (Family("phi"), "its head has a bias"),
    "convolutions": (
        Family("lfm2", {"layer_types": ["conv", "full_attention"]}),
        r"in a way of its own \(Conv1d, Lfm2ShortConv, conv\)",
    ),
    "linear attention": (
        Family("minimax", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        r"in a way of its own \(MiniMaxLightningAttention\)",
    ),
    "a state space": (
        Family("jamba", {"num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 4, "mamba_dt_rank": 4}),
        r"in a way of its own \(.*JambaMambaMixer",
    ),
    "a recurrent block": (
        Family("recurrent_gemma", {"lru_width": 32, "head_dim": 8}),
        r"in a way of its own \(.*RecurrentGemmaRglru",
    ),
    "chunks": (
        Family("llama4_text", {"head_dim": 8, "layer_types": ["chunked_attention", "full_attention"]}),
        r"in a way of its own \(chunked_attention\)",
    ),
    "mpt": (Family("mpt"), "does not take its attention from transformers' registry"),
}


@pytest.fixture(scope="module", params=EACH)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config and weights of a family."""
    path = tmp_path_factory.mktemp(request.param)
    save_family(request.param, path)
    return path


def config_of(folder: Path, dtype: Any = "float32") -> Config:
    return Config(
        model=ModelConfig(path=str(folder), dtype=dtype),
        generator=GeneratorConfig(engine="scripted"),
        evaluation=EvaluationConfig(),
        learner=LearnerConfig(optimizer=OptimizerConfig(lr=1e-3)),
    )


def backend_of(folder: Path) -> FsdpBackend:
    return FsdpBackend(config_of(folder))


def packed() -> MicroBatch:
    return MicroBatch.of([Group.from_rollouts(Task(0, ""), Sampling(), rollouts())])


def plain(model: PreTrainedModel) -> torch.Tensor:
    """log-probs [N] of the packed rollouts, each by itself; 0 for prompts."""
    said = []
    for rollout in rollouts():
        ids = torch.tensor(rollout.token_ids)[None]
        logp_NV = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        logp_N = logp_NV[:-1].gather(1, ids[0, 1:, None])[:, 0]
        said.append(torch.cat([logp_N.new_zeros(2), logp_N[1:]]))
    return torch.cat(said)


def read(folder: Path) -> PreTrainedModel:
    """By transformers alone, without attention of ours. Nothing is missing, and nothing is left over."""
    images = "vision_config" in AutoConfig.from_pretrained(folder).to_dict()
    auto = AutoModelForImageTextToText if images else AutoModelForCausalLM
    model, told = auto.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def step(backend: FsdpBackend) -> float:
    """One optimizer step up in log-prob. Returns the gradient norm."""
    backend.policy.accumulate([packed()], lambda batch, logp_N, entropy_N: -logp_N.sum())
    return backend.policy.optimizer_step(1.0, lr=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_learner_starts_with_what_transformers_loads(folder: Path, dtype: str) -> None:
    """Bit for bit, though it reads slices: parameters, constants, and the buffers that are computed."""
    config = config_of(folder, dtype)
    assert origin_of(POLICY, config) is not None
    whole, filled = load_network(POLICY, config), FsdpBackend(config).policy.network
    expected = dict([*whole.named_parameters(), *whole.named_buffers()])
    found = dict([*filled.named_parameters(), *filled.named_buffers()])
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_packed_log_probs_are_those_of_plain_transformers(folder: Path) -> None:
    with torch.no_grad():
        expected = plain(read(folder))
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(backend_of(folder).policy.predict(packed()), expected, atol=1e-5, rtol=1e-5)


def test_gradients_are_those_of_plain_transformers(folder: Path) -> None:
    model = read(folder)
    (-plain(model).sum()).backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(grads))
    assert norm > 0
    assert step(backend_of(folder)) == pytest.approx(norm, rel=1e-4)


def test_a_saved_model_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    backend, fresh = backend_of(folder), backend_of(folder)
    step(backend)
    backend.save(tmp_path / "saved")
    fresh.load(tmp_path / "saved")
    assert torch.equal(fresh.policy.predict(packed()), backend.policy.predict(packed()))
    assert step(fresh) == step(backend)
    assert torch.equal(fresh.policy.predict(packed()), backend.policy.predict(packed()))


def test_transformers_reads_an_export_whole(folder: Path, tmp_path: Path) -> None:
    backend = backend_of(folder)
    step(backend)
    backend.export_hf(tmp_path / "final")
    with torch.no_grad():
        torch.testing.assert_close(
            plain(read(tmp_path / "final")), backend.policy.predict(packed()), atol=1e-5, rtol=1e-5
        )
    assert names_in(tmp_path / "final") == names_in(folder), "other readers go by the names of the original"


def test_what_is_published_is_what_the_checkpoint_has(folder: Path) -> None:
    """Every trained tensor of the folder, tied ones once, under its name and with its value."""
    backend = backend_of(folder)
    there = {
        name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    fixed = constants(read(folder))
    there = {name: tensor for name, tensor in there.items() if name not in fixed}
    mine = backend.local_tensors()
    assert mine.keys() == there.keys() == backend.layout().keys()
    assert all(torch.equal(mine[name], there[name]) for name in mine)


IMAGES = [each for each in EACH if FAMILIES[str(each.values[0])].vision is not None]


@pytest.mark.parametrize("name", IMAGES)
async def test_an_engine_draws_text_from_a_model_for_images(tmp_path: Path, name: str) -> None:
    save_family(name, tmp_path)
    loaded = load_causal_lm(ModelConfig(path=str(tmp_path)), 0, ATTENTION)
    engine = TransformersEngine(loaded, slots=2, max_length=48, end_ids=(), version=0)
    await engine.start()
    turns = await engine.sample(request("a", n=2, max_tokens=20, prompt=10))
    await engine.close()
    for turn in turns:
        np.testing.assert_allclose(turn.logprobs, log_probs(read(tmp_path), turn), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", IMAGES)
def test_the_vision_tower_stays_as_it_is(tmp_path: Path, name: str) -> None:
    FAMILIES[name].save_config(tmp_path)
    backend = backend_of(tmp_path)
    before = copied_weights(backend)
    step(backend)
    moved = {
        name for name, tensor in backend.local_tensors().items() if not torch.equal(tensor, before[name])
    }
    assert moved == {name for name in before if "visual" not in name}
    backend.save(tmp_path / "saved")
    kept = dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert not [key for key in kept if key.startswith("optimizer.") and "visual" in key]


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused_by_name(name: str, tmp_path: Path) -> None:
    family, why = REFUSED[name]
    family.save_config(tmp_path)
    with pytest.raises(ConfigError, match=f"model.path = .*{why}"):
        backend_of(tmp_path).policy.predict(packed())


LAYERS = ["gemma2", "gemma3", "gpt-oss", "qwen3-next", pytest.param("qwen3.5", marks=pytest.mark.slow)]


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
async def test_an_engine_draws_by_the_familys_own_layers(tmp_path: Path, name: str, fixed: bool) -> None:
    """Windows, caps, sinks and recurrent states; samples that share a prompt, one that joins late, rows that move."""
    save_family(name, tmp_path)
    loaded = load_causal_lm(ModelConfig(path=str(tmp_path)), 0, ATTENTION)
    engine = TransformersEngine(loaded, slots=4, max_length=48, end_ids=(), version=0, fixed_shape=fixed)
    await engine.start()
    several = [
        engine.sample(request("a", n=3, max_tokens=5, prompt=10)),
        engine.sample(request("b", ordinal=1, n=4, max_tokens=20, prompt=3)),
    ]
    made = [turn for turns in await asyncio.gather(*several) for turn in turns]
    made += await engine.sample(
        request("one token", ordinal=2, prompt=1)
    )  # nothing to prefill, in a used row
    for turn in made:
        np.testing.assert_allclose(turn.logprobs, log_probs(read(tmp_path), turn), atol=1e-4, rtol=0)
    await engine.close()


def test_kimi_k2_is_a_deepseek_v3(tmp_path: Path) -> None:
    save_family("deepseek-v3", tmp_path)
    expected = backend_of(tmp_path).policy.predict(packed())
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"model_type": "deepseek_v3"', '"model_type": "kimi_k2"'))
    assert "kimi_k2" in file.read_text()
    assert torch.equal(backend_of(tmp_path).policy.predict(packed()), expected)
