"""A run whose generator is vLLM, in its own process."""

from __future__ import annotations

from pathlib import Path

import missing
import pytest
from processes import STARTS_S, counts_of, ran, rows

from asyncrl.config.schema import ModelConfig
from asyncrl.models.loading import load_causal_lm
from asyncrl.tasks.addition import write_model_folder

pytest.importorskip("vllm", reason=missing.VLLM)

INT8 = ("generator.quantization=int8",)
ADAPTERS = ("model.lora.rank=4", "learner.processes=2")


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="this project's stream"),
        pytest.param(
            ("sync.backend=vllm", "sync.verify=false", "learner.processes=2"),
            id="vLLM's own weight transfer, from two ranks",
            marks=pytest.mark.slow,
        ),
        pytest.param(INT8, id="projections in int8", marks=pytest.mark.slow),
        pytest.param(ADAPTERS, id="adapters alone, from two ranks", marks=pytest.mark.slow),
    ],
)
def test_a_run_trains_on_what_vllm_generates(config_file: Path, more: tuple[str, ...]) -> None:
    run, model = config_file.parent / "it", config_file.parent / "model"
    write_model_folder(model, hidden_size=128, layers=2)  # vLLM wants heads of 32
    if more == ADAPTERS:  # they stand beside weights that both ends read
        load_causal_lm(ModelConfig(str(model)), seed=0).save_pretrained(model)
    words = (
        f"model.path={model}",
        "generator.engine=vllm",
        "generator.slots=8",
        "evaluation.source=null",
        "run.versions=3",
        "learner.groups_deadline_s=300",
        *more,
    )
    ran("asyncrl", "train", str(config_file), *words, executed=True, deadline_s=STARTS_S)
    assert counts_of(run) == (3, 12, 0)
    told = rows(run)
    assert max(row["train/staleness/max"] for row in told) <= 2
    assert any(name.startswith("train/logprob_gap/") for row in told for name in row)
    gaps = [row["train/logprob_gap/probe/max"] for row in told if row.get("train/logprob_gap/probe/tokens")]
    assert max(gaps) < (0.2 if more == INT8 else 1e-3)
    assert max(gaps) > 1e-4 or more != INT8, "of products in 8 bits"
