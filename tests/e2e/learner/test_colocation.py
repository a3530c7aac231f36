"""Pools that take turns on the same devices: the same run, one of them at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import (
    FOR_EVER,
    child,
    counts_of,
    final_weights,
    finished,
    started,
    succeeded,
    until_trained,
    versions,
)
from synchronous_runs import synchronous_runs

from asyncrl.observability.run_files import RunFiles
from asyncrl.observability.timeline import Span

TURNS = ("placement.colocate=true", "sync.staging=host", "sync.snapshot_device=host")


def spans(run: Path, process: str, lane: str, *names: str) -> list[Span]:
    files = RunFiles(run)
    files.read()
    found = files.timeline.processes[process].lanes[lane].spans
    return [span for span in found if span.name in names]


def test_a_colocated_run_is_the_split_one_bit_for_bit_and_pools_never_compute_together(
    config_file: Path,
) -> None:
    shared = ("run.versions=3", "generator.count=2", "generator.max_tokens=6", "generator.slots=8")
    shared += ("launch.learner_restarts=0",)
    split, colocated = synchronous_runs(config_file, shared, split=(), colocated=TURNS)
    theirs, ours = final_weights(split), final_weights(colocated)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    trained = spans(colocated, "learner", "learner", "compute/forward_backward", "compute/optimizer")
    generated = [
        span
        for name in ("generator-0", "generator-1")
        for span in spans(colocated, name, "engine", "compute")
    ]
    assert len(trained) >= 3
    assert len(generated) >= 3
    assert [
        (one, other)
        for one in trained
        for other in generated
        if min(one.end, other.end) - max(one.start, other.start) > 1e-3
    ] == []


@pytest.mark.parametrize("victim", ["generator", pytest.param("learner", marks=pytest.mark.slow)])
def test_a_killed_process_keeps_nobody_from_the_device(config_file: Path, victim: str) -> None:
    """Asynchronously, with evaluations between the phases."""
    run, words = (
        config_file.parent / "it",
        (str(config_file), *TURNS, "evaluation.every=2", "checkpoint.every=1"),
    )
    with started("asyncrl", "train", *words, FOR_EVER) as launcher:
        until_trained(run, 2, launcher)
        child(launcher, victim).kill()
        until_trained(run, versions(run)[-1] + 3, launcher)
        launcher.terminate()
        code, printed = finished(launcher)
    assert code == 10, printed
    last = versions(run)[-1]
    with started("asyncrl", "train", *words, "run.resume=true", f"run.versions={last + 1}") as launcher:
        succeeded(launcher)
    assert counts_of(run) == (last + 1, 4 * (last + 1), 0)
