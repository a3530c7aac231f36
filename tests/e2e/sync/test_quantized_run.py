"""A run whose generators draw with projections in 8 bits, of a learner whose ranks cut their rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_functions import LENGTH
from processes import counts_of, ran, rows

pytestmark = pytest.mark.slow


def test_generators_draw_with_int8_and_the_learner_weighs_it(config_file: Path) -> None:
    """Fresh tokens differ from the learner's log-probs by what 8 bits cost: by more than rounding in float32. Each
    version is waited for, so that changes of the quantized elements travel too."""
    words = ("generator.quantization=int8", "algorithm.correction.kind=tis", "algorithm.proximal=frozen")
    ranks = ("learner.processes=2", "learner.parallel.tensor=2")
    changes = ("sync.delta=always", "learner.optimizer.lr=1e-5", "queue.max_staleness=0", LENGTH)
    ran("asyncrl", "train", str(config_file), *words, *ranks, *changes)
    run = config_file.parent / "it"
    assert counts_of(run) == (4, 16, 0)
    compared = [row for row in rows(run) if row.get("train/logprob_gap/train/tokens")]
    assert compared
    assert all(1e-5 < row["train/logprob_gap/train/mean"] < 0.002 for row in compared)
    last = [row for row in rows(run) if "sync/bytes" in row][-1]
    assert 0 < last["sync/delta_bytes_ratio"] < 0.5
