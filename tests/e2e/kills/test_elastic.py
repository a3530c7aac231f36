"""Generators that are added to a run, killed, and taken away while it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import (
    FOR_EVER,
    child,
    counts_of,
    finished,
    ran,
    started,
    succeeded,
    until,
    until_trained,
    versions,
)

GENERATORS = ("generator.count=1", "launch.learner_restarts=0")


@pytest.mark.parametrize("grace_s", [30, pytest.param(0, marks=pytest.mark.slow)])
def test_generators_come_and_go_while_the_run_goes_on(config_file: Path, grace_s: int) -> None:
    run = config_file.parent / "it"

    def text(path: str) -> str:
        return (run / path).read_text() if (run / path).exists() else ""

    words = (str(config_file), FOR_EVER, *GENERATORS, f"generator.grace_s={grace_s}")
    with started("asyncrl", "train", *words) as launcher:
        until_trained(run, 2, launcher)
        assert "from now on generators: 3" in ran("asyncrl", "scale", str(run), "3")
        until(lambda: '"generate"' in text("trace/generator-2.jsonl"), "rollouts of generator-2", launcher)
        child(launcher, "generator-1").kill()
        ran("asyncrl", "scale", str(run), "1")
        until(
            lambda: "leases returned to the queue" in text("logs/generator-2.log"),
            "the end of generator-2",
            launcher,
        )
        ended = '"event":"ended","process":"generator-2"'
        until(lambda: ended in text("trace/launcher.jsonl"), "the launcher to see its end", launcher)
        until_trained(run, versions(run)[-1] + 2, launcher)
        launcher.terminate()
        code, printed = finished(launcher)
    assert code == 10, printed
    assert "generators: 3; generator-1 starts, generator-2 starts" in printed
    assert "generator-2 has left (exit code 0)" in printed
    assert ("has finished its tasks and leaves" in text("logs/generator-2.log")) == (grace_s > 0)
    last = versions(run)[-1]
    with started("asyncrl", "train", *words, "run.resume=true", f"run.versions={last + 2}") as launcher:
        succeeded(launcher)
    assert versions(run) == list(range(1, last + 3))
    assert counts_of(run) == (last + 2, 4 * (last + 2), 0)
