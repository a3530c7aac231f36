"""Adapters on the Megatron backend, on two and four gloo processes: they learn as those of the FSDP backend.

They begin with what that one has exported, or (RANDOM) with what the seed makes. See `test_megatron_backend.py`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import batches, config_of, needs_megatron, says, train, write_weights
from peft import PeftModel
from rank_processes import run_ranks
from safetensors.torch import load_file
from test_megatron_backend import INTERLEAVED, STUCK_S, close, copied, put_together
from transformers import AutoModelForCausalLM

from asyncrl.config.schema import Config
from asyncrl.config.sections.models import LoraConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.backends.backend import Backend
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.models.lora import ADAPTER
from asyncrl.sync.layout.layout import to_wire
from asyncrl.system.rank_process import end_rank

pytestmark = [needs_megatron, pytest.mark.timeout(900)]

ATTENTION = ("q_proj", "v_proj", "o_proj")
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
Case = tuple[str, dict[str, Any], tuple[str, ...]]
QUICK: dict[str, Case] = {
    "sequence": (
        "qwen3",
        {"tensor": 2, "activation_checkpointing": "layers"},
        (*ATTENTION, "up_proj", "down_proj"),
    )
}
OF_TWO: dict[str, Case] = {
    "tensor": ("qwen2", {"tensor": 2, "sequence": False}, ALL),
    "pipeline tied": ("qwen2", {"pipeline": 2}, (*ATTENTION, "gate_proj")),
    "interleaved": ("qwen2", INTERLEAVED, ("k_proj", "down_proj")),
    "data": ("llama", {}, ALL),
    "expert": ("qwen3_moe", {"expert": 2}, ATTENTION),
    "shared expert tensor": ("qwen2_moe", {"tensor": 2, "expert": 2}, ALL),
    "context": ("qwen3", {"context": 2}, ALL),
    "latent": ("deepseek_v3", {"tensor": 2, "expert": 2}, (*LATENT, *ALL[4:])),
    "latent expert": ("deepseek_v3_plain", {"expert": 2}, ("q_proj", "kv_b_proj")),
}
OF_FOUR: dict[str, Case] = {
    "tensor pipeline": ("qwen2", {"tensor": 2, "pipeline": 2}, ALL),
    "data tensor": ("qwen3", {"tensor": 2}, ALL),
    "tensor pipeline expert": ("qwen3_moe", {"tensor": 2, "pipeline": 2, "expert": 2}, ATTENTION),
}
EVERY = QUICK | OF_TWO | OF_FOUR
BESIDE_PEFT = ("latent",)
"""PEFT 0.21 takes an adapter of a feed-forward layer for one of experts where a model has both, and drops it."""
RANDOM = ("sequence", "pipeline tied")
BESIDE = ("reference",)


def adapted(folder: Path, case: str, backend: str = "megatron", publish: str = "adapter") -> Config:
    family, parallel, targets = EVERY[case]
    config = config_of(folder, family, backend, **(parallel if backend == "megatron" else {}))
    begun = folder / f"begun {case}" / ADAPTER
    path = str(begun) if begun.exists() else None
    lora = LoraConfig(rank=3, alpha=6.0, targets=targets, path=path, publish=publish)  # type: ignore[arg-type]
    return replace(config, model=replace(config.model, lora=lora))


def of_two_steps(backend: Backend) -> dict[str, Any]:
    seen: dict[str, Any] = {"before": says(backend), "norms": train(backend, range(2))}
    base = backend.models["reference"].predict(batches(7)[1])
    return seen | {"after": says(backend), "base": base}


def published(backend: Backend) -> dict[str, Any]:
    return {"layout": to_wire(backend.layout()), "tensors": copied(backend.local_tensors())}


def made(config: Config) -> Backend:
    """A Megatron backend, in place of the last one."""
    from megatron.core import parallel_state

    from asyncrl.learner.backends.megatron.backend import MegatronBackend

    parallel_state.destroy_model_parallel()
    return MegatronBackend(config, BESIDE)


def rank_main(folder: Path, cases: dict[str, Case]) -> None:
    import megatron_shim

    megatron_shim.install()
    for case in cases:
        backend = made(adapted(folder, case))
        seen = of_two_steps(backend)
        seen |= published(backend)
        backend.export_hf(folder / f"{case} exported")
        backend.save(folder / f"{case} saved")
        again = made(adapted(folder, case, publish="merged"))
        live = again.local_tensors()
        train(again, range(1))
        again.load(folder / f"{case} saved")
        seen["merged"] = {"layout": to_wire(again.layout()), "tensors": copied(live)}
        seen["on"] = train(again, range(2, 3))
        torch.save(seen, folder / f"{case} {os.environ['RANK']}")
    end_rank()


def quick_main(folder: Path) -> None:
    rank_main(folder, QUICK)


def two_main(folder: Path) -> None:
    rank_main(folder, OF_TWO)


def four_main(folder: Path) -> None:
    rank_main(folder, OF_FOUR)


@pytest.mark.parametrize(
    ("main", "world", "cases"),
    [
        ("quick", 2, QUICK),
        pytest.param("two", 2, OF_TWO, marks=pytest.mark.slow),
        pytest.param("four", 4, OF_FOUR, marks=pytest.mark.slow),
    ],
    ids=["quick", "two", "four"],
)
def test_adapters_learn_as_with_the_other_backend(
    tmp_path: Path, main: str, world: int, cases: dict[str, Case]
) -> None:
    for case, (family, _, _) in cases.items():
        if not (tmp_path / family / "model.safetensors").exists():
            write_weights(tmp_path / family, family)
        if case not in RANDOM:
            begun = FsdpBackend(adapted(tmp_path, case, "fsdp"), BESIDE)
            train(begun, range(4, 5))
            begun.export_hf(tmp_path / f"begun {case}")
    run_ranks(f"test_megatron_adapters:{main}_main", tmp_path, world, STUCK_S)
    for case in cases:
        alone = FsdpBackend(adapted(tmp_path, case, "fsdp"), BESIDE)
        ours = of_two_steps(alone)
        ranks = [torch.load(tmp_path / f"{case} {rank}", weights_only=False) for rank in range(world)]
        for rank in ranks:
            for what in ("before", "norms", "after", "base"):
                close(rank[what], ours[what], atol=1e-5)
        whole = put_together(ranks)
        assert whole.keys() == alone.local_tensors().keys()
        for name, tensor in alone.local_tensors().items():
            close(whole[name], tensor, atol=1e-5)
        exported(tmp_path, case, whole, ours["after"]["logp_N"])
        went_on(tmp_path, case, ranks, alone)


def exported(folder: Path, case: str, whole: dict[str, Any], said_N: torch.Tensor) -> None:
    """PEFT and plain transformers read an export, and give the log-probs of the learner."""
    of_peft = load_file(folder / f"{case} exported" / ADAPTER / "adapter_model.safetensors")
    assert of_peft.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in of_peft.items())
    batch = batches(7)[1]
    merged = AutoModelForCausalLM.from_pretrained(folder / f"{case} exported").eval()
    base = AutoModelForCausalLM.from_pretrained(folder / EVERY[case][0]).eval()
    beside = PeftModel.from_pretrained(base, folder / f"{case} exported" / ADAPTER).eval()
    models = [merged] if case in BESIDE_PEFT else [merged, beside]
    first = batch.segment_lengths[0]
    mask = batch.loss_mask_N[1:first]
    for model in models:
        with torch.no_grad():
            logits = model(batch.token_ids_N[None, :first]).logits[0, :-1] / batch.temperature_R[0]
        logp = logits.log_softmax(-1).gather(-1, batch.token_ids_N[1:first, None])[:, 0]
        torch.testing.assert_close(logp[mask], said_N[1:first][mask], atol=2e-5, rtol=0)


def went_on(folder: Path, case: str, ranks: list[dict[str, Any]], alone: FsdpBackend) -> None:
    """A checkpoint goes on where versions are merged weights, and with the other backend."""
    other = FsdpBackend(adapted(folder, case, "fsdp", publish="merged"), BESIDE)
    other.load(folder / f"{case} saved")
    merged = put_together([rank["merged"] for rank in ranks])
    assert merged.keys() == other.local_tensors().keys()
    for name, tensor in other.local_tensors().items():
        close(merged[name], tensor, atol=1e-5)
    through = train(alone, range(2, 3))
    close(train(other, range(2, 3)), through, atol=1e-5)
    for rank in ranks:
        close(rank["on"], through, atol=1e-5)


def refusing_main(folder: Path) -> None:
    import megatron_shim

    megatron_shim.install()
    config = config_of(folder, "qwen3_moe", "megatron", pipeline=2)  # the second layer alone is dense
    for targets, why in (
        (("gate_proj",), "leaves layers 2 to 3 without"),
        (("q_proj", "lm_head"), "adapts q_proj"),
    ):
        lora = LoraConfig(rank=3, targets=targets)
        with pytest.raises(ConfigError, match=rf"model\.lora\.targets = .*{why}"):
            made(replace(config, model=replace(config.model, lora=lora)))
    end_rank()


@pytest.mark.slow
def test_adapters_that_it_cannot_train_are_refused_by_name(tmp_path: Path) -> None:
    config_of(tmp_path, "qwen3_moe", "megatron")
    run_ranks("test_megatron_adapters:refusing_main", tmp_path, 2, STUCK_S)
