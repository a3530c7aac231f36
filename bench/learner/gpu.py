"""python -m bench.learner --gpu: training steps on one GPU, and beside each a plain loop. Not run so far.

The same code path as on CPUs with another device name: varlen flash attention, chunked log-probs, float32 masters. The
loop of plain transformers has the same rollouts, padded in batches of 8, flash attention, torch's cross entropy, and
AdamW on its bf16 weights: it needs less memory for them and rounds small updates away. One process a measurement, whose
peak of memory is its own.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.device import accelerator
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.reporting.utilization import (
    TrainingFlops,
    measured_peak_flops,
    squares,
)
from asyncrl.learner.training.version_step import version_step
from asyncrl.models.loading import load_model_config
from asyncrl.types import Group
from bench.learner.model import config_of, groups_of
from bench.learner.passes import AT_ONCE, padded
from bench.learner.report import gpu_table
from bench.learner.rollouts import samples
from bench.output import write_results
from bench.process import CLOCKS, Process, Talk
from bench.qwen2 import write_qwen2

MODELS = {
    # hidden, intermediate, layers, heads, kv heads, tied
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, True),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, True),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, False),
}
LARGE = "Qwen2.5-7B"
"""Which needs `offload` and `activation_checkpointing` on a GPU of 140 GB."""

TOKENS, VOCABULARY, GROUPS = 8192, 151_936, 8
WARM, STEPS = 2, 5
DEADLINE_S = 1200.0


def main(json_path: Path | None, table_path: Path | None) -> None:
    """The parent, which needs no GPU of its own."""
    if not accelerator.count():
        sys.exit("python -m bench.learner --gpu: torch finds no GPU here")
    found: dict[str, dict[str, float]] = {}
    for name in MODELS:
        found[name] = measured(name, "asyncrl")
        found[name] |= {f"plain_{key}": value for key, value in measured(name, "plain").items()}
        print(name, found[name], flush=True)
    device = accelerator.name(accelerator.current_device())
    text = gpu_table(found, TOKENS, f"{device}, torch {torch.__version__}.")
    print(text)
    write_results(json_path, {"figures": found, "device": device}, table_path, text)


def measured(name: str, way: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="learner-") as folder:
        said = {"folder": folder, "model": name, "way": way}
        with Process(["bench.learner.gpu"], Path(folder) / "log", said) as process:
            heard: dict[str, float] = process.hears(DEADLINE_S)
    return heard


def side() -> None:
    """The child: one model, one way."""
    talk = Talk()
    said = talk.hears()
    folder, device = Path(said["folder"]), accelerator.current_device()
    hidden, inner, layers, heads, kv_heads, tied = MODELS[said["model"]]
    write_qwen2(
        folder / "model",
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=32_768,
        tie_word_embeddings=tied,
        eos_token_id=2,
    )
    config = gpu_config(folder, said["model"])
    groups = groups_of(samples("long_tail", GROUPS))
    step = {"asyncrl": asyncrl_step, "plain": plain_step}[said["way"]](config, groups, device)
    for _ in range(WARM):
        step()
    accelerator.wait_for_device(device)
    accelerator.peak_memory_bytes(device)
    clock = CLOCKS["wall"]
    begun = clock()
    for _ in range(STEPS):
        step()
    accelerator.wait_for_device(device)
    seconds = (clock() - begun) / STEPS
    lengths = [int(length) for group in groups for length in group.lengths]
    flops = TrainingFlops.of(config.model).flops(sum(lengths), squares(lengths))
    talk.tell(
        {
            "mfu": flops / seconds / measured_peak_flops(device, torch.bfloat16),
            "tokens_per_s": sum(lengths) / seconds,
            "peak_gib": accelerator.peak_memory_bytes(device) / (1 << 30),
        }
    )


def gpu_config(folder: Path, name: str) -> Config:
    config_of(folder, dtype="bfloat16", tokens=TOKENS)
    large = ["learner.activation_checkpointing=layers", "learner.offload=optimizer"] if name == LARGE else []
    return load_config(folder / "learner.yaml", large)


def asyncrl_step(config: Config, groups: list[Group], device: torch.device) -> Callable[[], None]:
    training, version = version_step(FsdpBackend(config), config), 0

    def step() -> None:
        nonlocal version
        training.add(groups, version)
        refused, version = training.step(version).refused, version + 1
        assert not refused, refused

    return step


def plain_step(config: Config, groups: list[Group], device: torch.device) -> Callable[[], None]:
    made: Any = AutoModelForCausalLM.from_config(
        load_model_config(config.model), attn_implementation="flash_attention_2", dtype=torch.bfloat16
    )
    model = made.to(device)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    batch = MicroBatch.of(groups)
    rows = batch.token_ids_N.split(list(batch.lengths_R))
    batches = [padded(rows[at : at + AT_ONCE]) for at in range(0, len(rows), AT_ONCE)]

    def step() -> None:
        for ids, keep in batches:
            ids, keep = ids.to(device), keep.to(device)
            labels = ids.masked_fill(keep == 0, -100)
            model(input_ids=ids, attention_mask=keep, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    side()
