"""The generator bench's own arithmetic: lengths of answers, and verdicts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from asyncrl.config.load import load_config
from asyncrl.generator.engines.engine import SampleRequest
from asyncrl.tasks.addition import train, write_model_folder
from asyncrl.types import Sampling
from bench.generator import __main__ as program
from bench.generator import speculation
from bench.generator.model import LOADS, LONG, TINY, config_of, task_at, write_model
from bench.generator.report import table
from bench.generator.watched import Watched, lognormal


def test_lengths_have_a_long_tail_and_the_mean_of_the_others() -> None:
    lengths = np.array([lognormal(ordinal, 0) for ordinal in range(4000)])
    assert lengths.mean() == pytest.approx(LONG.mean, rel=0.1)
    assert np.log(lengths).std() == pytest.approx(1.0, abs=0.05)
    assert (lengths.min() >= 1, lengths.max()) == (True, LONG.longest)


async def test_a_long_tail_gives_each_sample_a_length_of_its_own_and_probes_are_left_alone() -> None:
    asked: list[SampleRequest] = []

    class Engine:
        async def sample(self, request: SampleRequest) -> list[Any]:
            asked.append(request)
            return [request.request_id] * request.n

    watched = Watched(Engine())
    request = SampleRequest("r", np.zeros(1, np.int64), Sampling(max_tokens=9), ordinal=5, n=3)
    assert len(await watched.sample(request)) == 3
    watched.long_tail = True
    assert await watched.sample(request) == ["r#0", "r#1", "r#2"]
    await watched.sample(SampleRequest("probe/0", np.zeros(1, np.int64), Sampling(max_tokens=1), 0))
    assert [(one.n, one.sampling.max_tokens) for one in asked] == [
        (3, LONG.mean),
        *((1, lognormal(15 + i, 0)) for i in range(3)),
        (1, 1),
    ]


def test_short_answers_are_the_demos(tmp_path: Path) -> None:
    load, demo = LOADS["short"], load_config("configs/recipes/demo.yaml")
    write_model(tmp_path / "model", load.sizes)
    write_model_folder(tmp_path / "demo")
    config = config_of(tmp_path, "transformers", load=load)
    assert config.batch == demo.batch
    assert (config.generator.slots, config.generator.max_tokens) == (
        demo.generator.slots,
        demo.generator.max_tokens,
    )
    assert len(str(task_at(12345678, load).prompt)) == load.prompt == len(train()[0]["prompt"])
    ours, theirs = (AutoConfig.from_pretrained(tmp_path / name) for name in ("model", "demo"))
    for key in ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size"):
        assert getattr(ours, key) == getattr(theirs, key), key


def test_an_engine_that_was_not_measured_is_neither_0_nor_a_pass() -> None:
    text = table({"worker_over_bare.transformers": 0.97}, ["transformers", "vllm"], 28.3, 3, "2 cores.")
    assert "| worker_over_bare.transformers ≥ 0.95 | pass: 0.97 |" in text
    assert "| worker_over_bare.vllm ≥ 0.95 | absent: not measured |" in text
    assert "| their ratio | 0.97 | – |" in text


def test_an_engine_that_fails_does_not_take_the_figures_of_the_other_along(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def figures(folder: Path, engine: str, args: object) -> dict[str, float]:
        if engine == "vllm":
            raise RuntimeError("pool.log: it died")
        return {"worker_over_bare": 0.5}

    monkeypatch.setattr(program, "_figures", figures)
    monkeypatch.setattr(program, "_half_gaps", lambda *of: {})
    files = ["--json", str(tmp_path / "figures"), "--table", str(tmp_path / "table")]
    monkeypatch.setattr(sys, "argv", ["bench", "--tiny", "--engines", "vllm", "transformers", *files])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 1
    assert json.loads((tmp_path / "figures").read_text())["figures"] == {"worker_over_bare.transformers": 0.5}
    text = (tmp_path / "table").read_text()
    assert "| worker_over_bare.transformers ≥ 0.95 | FAIL: 0.5 |" in text
    assert "| worker_over_bare.vllm ≥ 0.95 | absent: not measured |" in text


def test_the_policy_of_the_bench_of_drafts_goes_on_as_likely_as_it_says() -> None:
    model = speculation.policy(TINY, 0.7)
    model.set_attn_implementation("eager")
    ids = torch.from_numpy(speculation.prompt_of(0))[None]
    with torch.no_grad():
        share, token = model(ids).logits[0].softmax(-1).max(-1)
    assert share.numpy() == pytest.approx(np.full(len(share), 0.7), abs=1e-4)
    assert token.max() < speculation.FOLLOWERS


def test_a_tail_is_the_time_of_the_last_answers_alone() -> None:
    assert speculation.tail_s(np.arange(1.0, 101.0)) == 5.0
    assert speculation.tail_s(np.array([1.0] * 19 + [9.0])) == 8.0
