"""Whole runs whose learner is Megatron-core, on the CPU by a shim that its processes load before all else."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import processes
import pytest
import torch
from own_functions import LENGTH
from processes import counts_of, finished, ran, rows, started

from asyncrl.config.load import load_config
from asyncrl.evaluate import evaluate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        find_spec("megatron") is None, reason="megatron-core is built for Linux on x86-64 alone"
    ),
]

HOOK = Path(__file__).parents[1] / "megatron_hook"
WORDS = ("queue.max_staleness=0", LENGTH)
ADAPTERS = ("model.lora.rank=4",)  # which alone travel to the generator
AGAIN = ("learner.activation_checkpointing=layers",)
TWO_RANKS = ("learner.backend=megatron", "learner.processes=2", "run.versions=2")


def run_of(config_file: Path, *words: str, executed: bool = False) -> Path:
    ran("asyncrl", "train", str(config_file), *WORDS, *words, executed=executed)
    return config_file.parent / "it"


@pytest.mark.parametrize(
    ("axis", "words"),
    [("tensor", ()), ("pipeline", ADAPTERS), ("context", AGAIN)],
    ids=["tensor", "pipeline and adapters", "context"],
)
def test_one_loop_trains_either_backend(config_file: Path, axis: str, words: tuple[str, ...]) -> None:
    """Two ranks that share each matrix, the layers or the tokens publish their weights, save, and leave a model that
    scores; then the other backend goes on from their checkpoint, with one process. Every flip's weights are hashed, and
    every version's tokens compared with the learner's log-probs: what Megatron publishes is what it computes with. No
    process is forked, so that each begins with the shim."""
    path = os.pathsep.join([str(HOOK), *filter(None, [processes.ENV.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(processes.ENV, "PYTHONPATH", path)
        run = run_of(
            config_file, *TWO_RANKS, *words, f"learner.parallel.{axis}=2", "launch.fork=false", executed=True
        )
    assert counts_of(run) == (2, 8, 0)
    assert evaluate(load_config(str(config_file)), str(run / "final"))["tasks"] == 20
    run_of(config_file, *words, "run.resume=true", "run.versions=3")
    trained = [row for row in rows(run) if "train/grad_norm" in row]
    assert [row["version"] for row in trained] == [1, 2, 3]
    assert all(row["train/grad_norm"] > 0 and row["train/logprob_gap/train/tokens"] > 0 for row in trained)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(config_file: Path) -> None:
    words = (str(config_file), "learner.backend=megatron", "queue.address=tcp://127.0.0.1:1")
    with started("asyncrl", "learner", *words) as learner:
        code, printed = finished(learner)
    assert (code, "computes on GPUs, and there is none" in printed) == (2, True), printed
