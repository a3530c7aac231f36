"""`examples/reach.py`, shortened: actions that are tokens, chosen by pictures of several turns."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import rows

import asyncrl
from asyncrl.config.functions.function_spec import load_function


@pytest.mark.slow
def test_a_hand_is_moved_by_tokens_that_are_actions(tmp_path: Path) -> None:
    """The gap of the log-probs would show pictures that the learner lacks, or that stand elsewhere."""
    words = [f"run.dir={tmp_path}", "sft.steps=20", "run.versions=4", "batch.groups=8"]
    words += ["evaluation.source=null", "learner.threads=1"]
    warm = load_function("examples/reach.py:warm_up", "example")(words)
    summary = asyncrl.train("examples/reach.yaml", [f"model.path={warm}", *words])
    assert (summary["versions"], summary["rollouts_trained"]) == (4, 4 * 8 * 8)
    told = rows(tmp_path / "reach")
    assert max(row["rollout/segments/mean"] for row in told) > 1
    assert all(row["train/grad_norm"] > 0 for row in told)
    gaps = [row["train/logprob_gap/train/max"] for row in told if row.get("train/logprob_gap/train/tokens")]
    assert gaps
    assert max(gaps) < 1e-3
