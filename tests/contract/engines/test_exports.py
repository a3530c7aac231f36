"""vLLM for the CPU, started on a folder that the learner exported, says what transformers says of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_cases import CLOSE, EXPERTS, SIZES, from_config, log_probs, request, vllm_config
from missing import needs_vllm
from model_families import rollouts
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from asyncrl.config.schema import Config, EvaluationConfig, GeneratorConfig, LearnerConfig, ModelConfig
from asyncrl.config.sections.learner import OptimizerConfig
from asyncrl.generator.engines.vllm.vllm_engine import VllmEngine
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.learner.data.batch import MicroBatch
from asyncrl.types import Group, Sampling, Task

pytestmark = [
    pytest.mark.asyncio(loop_scope="function"),
    pytest.mark.slow,
    pytest.mark.timeout(400),
    needs_vllm,
]

MODELS = {
    "dense, tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS),
}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
async def test_vllm_reads_an_export(config: PretrainedConfig, tmp_path: Path) -> None:
    start, final = tmp_path / "start", tmp_path / "final"
    untrained = from_config(config, start)
    export(start, final)
    trained = AutoModelForCausalLM.from_pretrained(final).eval()
    engine = VllmEngine(vllm_config(final), "generator-0", (), load_weights=True)
    await engine.start()
    try:
        turns = await engine.sample(request("a", n=3, max_tokens=40, prompt=40))
    finally:
        await engine.close()
    for turn in turns:
        np.testing.assert_allclose(turn.logprobs, log_probs(trained, turn), **CLOSE)
        assert np.abs(turn.logprobs - log_probs(untrained, turn)).max() > 0.01


def export(start: Path, final: Path) -> None:
    """After an optimizer step that all parameters have a part in."""
    backend = FsdpBackend(
        Config(
            model=ModelConfig(path=str(start), dtype="float32"),
            generator=GeneratorConfig(engine="scripted"),
            evaluation=EvaluationConfig(),
            learner=LearnerConfig(optimizer=OptimizerConfig(lr=1e-2)),
        )
    )
    batch = MicroBatch.of([Group.from_rollouts(Task(0, ""), Sampling(), rollouts())])
    backend.policy.accumulate([batch], lambda _, logp_N, entropy_N: -logp_N.sum())
    backend.policy.optimizer_step(1.0, lr=1e-2)
    backend.export_hf(final)
