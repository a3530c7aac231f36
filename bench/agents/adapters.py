"""The bytes of a version of adapters beside those of all weights, as a learner's publisher sends them to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.config.sections.models import LoraConfig
from asyncrl.generator.engines.receiver import Learner, WeightReader
from asyncrl.generator.process import load_engine
from asyncrl.learner.backends.fsdp.fsdp import FsdpBackend
from asyncrl.models.prompts import policy_tokenizer
from asyncrl.sync.stream.publisher import Publisher
from asyncrl.sync.tensors.shards import Shards

VERSION_S = 60.0
"""Longest wait for a version."""


async def shares(path: Path) -> Mapping[str, float]:
    """Adapters over all weights: their bytes in a version, and their parameters. path: of a configuration"""
    plain = load_config(path)
    adapted = replace(plain, model=replace(plain.model, lora=LoraConfig(rank=16)))
    adapter_bytes, adapter_parameters = await _version(adapted)
    all_bytes, all_parameters = await _version(plain)
    return {
        "adapter_bytes": adapter_bytes,
        "adapter_bytes_share": adapter_bytes / all_bytes,
        "adapter_parameter_share": adapter_parameters / all_parameters,
    }


async def _version(config: Config) -> tuple[int, int]:
    """(bytes that an engine has taken for one version, parameters that the learner publishes)."""
    backend = FsdpBackend(config)
    tensors = backend.local_tensors()
    engine: Any = load_engine(config, policy_tokenizer(config), "bench", load_weights=True)
    await engine.start()
    publisher = Publisher(0, 1, Shards(backend.layout(), tensors), config.sync, 0)
    receiver = engine.receiver(WeightReader(config.run.name, "bench", config.sync))
    try:
        await receiver.open(Learner((publisher.endpoint,), 0))
        publisher.publish(1)
        await receiver.newest(0, VERSION_S)
        staged = await receiver.stage(1)
        await receiver.flip(1)
        await receiver.verify()
    finally:
        await receiver.close()
        publisher.close(VERSION_S)
        await engine.close()
    return staged.bytes, sum(tensor.numel() for tensor in tensors.values())
