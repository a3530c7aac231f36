"""What a network starts with: each rank reads its own boxes of a checkpoint, and they are those of the whole."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from learner_cases import small_config
from model_families import FAMILIES, RELATIVES, constants, names_in, save_family
from parallel_cases import Parts, parts, published, together
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl.config.schema import Config, CriticConfig, LearnerConfig, ModelConfig
from asyncrl.config.sections.learner import ParallelConfig
from asyncrl.config.sections.models import LoraConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.algorithms.roles import POLICY
from asyncrl.learner.backends.checkpoint_source import INDEX, SINGLE, Slices, origin_of
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.models.networks import load_network, named_parameters
from asyncrl.models.adapters import DOWN, UP
from asyncrl.models.loading import checkpoint_tensors, load_causal_lm
from asyncrl.sync.layout.layout import Box
from asyncrl.system.rank_process import end_rank

EXPERTS, STAGES, TENSORS = (ParallelConfig(**{axis: 2}) for axis in ("expert", "pipeline", "tensor"))


class Run(NamedTuple):
    """What two ranks load. models: beside the policy"""

    family: str
    parallel: ParallelConfig = ParallelConfig()
    models: tuple[str, ...] = ()
    lora: LoraConfig = LoraConfig()


RUNS = {family: Run(family) for family in FAMILIES if family not in RELATIVES} | {
    "critic of qwen3-vl": Run("qwen3-vl", models=("critic",)),
    "experts of qwen3-moe": Run("qwen3-moe", EXPERTS, ("critic",)),
    "experts of mixtral": Run("mixtral", EXPERTS),
    "stages of tied qwen2": Run("qwen2-tied-window", STAGES, ("critic",)),
    "stages of deepseek-v3": Run("deepseek-v3", STAGES),
    "stages of qwen3-moe": Run("qwen3-moe", STAGES),
    "matrices of qwen3": Run("qwen3", TENSORS, ("critic",)),
    "adapters of llama": Run("llama", lora=LoraConfig(rank=2, publish="merged")),
}
"""One after another."""


@dataclass(frozen=True)
class Loaded:
    """What one rank has, how much it read for the policy, and how much memory the policy's parameters are in.

    beside: all parameters of what stands beside the policy, and its adapters: of what no checkpoint has too
    """

    published: Parts
    constants: dict[str, Tensor]
    beside: Parts
    read: int
    held: int


def config_of(folder: Path, run: Run) -> Config:
    model = ModelConfig(path=str(folder / run.family), lora=run.lora)
    return small_config(folder, model=model, learner=LearnerConfig(parallel=run.parallel))


def count_reads() -> Counter[str]:
    """Bytes of the slices that are read from now on, by the setting that names the checkpoint."""
    read, seen = Slices.read, Counter[str]()

    def counted(self: Slices, name: str, shape: tuple[int, ...], box: Box) -> Tensor:
        part = read(self, name, shape, box)
        seen[self._key] += part.nbytes
        return part

    Slices.read = counted  # type: ignore[method-assign,assignment]
    return seen


def memory_of(backend: FsdpBackend) -> int:
    """Bytes of the storages that the policy's parameters are in, whatever part of them is used; without adapters."""
    found = {}
    for name, parameter in backend.policy._masters.parameters.items():
        if name.endswith((UP, DOWN)):
            continue
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        storage = local.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def rank_main(folder: Path) -> None:
    seen = count_reads()
    for name, run in RUNS.items():
        seen.clear()
        backend = FsdpBackend(config_of(folder, run), run.models)
        here = {n: c for n, c in backend.policy.constants().items() if not c.is_meta}
        said = Loaded(published(backend), here, beside(backend), seen["model.path"], memory_of(backend))
        torch.save(said, folder / f"{name}.{backend.rank}.pt")
    end_rank()


def beside(backend: FsdpBackend) -> Parts:
    found = {n: p for model in backend.models.values() for n, p in model._masters.parameters.items()}  # type: ignore[attr-defined]
    adapters = {n: p for n, p in backend.policy._masters.parameters.items() if n.endswith((UP, DOWN))}
    return parts(found | adapters)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All families, and what two ranks loaded."""
    folder = tmp_path_factory.mktemp("origins")
    for family in FAMILIES:
        save_family(family, folder / family)
    run_ranks("test_checkpoint_source:rank_main", folder, stuck_s=250)
    return folder


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_read_one_model_and_hold_it(folder: Path, name: str) -> None:
    family, parallel = RUNS[name].family, RUNS[name].parallel
    ranks = loaded(folder, name)
    whole = load_causal_lm(ModelConfig(path=str(folder / family)), seed=0)
    expected, fixed = checkpoint_tensors(whole), constants(whole)
    found = together([rank.published for rank in ranks])
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor.double()) for key, tensor in expected.items())
    for rank in ranks:
        assert all(torch.equal(fixed[key], tensor) for key, tensor in rank.constants.items())

    model, twice = bytes_of(expected.values()), bytes_of(on_both(expected, whole, parallel))
    of_fixed = bytes_of(fixed.values()) * (1 if parallel == STAGES else 2)
    assert sum(rank.read for rank in ranks) == model + twice + of_fixed
    for rank in ranks:
        assert rank.held <= 1.1 * rank.read, "memory for more than was read"
        if parallel != STAGES:  # a layer of experts is larger than one without
            assert rank.read < 0.6 * model


def loaded(folder: Path, name: str) -> list[Loaded]:
    return [torch.load(folder / f"{name}.{rank}.pt", weights_only=False) for rank in range(2)]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def on_both(tensors: dict[str, Tensor], model: PreTrainedModel, parallel: ParallelConfig) -> Iterator[Tensor]:
    """Parameters that both ranks have all of: a tied table on two stages, norms between cut matrices."""
    for name, tensor in tensors.items():
        tied = parallel == STAGES and model.config.tie_word_embeddings and "embed_tokens" in name
        if tied or (parallel == TENSORS and "norm" in name):
            yield tensor


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run.models or run.lora.rank])
def test_two_ranks_have_the_critic_and_the_adapters_of_one(folder: Path, name: str) -> None:
    """Value heads and adapters are in no checkpoint: they start alike whatever the mesh."""
    alone = RUNS[name]._replace(parallel=ParallelConfig())
    network = load_network(next(iter(alone.models), POLICY), config_of(folder, alone))
    whole = {n: p for n, p in named_parameters(network).items() if alone.models or n.endswith((UP, DOWN))}
    found = together([rank.beside for rank in loaded(folder, name)])
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[key], tensor.double()) for key, tensor in whole.items())


def saved(folder: Path, family: str = "qwen2", **how: object) -> Config:
    """A folder of one family, in the safetensors that transformers writes."""
    FAMILIES[family].save_config(folder / family)
    model = load_causal_lm(ModelConfig(path=str(folder / family)), seed=1)
    model.save_pretrained(folder / family, **how)
    return config_of(folder, Run(family))


def same_as_whole(config: Config, name: str = POLICY) -> bool:
    """Whether a backend starts with what `load_network` makes of the whole."""
    expected = dict(load_network(name, config).named_parameters())
    found = dict(FsdpBackend(config, {name} - {POLICY})._models[name].network.named_parameters())
    return found.keys() == expected.keys() and all(torch.equal(found[n], t) for n, t in expected.items())


def test_a_checkpoint_of_several_files(tmp_path: Path) -> None:
    config = saved(tmp_path, max_shard_size="20KB")
    assert len(list((tmp_path / "qwen2").glob("*.safetensors"))) > 2
    assert origin_of(POLICY, config) is not None
    assert same_as_whole(config)


def test_experts_that_were_saved_as_they_are_in_memory(tmp_path: Path) -> None:
    config = saved(tmp_path, "qwen3-moe", save_original_format=False)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names_in(tmp_path / "qwen3-moe"))
    assert origin_of(POLICY, config) is not None
    assert same_as_whole(config)


def test_a_critic_reads_no_head(tmp_path: Path) -> None:
    """It may be of a model that has none, or another one."""
    config = saved(tmp_path)
    tensors = load_file(tmp_path / "qwen2" / SINGLE)
    del tensors["lm_head.weight"]
    shutil.copytree(tmp_path / "qwen2", tmp_path / "headless")
    save_file(tensors, tmp_path / "headless" / SINGLE, metadata={"format": "pt"})
    config = small_config(tmp_path, model=config.model, critic=CriticConfig(path=str(tmp_path / "headless")))
    assert origin_of("critic", config) is not None
    assert same_as_whole(config, "critic")


def without_safetensors(folder: Path) -> None:
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def without_a_head(folder: Path) -> None:
    """As `AutoModel` saves a body."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(folder / SINGLE).items()}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def without_weights(folder: Path) -> None:
    (folder / SINGLE).unlink()


@pytest.mark.parametrize("change", [without_safetensors, without_a_head, without_weights])
def test_what_cannot_be_read_in_slices_is_loaded_whole(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    config = saved(tmp_path)
    change(tmp_path / "qwen2")
    assert origin_of(POLICY, config) is None
    assert same_as_whole(config)


def test_quantized_weights_are_not_read_in_slices(tmp_path: Path) -> None:
    config = saved(tmp_path)
    file = tmp_path / "qwen2" / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}})
    )
    assert origin_of(POLICY, config) is None


def test_a_head_that_differs_from_the_table_it_is_tied_to_is_loaded_as_transformers_does(
    tmp_path: Path,
) -> None:
    config = saved(tmp_path, "qwen2-tied-window")
    assert origin_of(POLICY, config) is not None
    file = tmp_path / "qwen2-tied-window" / SINGLE
    tensors = load_file(file)
    head = torch.ones_like(tensors["model.embed_tokens.weight"])
    save_file(tensors | {"lm_head.weight": head}, file, metadata={"format": "pt"})
    assert origin_of(POLICY, config) is None
    assert torch.equal(FsdpBackend(config).local_tensors()["lm_head.weight"], head)


def lacks_a_tensor(folder: Path) -> str:
    tensors = load_file(folder / SINGLE)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return r"no model\.layers\.1\.mlp\.up_proj\.weight"


def has_another_shape(folder: Path) -> str:
    tensors = load_file(folder / SINGLE)
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return r"in model\.safetensors model\.norm\.weight has the shape \[7\], .* \[32\]"


def is_cut_off(folder: Path) -> str:
    file = folder / SINGLE
    file.write_bytes(file.read_bytes()[:-100])
    return r"its model\.safetensors cannot be read"


def lacks_a_file(folder: Path) -> str:
    file, name = folder / SINGLE, "model-00001-of-00002.safetensors"
    where = dict.fromkeys(load_file(file), name)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    file.unlink()
    return rf"its {name} cannot be read"


@pytest.mark.parametrize("damage", [lacks_a_tensor, has_another_shape, is_cut_off, lacks_a_file])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    config = saved(tmp_path)
    rule = damage(tmp_path / "qwen2")
    with pytest.raises(ConfigError, match=f"model.path = .*qwen2.*{rule}.*Remedy"):
        FsdpBackend(config)


def test_an_export_has_the_generation_config_of_what_it_started_from(tmp_path: Path) -> None:
    config = saved(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen2")
    model.generation_config.max_new_tokens = 7
    model.generation_config.save_pretrained(tmp_path / "qwen2")
    FsdpBackend(config).export_hf(tmp_path / "final")
    assert json.loads((tmp_path / "final" / "generation_config.json").read_text())["max_new_tokens"] == 7
