"""A run folder that takes no more bytes: the run ends with a message, and what was saved before stays whole."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest
from processes import FOR_EVER, child, finished, started, until

from asyncrl.learner import checkpoint


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_ends_the_run_by_name(config_file: Path) -> None:
    """A limit on the size of files stands in for a full disk: writing fails at the same place."""
    run = config_file.parent / "it"
    with started("asyncrl", "train", str(config_file), FOR_EVER) as launcher:
        until(lambda: checkpoint.to_resume(run), "a whole checkpoint", launcher)
        learner = child(launcher, "asyncrl", "learner")
        # Log and metrics still fit; the shards of this model, some 300 kB, do not.
        resource.prlimit(learner.pid, resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        code, printed = finished(launcher)
    assert code == 9, printed
    assert "learner ended (exit code 9) before the run was over: cannot write" in printed
    assert re.search(r"\(\d+ bytes free\): '.*/it/checkpoints/", printed), printed
    assert_saved(run)


@pytest.mark.slow
def test_a_journal_that_does_not_fit_ends_the_run_by_name(config_file: Path) -> None:
    run = config_file.parent / "it"
    with started("asyncrl", "train", str(config_file), FOR_EVER) as launcher:
        until(lambda: checkpoint.to_resume(run), "a whole checkpoint", launcher)
        queue = child(launcher, "asyncrl", "queue")
        size = (run / "queue" / "journal").stat().st_size
        resource.prlimit(queue.pid, resource.RLIMIT_FSIZE, (size + 2000, resource.RLIM_INFINITY))
        code, printed = finished(launcher)
    assert code == 9, printed
    assert f"bytes free): '{run}/queue/journal'" in printed
    assert "queue ended (exit code 9) before the run was over: cannot write" in printed
    assert "started again" not in printed
    assert_saved(run)


def assert_saved(run: Path) -> None:
    whole = checkpoint.to_resume(run)
    assert whole is not None
    assert whole[1].version >= 2
