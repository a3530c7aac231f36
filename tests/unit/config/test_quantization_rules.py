"""Keys that go with generator.quantization, and those that do not."""

from __future__ import annotations

import pytest

from asyncrl.config.load import load_config
from asyncrl.config.sections.learner import LogprobGateConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.checks.logprob_check import LogprobGate

INT8 = "generator.quantization=int8"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["algorithm.loss=reinforce"], "does not weigh them by what they were drawn from"),
        (["algorithm.loss=ppo", "algorithm.proximal=frozen"], "does not weigh them"),
        (["generator.engine=vllm", "sync.backend=vllm"], "is not for sync.backend=vllm"),
        (["model.lora.rank=4"], "adapters alone travel"),
        (
            ["generator.engine=vllm_server", "generator.server.urls=[http://127.0.0.1:1]"],
            "is not for engine 'vllm_server', which takes whole weights",
        ),
        (
            ["placement.generators.small={engine: vllm_server, server: {urls: [http://127.0.0.1:1]}}"],
            r"generator\.quantization = 'int8': is not for engine 'vllm_server'",
        ),
        (["placement.generators.small.quantization=fp8"], "placement.generators.small.quantization"),
        (["generator.quantization=int4"], "int4"),
    ],
)
def test_what_it_does_not_go_with(words: list[str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        load_config("configs/recipes/demo.yaml", [INT8, *words])


@pytest.mark.parametrize(
    "words",
    [
        [],  # ppo, whose ratio is to what tokens were drawn from
        ["algorithm.loss=reinforce", "algorithm.proximal=frozen", "algorithm.correction.kind=tis"],
        ["model.lora.rank=4", "model.lora.publish=merged"],
        ["generator.engine=vllm", "sync.backend=redis", "sync.redis_url=redis://127.0.0.1:1"],
        ["placement.generators.small.engine=vllm"],
    ],
)
def test_what_it_goes_with(words: list[str]) -> None:
    config = load_config("configs/recipes/demo.yaml", [INT8, *words])
    assert {pool.quantization for pool in config.generator_pools.values()} == {"int8"}


def test_vllms_own_key_names_ours() -> None:
    with pytest.raises(ConfigError, match=r"is set by generator\.quantization"):
        load_config(
            "configs/recipes/demo.yaml", ["generator.engine=vllm", "generator.vllm.extra.quantization=fp8"]
        )


def test_the_learner_takes_that_gate() -> None:
    gates = [LogprobGate(load_config("configs/recipes/demo.yaml", words)) for words in ([], [INT8])]
    assert [gate._most_mean for gate in gates] == [0.001, 0.1]


def test_the_gate_is_as_wide_as_in_bfloat16() -> None:
    gate = LogprobGateConfig()
    assert gate.bounds("float32", quantized=True) == gate.bounds("bfloat16") != gate.bounds("float32")
