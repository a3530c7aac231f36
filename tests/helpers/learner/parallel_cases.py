"""Small models of several families, trained two steps on one process or spread over many: what to compare.

A rank writes down losses, gradient norms, its parts of the gradients and of the weights; `together` puts the parts of
all ranks into whole tensors by their boxes, and sees to it that ranks with the same box have the same bits in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import TINY, random_group, small_config
from torch import Tensor
from transformers import (
    GemmaConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from asyncrl.config.schema import Config, LearnerConfig, ModelConfig
from asyncrl.config.sections.learner import OptimizerConfig, ParallelConfig
from asyncrl.learner.backends.dtensor_layout import layout_of_dtensors
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.sync.layout.layout import Box
from asyncrl.sync.layout.names import Names

SIZES: dict[str, Any] = {**TINY, "intermediate_size": 48}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=8, attention_bias=True, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=False),
    "gemma": GemmaConfig(**SIZES, head_dim=16),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8, tie_word_embeddings=False),
}
WITH_EXPERTS = ("qwen3_moe",)
LR = 1e-2
ALONE = ParallelConfig()

Parts = dict[str, tuple[tuple[int, ...], list[tuple[Box, Tensor]]]]
"""By name: the shape of the whole, and this rank's boxes with what is in them."""


def config_of(folder: Path, family: str, parallel: ParallelConfig = ALONE, **sections: Any) -> Config:
    """Random weights, the same on every process; in float64 where the family can, and else in float32."""
    path = folder / family
    if not (path / "config.json").exists():
        architecture = type(FAMILIES[family]).__name__.removesuffix("Config") + "ForCausalLM"
        FAMILIES[family].architectures = [architecture]
        FAMILIES[family].save_pretrained(path)
    # With Adam's usual epsilon, the rounding of gradients near 0 decides on whole steps.
    learner = LearnerConfig(parallel=parallel, optimizer=OptimizerConfig(grad_clip=0.5, eps=1e-3))
    dtype: Any = "float32" if family in WITH_EXPERTS else "float64"  # grouped_mm knows no float64
    model = ModelConfig(path=str(path), dtype=dtype)
    return small_config(folder, **({"model": model, "learner": learner} | sections))


def micro_batches(step: int, backend: FsdpBackend) -> list[MicroBatch]:
    """This data rank's share of three groups of odd lengths; where it has fewer than others, of nobody."""
    mine = [MicroBatch.of([random_group(3 * step + i, segments=1 + i)]) for i in range(3)][
        backend.data_rank :: backend.data_world
    ]
    return mine + [MicroBatch.empty()] * (-(-3 // backend.data_world) - len(mine))


def some_loss(batch: MicroBatch, logp_N: Tensor, entropy_N: Tensor) -> Tensor:
    """Another weight for each token; both outputs count."""
    return (logp_N * (batch.token_ids_N % 3 - 1.5) + 0.3 * entropy_N).sum()


def train(backend: FsdpBackend, steps: range) -> dict[str, Any]:
    """What a rank has to say of these optimizer steps."""
    losses, norms, grads = [], [], []

    def loss(batch: MicroBatch, *said: Tensor) -> Tensor:
        total = some_loss(batch, *said)
        losses.append(float(total.detach()))
        return total

    for step in steps:
        backend.policy.accumulate(micro_batches(step, backend), loss)
        masters = backend.policy._masters.tensors
        grads.append(parts({name: m.grad for name, m in masters.items() if m.grad is not None}))
        norms.append(backend.policy.optimizer_step(1 / 50, LR))
    probe = MicroBatch.of([random_group(100)])
    return {
        "losses": losses if backend.is_data_leader else [],
        "norms": norms,
        "grads": grads,
        "weights": parts(backend.policy._masters.parameters),
        "published": published(backend),
        "said": backend.policy.predict(probe),
        "next": backend.policy.predict_next(probe),
    }


def published(backend: FsdpBackend) -> Parts:
    """This rank's part of the weight stream, in the checkpoint's names."""
    layout, live = backend.layout(), backend.local_tensors()
    assert layout.keys() == live.keys()
    return {
        name: (tuple(param.shape), [(box, live[name].clone()) for box in param.boxes])
        for name, param in layout.items()
    }


def parts(tensors: Mapping[str, Tensor]) -> Parts:
    """In the names of the model in memory."""
    layout, live = layout_of_dtensors(tensors, Names())
    held = {}
    for name, param in layout.items():
        found = live[name]
        views = [found] if isinstance(found, Tensor) else found
        held[name] = (tuple(param.shape), [(b, v.clone()) for b, v in zip(param.boxes, views, strict=True)])
    return held


def together(ranks: Sequence[Parts]) -> dict[str, Tensor]:
    """The parts of all ranks as whole tensors."""
    whole: dict[str, Tensor] = {}
    for rank in ranks:
        for name, (shape, boxes) in rank.items():
            full = whole.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
            for box, part in boxes:
                there = full[box.slices()]
                assert there.isnan().all() or torch.equal(there, part.double()), (
                    f"{name}: {box} differs between ranks"
                )
                there.copy_(part)
    for name, full in whole.items():
        assert not full.isnan().any(), f"{name}: nobody holds {int(full.isnan().sum())} of its elements"
    return whole


def assert_same(ranks: Sequence[dict[str, Any]], alone: dict[str, Any], atol: float = 1e-6) -> None:
    """All ranks of one mesh against a single process."""
    assert sum(sum(rank["losses"]) for rank in ranks) == pytest.approx(sum(alone["losses"]), rel=1e-6)
    for rank in ranks:
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-6)
        torch.testing.assert_close(rank["said"], alone["said"], atol=1e-4, rtol=0)
        torch.testing.assert_close(rank["next"], alone["next"], atol=1e-4, rtol=0)
    for what in ("weights", "published"):
        assert_close(together([r[what] for r in ranks]), together([alone[what]]), atol)
    for step, mine in enumerate(alone["grads"]):
        assert_close(together([r["grads"][step] for r in ranks]), together([mine]), atol)


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], atol: float) -> None:
    """Within `atol`, or that share of a tensor's largest element where it is above 1."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        worst = float((found[name] - tensor).abs().max())
        assert worst <= atol * max(1.0, float(tensor.abs().max())), f"{name}: off by {worst}"
