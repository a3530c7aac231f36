"""vLLM's own metrics come out of its generator's endpoint for Prometheus."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import missing
import pytest
from processes import FOR_EVER, STARTS_S, started, until, until_trained

from asyncrl.tasks.addition import write_model_folder

pytest.importorskip("vllm", reason=missing.VLLM)


@pytest.mark.slow
def test_the_endpoint_of_a_generator_has_the_metrics_of_its_vllm(config_file: Path) -> None:
    run, model = config_file.parent / "it", config_file.parent / "model"
    write_model_folder(model, hidden_size=128, layers=2)  # vLLM wants heads of 32
    words = (
        f"model.path={model}",
        "generator.engine=vllm",
        "generator.slots=8",
        "evaluation.source=null",
        "learner.groups_deadline_s=300",
        "telemetry.prometheus_port=0",
        FOR_EVER,
    )
    with started("asyncrl", "train", str(config_file), *words, executed=True) as launcher:
        until_trained(run, 1, launcher, deadline_s=STARTS_S)
        (group,) = json.loads((run / "prometheus" / "generator-0.json").read_text())

        def text() -> str:
            with urllib.request.urlopen(f"http://{group['targets'][0]}/metrics", timeout=30) as reply:
                return reply.read().decode()

        until(lambda: "\nvllm:generation_tokens_total{" in text(), "vLLM's metrics", launcher)
        until(lambda: "\nasyncrl_generator_tokens_total" in text(), "the generator's metrics", launcher)
