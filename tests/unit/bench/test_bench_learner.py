"""That the learner's bench compares like with like; and, once, all of it on a model of no size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asyncrl.learner.data.batch import MicroBatch
from asyncrl.learner.reporting.utilization import TrainingFlops
from bench.bars import verdicts
from bench.learner.head import _inputs, chunked, naive
from bench.learner.model import SIZES, TINY, config_of, groups_of, write_model
from bench.learner.passes import Packed, Padded, with_every_prompt
from bench.learner.report import BARS, gpu_table, table
from bench.learner.rollouts import GROUP, PROMPT, samples
from bench.process import ROOT


def test_rollouts_are_the_same_in_every_process_and_of_the_lengths_they_are_said_to_be() -> None:
    for kind, longest, mean in (("short", 256, 136), ("long_tail", 2048, 419), ("long_prompt", 256, 136)):
        groups = samples(kind, 64)
        assert groups == samples(kind, 64)
        lengths = [len(sample.answer) for group in groups for sample in group]
        assert 16 <= min(lengths) < max(lengths) <= longest
        assert np.mean(lengths) == pytest.approx(mean, rel=0.15)
        assert all(len({sample.reward for sample in group}) > 1 for group in groups)
        assert {len(sample.prompt) for group in groups for sample in group} == {PROMPT[kind]}


def test_the_model_has_more_than_ten_million_parameters(tmp_path: Path) -> None:
    write_model(tmp_path / "model", SIZES)
    assert 10e6 < TrainingFlops.of(config_of(tmp_path).model).weights < 12e6


def test_packed_and_padded_say_the_same(tmp_path: Path) -> None:
    write_model(tmp_path / "model", TINY)
    config, batch = config_of(tmp_path, tokens=256), MicroBatch.of(groups_of(samples("short", 2, scale=0.2)))
    said = []
    for way in (Packed(config), Packed(with_every_prompt(config)), Padded(config)):
        way.prepare(batch, PROMPT["short"])
        said.append(way.run())
    assert batch.rollouts == 2 * GROUP
    assert said == pytest.approx([said[0]] * 3, rel=1e-5)


def test_both_ways_to_log_probs_say_the_same() -> None:
    inputs = _inputs(8)
    assert chunked(*inputs) == pytest.approx(naive(*inputs), rel=1e-5)


def test_a_table_names_what_was_not_measured() -> None:
    found = {"packed_over_padded.short": 1.5, "overhead_share": 0.06}
    said = dict(verdicts(found, BARS))
    assert said["packed_over_padded.short ≥ 1.4"] == "pass: 1.5"
    assert said["overhead_share ≤ 0.05"] == "FAIL: 0.06"
    assert said["train_over_trl ≥ 1.5"] == "absent: not measured"
    assert "| over padded | 1.5 |" in table(found, 11, 3, "here.")
    assert "| Qwen | 0.5 | – |" in gpu_table({"Qwen": {"mfu": 0.5}}, 8192, "there.")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_bench_runs_from_end_to_end_without_a_peer(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = ["--tiny", "--repetitions", "1", "--json", str(tmp_path / "out.json"), "--peer", "nowhere"]
    command = [sys.executable, "-m", "bench.learner", *words]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=380)
    found = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert found.keys() >= {bar.figure for bar in BARS} - {"train_over_trl"}
    assert 0 < found["overhead_share"] < 1
    assert found["loss_memory_ratio"] < 0.6
