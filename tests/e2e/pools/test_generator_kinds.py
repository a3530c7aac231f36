"""Runs with generators of several kinds, `placement.generators`."""

from __future__ import annotations

from pathlib import Path

import missing
import pytest
from processes import (
    FOR_EVER,
    STARTS_S,
    Process,
    child,
    counts_of,
    finished,
    ran,
    started,
    until,
    until_trained,
    versions,
)

from asyncrl.config.load import load_config
from asyncrl.generator.engines.device_turn import engine_lock
from asyncrl.observability.run_files import RunFiles
from asyncrl.observability.timeline import Span
from asyncrl.tasks.addition import write_model_folder

SMALL = "placement.generators.small={slots: 4, kv: recompute, speculation: {tokens: 4}}"
TURNS = ("placement.colocate=true", "sync.staging=host", "sync.snapshot_device=host")


def until_made(run: Path, generator: str, groups: int, launcher: Process) -> None:
    trace = run / "trace" / f"{generator}.jsonl"
    until(
        lambda: trace.exists() and trace.read_text().count('"generate"') >= groups,
        f"{groups} groups of {generator}",
        launcher,
        deadline_s=STARTS_S,
    )


def train_beside(run: Path, generator: str, *words: str) -> None:
    """Train until this generator has made 8 groups, for 4 versions more, and stop the run."""
    with started("asyncrl", "train", *words, FOR_EVER) as launcher:
        until_made(run, generator, 8, launcher)
        until_trained(run, max(versions(run), default=0) + 4, launcher)
        launcher.terminate()
        code, printed = finished(launcher)
    assert code == 10, printed


def spans(run: Path, process: str, lane: str, *names: str) -> list[Span]:
    files = RunFiles(run)
    files.read()
    lanes = files.timeline.processes[process].lanes
    return [span for span in lanes[lane].spans if span.name in names] if lane in lanes else []


def test_pools_of_two_kinds_make_groups_and_are_scaled_and_restarted_by_themselves(config_file: Path) -> None:
    run = config_file.parent / "it"

    def text(path: str) -> str:
        return (run / path).read_text() if (run / path).exists() else ""

    with started("asyncrl", "train", str(config_file), FOR_EVER, SMALL) as launcher:
        until_trained(run, 2, launcher)
        assert "from now on generators of small: 2" in ran(
            "asyncrl", "scale", str(run), "2", "--pool", "small"
        )
        child(launcher, "generator-small-0").kill()
        until_made(run, "generator-small-1", 1, launcher)
        again = '"event":"restarted","process":"generator-small-0"'
        until(lambda: again in text("trace/launcher.jsonl"), "the restart of the killed one", launcher)
        assert "from now on generators of small: 1" in ran(
            "asyncrl", "scale", str(run), "1", "--pool", "small"
        )
        until_trained(run, versions(run)[-1] + 2, launcher)
        launcher.terminate()
        code, printed = finished(launcher)
    assert code == 10, printed
    assert "generators of small: 2; generator-small-1 starts" in printed
    assert "generators of small: 1; generator-small-1 leaves" in printed
    assert spans(run, "generator-0", "rollouts", "generate")
    assert not text("trace/generator-1.jsonl")
    trained = counts_of(run)[1]
    assert trained == 4 * versions(run)[-1]


@pytest.mark.slow
def test_a_pool_with_devices_of_its_own_takes_no_turns(config_file: Path) -> None:
    """The generators that share the learner's devices do."""
    run = config_file.parent / "it"
    words = (*TURNS, "placement.generators.apart={slots: 8, devices: ''}")
    train_beside(run, "generator-apart-0", str(config_file), *words)
    trained = spans(run, "learner", "learner", "compute/forward_backward", "compute/optimizer")

    def beside(generator: str) -> list[Span]:
        """Its steps while the learner computes."""
        steps = spans(run, generator, "engine", "compute")
        assert steps
        return [
            step
            for step in steps
            if any(min(step.end, one.end) - max(step.start, one.start) > 1e-3 for one in trained)
        ]

    assert beside("generator-0") == []
    assert spans(run, "generator-apart-0", "engine", "compute")
    # Its steps and the learner's are of milliseconds: whether two meet is chance. It has no lock to wait for.
    config = load_config(run / "config.yaml")
    assert engine_lock(config.of_pool("apart"), "generator-apart-0") is None
    assert engine_lock(config, "generator-0") is not None


@pytest.mark.slow
def test_vllm_and_the_embedded_engine_make_groups_of_one_run(config_file: Path) -> None:
    """And decisions name each generator's own configuration."""
    pytest.importorskip("vllm", reason=missing.VLLM)
    run, model = config_file.parent / "it", config_file.parent / "model"
    write_model_folder(model, hidden_size=128, layers=2)  # vLLM wants heads of 32
    words = (
        f"model.path={model}",
        "placement.generators.served={engine: vllm, slots: 8}",
        "evaluation.source=null",
        "telemetry.decisions=true",
        "learner.groups_deadline_s=300",
    )
    train_beside(run, "generator-served-0", str(config_file), *words)
    kept = (load_config(path) for path in (run / "decisions").glob("config-*.yaml"))
    assert {config.generator.engine: [*config.generator_pools] for config in kept} == {
        "transformers": ["", "served"],  # the learner's, and that of its own generator
        "vllm": [""],
    }
