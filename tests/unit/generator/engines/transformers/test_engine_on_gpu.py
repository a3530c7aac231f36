"""The embedded engine on a GPU, without one: only operators that CUDA has for their dtypes, a host that waits as often
as is written here, and the tokens that a CPU makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_ops import CudaOps
from image_cases import MODELS, prompts
from model_families import FAMILIES, save_family
from pretended_gpu import GPU, PretendedGpu

from asyncrl.config.schema import ModelConfig
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.generator.engines.transformers.drafts import Drafter
from asyncrl.generator.engines.transformers.kv_cache import ATTENTION
from asyncrl.generator.engines.transformers.slots import SlotBatch
from asyncrl.generator.engines.transformers.transformers_engine import _recorder
from asyncrl.models.adapters import live_tensors
from asyncrl.models.loading import load_causal_lm
from asyncrl.types import Prompt, Sampling, Turn

QUICK = {"qwen2", "qwen3-moe", "qwen3-next", "qwen3-vl"}
EACH = [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in FAMILIES]

TOWER_WAITS = 13
"""As in the learner's test: transformers' towers read the sizes of images."""


def batch_of(family: str, folder: Path, fixed: bool, drafter: Drafter | None = None) -> SlotBatch:
    save_family(family, folder)
    model = load_causal_lm(ModelConfig(path=str(folder), dtype="bfloat16"), 0, ATTENTION)
    return SlotBatch(
        model,
        slots=4,
        max_length=48,
        end_ids=(),
        version=0,
        fixed_shape=fixed,
        recorder=_recorder(model),
        drafter=drafter,
    )


def requests(family: str, folder: Path) -> list[SampleRequest]:
    """Greedy and drawn, alone and two of one prompt, with limits of the support."""
    asked = prompts(folder) if family in MODELS else [Prompt(np.arange(2, 6)), Prompt(np.arange(3, 12))]
    drawn = [Sampling(temperature=0.0, max_tokens=4), Sampling(temperature=0.7, top_p=0.9, max_tokens=4)]
    return [
        SampleRequest(f"r{n}", prompt.ids, drawn[n % 2], ordinal=n, n=1 + n % 2, media=prompt.media)
        for n, prompt in enumerate(asked)
    ]


def here(method: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Call it without the inference mode, which tensors of a pretended GPU do not know."""
    with torch.no_grad():
        return method.__wrapped__(*args, **more)


def played(batch: SlotBatch, asked: list[SampleRequest], call: Callable[..., Any] = here) -> list[Turn]:
    """All turns, with a flip between two steps."""
    for request in asked:
        batch.add(request)
    turns = dict(call(SlotBatch.step, batch))
    live = live_tensors(batch.model)
    call(
        SlotBatch.flip, batch, {name: 0.9 * tensor for name, tensor in live.items()}, live, 1, recompute=True
    )
    while not batch.idle:
        turns |= dict(call(SlotBatch.step, batch))
    return [turn for request in asked for turn in turns[request.request_id]]


def on_gpu(
    gpu: PretendedGpu, made: SlotBatch, drafter: Drafter | None = None
) -> tuple[SlotBatch, Callable[..., Any], list[list[Any]]]:
    """A batch with the model of `made` on the GPU, how to call it, and the waits of each call."""
    made.model.to(GPU)
    steps: list[list[Any]] = []

    def counted(method: Callable[..., Any], *args: Any, **more: Any) -> Any:
        gpu.waits.clear()
        result = here(method, *args, **more)
        steps.append([*gpu.waits])
        return result

    batch = SlotBatch(
        made.model,
        slots=4,
        max_length=48,
        end_ids=(),
        version=0,
        fixed_shape=made.fixed_shape,
        recorder=made._recorder,
        drafter=drafter,
    )
    return batch, counted, steps


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("family", EACH)
def test_an_engine_runs_on_cuda(family: str, fixed: bool, tmp_path: Path) -> None:
    if fixed and family in MODELS:
        return  # refused there
    batch = batch_of(family, tmp_path, fixed)
    with CudaOps() as ops:
        turns = played(batch, requests(family, tmp_path), lambda method, *a, **k: method(*a, **k))
    assert all(len(turn.output_ids) == 4 for turn in turns)
    assert "aten::searchsorted" in ops.called


def test_a_flip_is_done_when_it_returns(tmp_path: Path) -> None:
    """Else the hash of the live weights, on another stream, would be that of old ones."""
    moved = batch_of("qwen2", tmp_path, fixed=False)
    with PretendedGpu() as gpu:
        moved.model.to(GPU)
        batch = SlotBatch(moved.model, slots=4, max_length=48, end_ids=(), version=0)
        live = live_tensors(batch.model)
        staged = {name: tensor.clone() for name, tensor in live.items()}
        gpu.accelerator.calls.clear()
        here(SlotBatch.flip, batch, staged, live, 1)
        assert gpu.accelerator.calls == ["stream 0 synchronize"]


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("family", EACH)
def test_an_engine_on_a_gpu_makes_a_cpus_tokens(family: str, fixed: bool, tmp_path: Path) -> None:
    if fixed and family in MODELS:
        return  # refused there
    cpu, moved = (batch_of(family, tmp_path, fixed) for _ in range(2))
    asked = requests(family, tmp_path)
    expected = played(cpu, asked)
    with PretendedGpu() as gpu:
        batch, counted, steps = on_gpu(gpu, moved)
        found = played(batch, asked, counted)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.output_ids, other.output_ids)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=0.05)
    token = 2 + bool(moved._recorder)  # tokens and log-probs; the experts of all layers
    tower = TOWER_WAITS if family in MODELS else 0
    first, flip, *later = steps
    assert len(first) <= 2 * token + tower, first  # of the prompts, and of the rows
    assert len(flip) <= token - 2 + tower, flip  # the prompts again
    most = token if family not in MODELS else 2 * token + tower  # more samples than rows: some join later
    assert all(len(step) <= most for step in later), later


@pytest.mark.parametrize("family", ["qwen2", "qwen3-moe"])
def test_a_step_with_drafts_waits_no_more_often(family: str, tmp_path: Path) -> None:
    """Drafts come from the samples of the first time."""
    cpu, moved = (batch_of(family, tmp_path, False, Drafter(3, 32)) for _ in range(2))
    asked = requests(family, tmp_path)
    expected = [played(cpu, asked), played(cpu, asked)]
    with PretendedGpu() as gpu:
        batch, counted, steps = on_gpu(gpu, moved, Drafter(3, 32))
        found = [played(batch, asked, counted), played(batch, asked, counted)]
    assert batch.drafter is not None
    assert batch.drafter.accepted > 0
    for turns, others in zip(found, expected, strict=True):
        for one, other in zip(turns, others, strict=True):
            np.testing.assert_array_equal(one.output_ids, other.output_ids)
    token = 2 + bool(moved._recorder)
    assert all(len(step) <= 2 * token for step in steps), steps
