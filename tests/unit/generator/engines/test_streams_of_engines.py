"""On an accelerator, here a made-up one, an engine decodes on while the hash of its weights is compared, and a flip is
done when it returns."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch
from fake_streams import DEFAULT, FakeStreams, fake_streams

from asyncrl.config.schema import SyncConfig
from asyncrl.generator.engines.receiver import LocalReceiver, WeightReader
from asyncrl.generator.engines.vllm.vllm_weights import RankWeights
from asyncrl.sync.layout.layout import Box
from asyncrl.sync.stream.subscriber import StagedWeights
from asyncrl.sync.tensors.shards import layout_of

LIVE = {"w": torch.arange(6.0)}


class Hashing:
    """As a Checksum: notes the stream that it is compared on."""

    def __init__(self, module: FakeStreams) -> None:
        self._module = module
        self.streams: list[str] = []

    def check(self, live: Any, whose: str) -> None:
        self.streams.append(self._module.current_stream().name)


def reader() -> WeightReader:
    return WeightReader("generator-0", "run", SyncConfig(), None)


def rank_of(module: FakeStreams, checksum: Any) -> RankWeights:
    layout = layout_of(LIVE)
    weights = RankWeights({"w": [(Box.whole((6,)), LIVE["w"].clone())]}, layout, reader())
    weights._staged = Future()
    weights._staged.set_result(StagedWeights(1, checksum, 0.0, 24))
    module.log.clear()
    return weights


def test_the_embedded_engines_weights_are_hashed_beside_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_streams(monkeypatch)
    checksum = Hashing(module)
    receiver = LocalReceiver(LIVE, None, reader())  # type: ignore[arg-type]
    receiver._check(checksum, "the parameters")  # type: ignore[arg-type]
    assert len(checksum.streams) == 1
    assert DEFAULT not in checksum.streams


def test_a_rank_of_vllm_hashes_beside_decoding_what_it_has_flipped(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_streams(monkeypatch)
    checksum = Hashing(module)
    weights = rank_of(module, checksum)
    weights.flip(1)
    assert [what for what, _, _ in module.log] == ["copy", "synchronize"]
    weights.verify()
    assert weights._verified is not None
    assert weights._verified.result(10.0) == 1
    assert len(checksum.streams) == 1
    assert DEFAULT not in checksum.streams
