"""`placement.generators`: pools of generators of other kinds than `generator` itself describes."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.config.commented_yaml import render
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.config.sections.generator import OF_A_POOL, GeneratorConfig, SpeculationConfig
from asyncrl.errors import ConfigError

BASE = """\
model: {path: some/model}
tasks: {source: some.module:function}
reward: {function: some.module:reward}
generator:
  engine: vllm
  count: 3
  slots: 64
  devices: "0,1,2"
  temperature: 0.9
  stop: ["${end}"]
  kv: recompute
  vllm: {kv_cache_mb: 100, extra: {seed: 1, block_size: 16}}
placement:
  generators:
    small:
      slots: 8
      devices: "3"
      vllm: {extra: {seed: 2}}
    old: {engine: transformers, devices: "", speculation: {tokens: 4}}
"""


TURNS = ("sync.staging=host", "sync.snapshot_device=host")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(BASE.replace("${end}", r"\\${end}"))
    return path


def test_a_pool_has_the_keys_of_generator_unless_it_has_its_own(base: Path) -> None:
    pools = load_config(base).generator_pools
    assert [*pools] == ["", "small", "old"]
    first, small, old = pools.values()
    assert (first.count, small.count, old.count) == (3, 1, 1), "each pool counts by itself"
    assert (small.engine, small.slots, small.kv, small.temperature) == ("vllm", 8, "recompute", 0.9)
    assert (small.vllm.kv_cache_mb, small.vllm.extra) == (100, {"seed": 2, "block_size": 16})
    assert (old.engine, old.slots, old.devices, old.speculation.tokens) == ("transformers", 64, "", 4)
    assert {tuple(pool.stop) for pool in pools.values()} == {tuple(first.stop)}


def test_a_pool_with_an_engine_of_its_own_has_no_keys_of_the_others(base: Path) -> None:
    words = ["generator.own_engine=mine.py:engine", "placement.generators.small=null"]
    pools = load_config(base, words).generator_pools
    assert [*pools] == ["", "old"]
    assert (pools[""].own_engine, pools["old"].own_engine) == ("mine.py:engine", None)
    words = ["generator.engine=transformers", "generator.speculation.tokens=2"]
    words += ["placement.generators.old.speculation=null", "placement.generators.small.engine=vllm"]
    pools = load_config(
        base, [*words, "placement.generators.old={speculation: {ridge_tokens: 7}}"]
    ).generator_pools
    assert pools["small"].speculation.tokens == 0
    assert pools["old"].speculation == SpeculationConfig(2, 7), "it has the same engine"


def test_the_configuration_of_a_pool_is_one_of_one_kind(base: Path) -> None:
    config = load_config(base, ["placement.colocate=true", "learner.devices='0,1,2'", *TURNS])
    small = config.of_pool("small")
    assert (config.placement.colocate, small.placement.colocate) == (True, False), "with GPUs of its own"
    assert (small.generator, small.placement.generators) == (config.generator_pools["small"], {})
    assert config.of_pool("") is config
    base.write_text(render(small))
    assert load_config(base) == small


def test_it_is_read_back_as_it_was_written(base: Path) -> None:
    config = load_config(base)
    base.write_text(render(config))
    assert load_config(base).generator_pools == config.generator_pools


AT = "placement.generators"


@pytest.mark.parametrize(
    ("words", "key", "text"),
    [
        ((f"{AT}.Small.slots=8",), f"{AT}.Small", "is no name of a pool"),
        ((f"{AT}.small.sluts=8",), f"{AT}.small.sluts", f"did you mean {AT}.small.slots?"),
        ((f"{AT}.small=3",), f"{AT}.small", "must hold keys"),
        ((f"{AT}.small.slots=0",), f"{AT}.small.slots", "must be above 0"),
        ((f"{AT}.small.temperature=2",), f"{AT}.small.temperature", "set generator.temperature; a pool"),
        (
            (f"{AT}.small.engine=scripted", f"{AT}.small.kv=keep"),
            f"{AT}.small.engine",
            "the learner compares all or none",
        ),
        ((f"{AT}.small.devices='2'",), f"{AT}.small.devices", "names GPU 2, which the pool generator has"),
        (
            (f"{AT}.old.devices='3'",),
            f"{AT}.small.devices",
            "names GPU 3, which the pool placement.generators.old has",
        ),
        ((f"{AT}.small.devices=null",), f"{AT}.small.devices", "name GPUs of its own"),
        (
            (f"{AT}.small.vllm.tensor_parallel=2",),
            f"{AT}.small.devices",
            f"lower {AT}.small.count or {AT}.small.vllm.tensor_parallel",
        ),
        (("queue.max_staleness=0",), f"{AT}.old.speculation.tokens", "set generator.fixed_shape=false"),
        (
            (
                *("generator.engine=vllm_server", "generator.server.urls=[http://a:1,http://a:2,http://a:3]"),
                f"{AT}.small.server.urls=[http://b:1,http://a:2]",
            ),
            f"{AT}.small.server.urls",
            "names http://a:2, which the pool generator updates",
        ),
        ((f"{AT}.{'n' * 41}.slots=8",), f"{AT}.{'n' * 41}", "at most 39 small letters"),
        (("evaluation.source=a:b", "evaluation.samples=9"), "evaluation.samples", f"{AT}.small.slots=8"),
        (
            (
                *("placement.colocate=true", *TURNS, "generator.devices=null"),
                *(f"{AT}.small.devices=null", f"{AT}.old.devices=null"),
            ),
            f"{AT}.small.devices",
            "takes no turns on the GPUs of these",
        ),
        (("sync.backend=vllm", "sync.verify=false"), "sync.backend", f"is for {AT}.old.engine=vllm"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_under_its_own_key(
    base: Path, words: tuple[str, ...], key: str, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(base, words)
    found = {error.key: str(error) for error in caught.value.each}
    assert key in found
    assert text in found[key]


def test_what_is_wrong_with_generator_itself_is_named_once(base: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(base, ["generator.max_tokens=5000"])
    assert [error.key for error in caught.value.each] == ["generator.max_tokens"]


def test_an_unknown_pool_is_refused_by_name(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"placement\.generators\.big .* there are small, old"):
        load_config(base).of_pool("big")
    with pytest.raises(ConfigError, match=r"add placement\.generators\.big\.count=1"):
        Config().of_pool("big")


def test_keys_of_a_pool_are_keys_of_the_section() -> None:
    assert {*OF_A_POOL} < vars(GeneratorConfig()).keys()
