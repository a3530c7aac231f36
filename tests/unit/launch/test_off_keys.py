"""Keys that were set and do nothing are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.load import CONFIGS, load_config
from asyncrl.launch.preflight import off_keys

BASE = """\
model: {path: some/model}
tasks: {source: "some.module:function"}
reward: {function: "some.module:reward"}
"""


@pytest.mark.parametrize(
    ("words", "key", "why"),
    [
        (
            "generator.vllm.enforce_eager=true",
            "generator.vllm.enforce_eager",
            "generator.engine=transformers",
        ),
        ("generator.server.deadline_s=5", "generator.server.deadline_s", "generator.engine=transformers"),
        ("critic.clip=0.1", "critic.clip", "the algorithm has no critic"),
        ("critic.optimizer.lr=0.1", "critic.optimizer.lr", "the algorithm has no critic"),
        (
            "sync.backend=file sync.folder=/tmp/w sync.fanout=2",
            "sync.fanout",
            "sends weights through a store",
        ),
        ("sync.keep=5", "sync.keep", "sync.backend=auto"),
        ("algorithm.vapo_alpha=0.1", "algorithm.vapo_alpha", "it is of advantage=vapo"),
        ("algorithm.sapo_tau=[1,2]", "algorithm.sapo_tau", "it is of loss=sapo"),
        ("evaluation.every=5", "evaluation.every", "nothing is evaluated"),
        ("agent.max_turns=3", "agent.max_turns", "none of agent.tools, environment, program and function"),
        (
            "agent.tools=[a:b] agent.gateway.port=5",
            "agent.gateway.port",
            "neither agent.program nor agent.function",
        ),
        ("model.lora.alpha=3", "model.lora.alpha", "model.lora.rank=0"),
        ("learner.optimizer.min_lr_ratio=0.5", "learner.optimizer.min_lr_ratio", "schedule=constant"),
    ],
)
def test_a_key_of_what_is_off_is_named(base: Path, words: str, key: str, why: str) -> None:
    (line,) = off_keys(load_config(base, words.split(" ")))
    assert line.startswith(f"{key}=")
    assert why in line


@pytest.mark.parametrize(
    "words",
    [
        "generator.engine=vllm generator.vllm.enforce_eager=true",
        "algorithm.advantage=vapo algorithm.vapo_alpha=0.1 critic.clip=0.1",
        "model.lora.rank=4 model.lora.alpha=3",
        "evaluation.source=some.module:function evaluation.every=5",
        "algorithm.own_loss=asyncrl.learner.algorithms.losses.ratio_losses:ppo algorithm.sapo_tau=[1,2]",
    ],
)
def test_a_key_of_what_is_on_is_not(base: Path, words: str) -> None:
    assert off_keys(load_config(base, words.split(" "))) == []


@pytest.mark.parametrize("preset", sorted(path.name for path in (CONFIGS / "algorithms").glob("*.yaml")))
def test_every_key_of_a_preset_counts(tmp_path: Path, preset: str) -> None:
    path = tmp_path / "it.yaml"
    path.write_text(f"include: [algorithms/{preset}]\n{BASE}")
    words = ["teacher.path=some/teacher"] if preset.startswith("distill") else []
    words += ["reward.weights.cost=0"] if preset == "safe_rlhf.yaml" else []
    lines = off_keys(load_config(path, words))
    assert [line for line in lines if not line.startswith("reward.")] == []


def test_a_section_that_the_engine_of_a_pool_does_not_read_is_named(base: Path) -> None:
    eager = "vllm: {enforce_eager: true}"
    pools = f"{{small: {{{eager}}}, large: {{engine: vllm, {eager}}}, own: {{own_engine: a.b:C, {eager}}}}}"
    (line,) = off_keys(load_config(base, [f"placement.generators={pools}"]))
    small = "placement.generators.small"
    assert line == f"{small}.vllm does nothing: {small}.engine=transformers"
